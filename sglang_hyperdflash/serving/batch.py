"""The inputs of a round: the requests of its batch, and the block of rows of each.

Every request draws from hashed noise, so every request has a seed: the client's (SGLang's
``sampling_seed``, OpenAI's ``seed``; 42 under deterministic inference, as SGLang has it), or one
drawn when it is first seen. Tensor-parallel ranks see the same requests in the same order, so they
draw the same seeds. The tensors of a batch are kept while its requests stay.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.runtime_context import get_exec
from sglang.srt.utils import async_h2d

from sglang_hyperdflash.draft.adjust import NEUTRAL, Adjustments
from sglang_hyperdflash.draft.filters import Sampling
from sglang_hyperdflash.draft.propose import Draws, Proposal

DETERMINISTIC_SEED = 42
LONGEST = 1 << 31
_NUMBER = "hyperdflash_number"


class Seeds:
    """Seeds of requests; drawn ones differ between servers, requests and choices of ``n``."""

    def __init__(self, random_seed: int) -> None:
        self.random_seed, self.drawn = random_seed, 0

    def of(self, request: Any) -> tuple[int, bool]:
        """``(seed, the client's)``; a retraction changes a drawn seed.

        A decode node drops the last round of a request that it retracts, and drafts the same block
        again, maybe of another width or by another drafter: its noise may not come again.
        """
        seed = request.sampling_params.sampling_seed
        if seed is not None:
            return int(seed), True
        if get_exec().deterministic.enable_deterministic_inference:
            return DETERMINISTIC_SEED, True
        if not hasattr(request, _NUMBER):
            self.drawn += 1
            setattr(request, _NUMBER, self.drawn)
        name = f"{self.random_seed} {getattr(request, _NUMBER)} {request.rid}".encode()
        retractions = request.retraction_count.to_bytes(8, "little")
        digest = hashlib.blake2b(name, digest_size=8, salt=retractions).digest()
        return int.from_bytes(digest, "little", signed=True), False


@dataclass(frozen=True)
class BatchRequests:
    """The requests of one forward pass, in the batch's order; bs of them.

    Attributes:
        reqs: SGLang's requests, held so that no other may take their identity.
        places: row of the request pool, and retractions so far, of each.
        draws: their seeds, and which of them are the client's.
        argmax_only: all are greedy, and nothing changes the order of their logits.
        adjustments: penalties and end tokens, without what changes from round to round.
        classes: how many are greedy and how many sampled.
        info: SGLang's ``SamplingBatchInfo`` of this pass.
        counts: ``[slots, V]``, generated tokens; None where none has penalties.
        lengths: SGLang's ``seq_lens [bs]``, without a round's anchors.
    """

    reqs: list[Any]
    places: list[tuple[int, int]]
    draws: Draws
    argmax_only: bool
    adjustments: Adjustments
    classes: tuple[int, int]
    info: Any = field(default=None, compare=False)
    counts: torch.Tensor | None = field(default=None, compare=False)
    lengths: torch.Tensor | None = field(default=None, compare=False)

    def same(self, reqs: Sequence[Any], places: list[tuple[int, int]]) -> bool:
        """Whether these are the requests of a batch, none retracted in between."""
        return places == self.places and all(map(operator.is_, self.reqs, reqs))

    @cached_property
    def sampling(self) -> Sampling:
        """Their parameters, as SGLang normalises them."""
        info = self.info
        return Sampling(
            info.temperatures.view(-1),
            info.top_ks,
            info.top_ps,
            info.min_ps,
            info.need_top_k_sampling,
            info.need_top_p_sampling,
            info.need_min_p_sampling,
            get_exec().kernel.sampling_backend == "flashinfer",
        )

    @property
    def all_greedy(self) -> bool:
        """Whether no request samples. SGLang's ``is_all_greedy`` stays False once one did."""
        return self.classes[1] == 0

    def changes(self, bias: bool = True) -> Adjustments | None:
        """What changes these requests' logits in this pass, with their bias or without it."""
        constant, added = self.adjustments, self.info.logit_bias if bias else None
        if constant.penalties is None and constant.end_ids is None and added is None:
            return None
        return replace(constant, counts=self.counts, bias=added)


class GeneratedCounts:
    """``table [slots, V]``: times each token was generated, by row of the request pool.

    It is int32: an answer may repeat a token more often than int16 holds.
    """

    def __init__(self, slots: int, vocabulary: int, device: torch.device | str) -> None:
        self.table = torch.zeros(slots, vocabulary, dtype=torch.int32, device=device)

    def reset(self, slot: int, generated: Sequence[int]) -> None:
        """A request enters with the tokens it has already generated (after a retraction)."""
        row = self.table[slot].zero_()
        if len(generated):
            # Nothing that waits for the device: other requests' rounds are in flight.
            ids = async_h2d(list(generated), dtype=torch.int64, device=row.device)
            row.index_put_((ids,), torch.ones_like(ids, dtype=row.dtype), accumulate=True)

    def add(self, slots: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor) -> None:
        """Count the first ``lengths [n]`` of ``tokens [n, B]`` in ``slots [n]``."""
        order = torch.arange(tokens.shape[1], device=tokens.device)
        real = (order < lengths.unsqueeze(1)).to(torch.int32)
        rows = slots.unsqueeze(1).expand_as(tokens)
        self.table.index_put_((rows, tokens), real, accumulate=True)


class RequestState:
    """What outlives a round: seeds, generated counts, and the tensors of the batch that runs.

    Args:
        runner: the target's ``ModelRunner``; its pools are made after the worker.
        random_seed: the same on every rank (``TpModelWorker.random_seed``; the arguments' own
            differs between nodes).

    Attributes:
        on_arrival: is told of a request's first pass in its row, and whether that is a prefill.
    """

    def __init__(self, runner: Any, random_seed: int, device: torch.device | str) -> None:
        self.runner, self.device, self.seeds = runner, device, Seeds(random_seed)
        self.current: BatchRequests | None = None
        self.history: Any = None  # the ``CopyHistory``, which is made with the pools
        self.on_arrival: Callable[[Any, bool], None] | None = None
        self._places: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()

    @cached_property
    def counts(self) -> GeneratedCounts:
        """Tokens generated by requests with penalties, a table that the start makes."""
        slots = len(self.runner.req_to_token_pool.req_to_token)
        return GeneratedCounts(slots, self.runner.model_config.vocab_size, self.device)

    def begin(self, batch: Any, prefill: bool = False) -> BatchRequests | None:
        """The requests of the pass that starts; None for a batch that samples nothing."""
        reqs, info = batch.reqs, batch.sampling_info
        if not reqs or info is None:
            self.current = None
            return None
        requests, places = self.current, [self._place(req) for req in reqs]
        if requests is None or prefill or not requests.same(reqs, places):
            requests = gather(reqs, places, self.seeds, self.device)
            # A decoding request of a mixed batch goes on; all others of a prefill start. A decode
            # node resumes a retracted one without a prefill, maybe in the row that it had.
            going_on = set(map(id, batch.decoding_reqs or ()))
            for req, place in zip(reqs, places, strict=True):
                arrives = place != self._places.get(req)
                starts = arrives or (prefill and id(req) not in going_on)
                if arrives and self.on_arrival is not None:
                    self.on_arrival(req, prefill)
                if starts and penalised(req.sampling_params):
                    self.counts.reset(place[0], req.output_ids)
                if starts and self.history is not None:
                    self.history.write(place[0], req)
                self._places[req] = place
        counts = None if requests.adjustments.penalties is None else self.counts.table
        self.current = replace(requests, info=info, counts=counts, lengths=batch.seq_lens)
        return self.current

    def count(self, requests: BatchRequests, tokens: torch.Tensor, lengths: torch.Tensor) -> None:
        """The first ``lengths [bs]`` of ``tokens [bs, B]`` were generated."""
        if requests.counts is not None:
            last = self.runner.model_config.vocab_size - 1
            self.counts.add(requests.adjustments.slots, tokens.clamp(max=last), lengths)

    def _place(self, req: Any) -> tuple[int, int]:
        """A request's row of the request pool, and its retractions.

        One whose last result was processed between its batch's making and its batch's pass
        (``prefill.process_results_first``) has just left its row, which has no new owner yet.
        """
        slot = req.kv.req_pool_idx
        return self._places[req] if slot is None else (slot, req.retraction_count)


def gather(
    reqs: Sequence[Any], places: list[tuple[int, int]], seeds: Seeds, device: torch.device | str
) -> BatchRequests:
    """Read the requests of a new batch."""
    pairs = [seeds.of(req) for req in reqs]
    parameters = [req.sampling_params for req in reqs]
    sampled = [p.top_k > 1 for p in parameters]

    def new(values: list, dtype: torch.dtype) -> torch.Tensor:
        return async_h2d(values, dtype=dtype, device=device)

    draws = Draws(
        new([seed for seed, _ in pairs], torch.int64),
        new([seeded for _, seeded in pairs], torch.bool),
        any(s and not seeded for s, (_, seeded) in zip(sampled, pairs, strict=True)),
    )
    slots = penalties = None
    if any(map(penalised, parameters)):
        slots = new([slot for slot, _ in places], torch.int64)
        penalties = new([_penalties(p) for p in parameters], torch.float32)
    ends = _end_tokens(reqs, new)
    plain = penalties is None and ends == (None, None)
    return BatchRequests(
        list(reqs),
        places,
        draws,
        not any(sampled) and plain and not any(p.logit_bias for p in parameters),
        Adjustments(None, slots, penalties, *ends),
        (len(reqs) - sum(sampled), sum(sampled)),
    )


def _penalties(parameters: Any) -> tuple[float, float, float]:
    p = parameters
    return p.frequency_penalty, p.presence_penalty, p.repetition_penalty


def penalised(parameters: Any) -> bool:
    """Whether a request's generated tokens change its logits."""
    return _penalties(parameters) != NEUTRAL


def _end_tokens(
    reqs: Sequence[Any], new: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``end_ids`` and ``earliest`` of :class:`Adjustments`."""
    waits = [req.sampling_params.min_new_tokens > 0 for req in reqs]
    ends = [sorted(end_tokens(req)) if w else [] for req, w in zip(reqs, waits, strict=True)]
    widest = max(map(len, ends), default=0)
    if not widest:
        return None, None
    minimum = [min(req.sampling_params.min_new_tokens, LONGEST) for req in reqs]
    return (
        new([ids + [-1] * (widest - len(ids)) for ids in ends], torch.int64),
        new(
            [len(req.origin_input_ids) + least for req, least in zip(reqs, minimum, strict=True)],
            torch.int64,
        ),
    )


def end_tokens(req: Any) -> set[int]:
    """Tokens that SGLang's ``BatchedMinNewTokensPenalizer`` forbids."""
    ids = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    tokenizer = req.tokenizer
    if tokenizer is not None:
        ids |= set(getattr(tokenizer, "additional_stop_token_ids", None) or ())
        ids.add(tokenizer.eos_token_id)
    # A client may name any number; only the vocabulary's have logits to forbid.
    return {int(i) for i in ids if i is not None and 0 <= i < req.vocab_size}


@dataclass(frozen=True)
class Block:
    """What draft, verification and the write of draft K/V share; bs requests of ``width`` rows.

    Attributes:
        tokens: ``[bs, width]`` int64: the anchor, the last committed token, then mask tokens, or
            the drafts.
        positions: ``[bs, width]`` int64; the anchor's is SGLang's ``seq_lens``, without it.
        plan: SGLang's ``KVLocPlan`` of the rows' target slots.
        ends_cpu: ``[bs]``, the contexts' lengths after the block, or bounds of them, on the host;
            None where SGLang knows neither.
        proposal: what the drafts were drawn from; None for argmaxes, and at width 1.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    plan: Any
    ends_cpu: torch.Tensor | None
    proposal: Proposal | None = None

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    @property
    def anchors(self) -> torch.Tensor:
        """``[bs]`` int64."""
        return self.tokens[:, 0]

    @property
    def slots(self) -> torch.Tensor:
        """``[bs * width]`` int64, the target's K/V slots of the rows."""
        return self.plan.write_virtual

    def drafted(self, drafts: torch.Tensor, proposal: Proposal | None) -> Block:
        """The block with ``drafts [bs, width - 1]`` int64."""
        tokens = torch.cat([self.tokens[:, :1], drafts], 1)
        return replace(self, tokens=tokens, proposal=proposal)


def prepare_block(batch: Any, width: int, mask_token: int, translator: Any) -> Block:
    """Lay out a round's rows in the slots that the scheduler reserved for them.

    Seam: ``KVIndexTranslator.plan_uniform_extend``, which reads the slots and writes positions and
    anchors in one launch; DSPARK's rounds begin with it too.

    Args:
        batch: a decoding ``ScheduleBatch``; its ``spec_info`` holds the anchors.
        translator: the target runner's.
    """
    lengths = batch.seq_lens
    tokens = lengths.new_full((len(lengths), width), mask_token, dtype=torch.int64)
    positions = torch.empty_like(tokens)
    # A backend that plans on the device has no lengths: what is reserved is a safe bound.
    known, reserved = batch.seq_lens_cpu, batch.spec_info.nxt_kv_lens_cpu
    plan = translator.plan_uniform_extend(
        req_pool_indices=batch.req_pool_indices,
        seq_lens=lengths,
        seq_lens_cpu=reserved if known is None else known,
        width=width,
        positions_out=positions,
        anchor_src=batch.spec_info.bonus_tokens,
        anchor_out=tokens,
    )
    return Block(tokens, positions, plan, reserved if known is None else known + width)
