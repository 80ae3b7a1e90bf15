"""Who is in the batch: sampling parameters, seeds, penalties, and what each has generated.

Every request draws from hashed noise, so every request has a seed: the client's (SGLang's
``sampling_seed``, OpenAI's ``seed``; 42 under deterministic inference, as SGLang has it), or one
drawn when it is first seen. Tensor-parallel ranks see the same requests in the same order, so they
draw the same seeds. The tensors of a batch are kept while its requests stay.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.runtime_context import get_exec
from sglang.srt.utils import async_h2d

from sglang_hyperdflash.draft.filters import Sampling
from sglang_hyperdflash.serving.verification.exact import Draws
from sglang_hyperdflash.serving.verification.penalties import EndTokens, GeneratedCounts, Penalties

DETERMINISTIC_SEED = 42
LONGEST = 1 << 31
# Added to a drawn seed for each retraction of its request. Odd.
RETRACTION_STREAM = 0x5851F42D4C957F2D
_SEED = "hyperdflash_seed"


class Seeds:
    """Seeds of requests; drawn ones differ between servers, requests and choices of ``n``."""

    def __init__(self, random_seed: int) -> None:
        self.random_seed, self.drawn = random_seed, 0

    def of(self, request: Any) -> tuple[int, bool]:
        """``(seed, the client's)``; a request keeps its seed; over a retraction a client's alone.

        A decode node drops the last round of a request that it retracts, and drafts the same block
        again. Its draft temperature may by then have been learnt from the dropped round, so the
        noise of that may not come again.
        """
        found = getattr(request, _SEED, None)
        if found is None:
            found = self._new(request)
            setattr(request, _SEED, found)
        seed, seeded = found
        if seeded:
            return found
        return signed(seed + request.retraction_count * RETRACTION_STREAM), False

    def _new(self, request: Any) -> tuple[int, bool]:
        seed = request.sampling_params.sampling_seed
        if seed is not None:
            return int(seed), True
        if get_exec().deterministic.enable_deterministic_inference:
            return DETERMINISTIC_SEED, True
        self.drawn += 1
        name = f"{self.random_seed} {self.drawn} {request.rid}".encode()
        digest = hashlib.blake2b(name, digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True), False


def signed(value: int) -> int:
    """``value`` as int64 keeps it."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


@dataclass(frozen=True)
class BatchRequests:
    """The requests of one forward pass, in the batch's order; bs of them.

    Attributes:
        reqs: SGLang's requests, held so that no other may take their identity.
        slots: their rows of the request pool, which change over a retraction.
        retractions: how often each was retracted.
        draws: their seeds, and which of them are the client's.
        greedy: all are greedy, and nothing changes the order of their logits.
        penalties, end_tokens: None without such requests.
        classes: how many are greedy and how many sampled.
        info: SGLang's ``SamplingBatchInfo`` of this pass.
        lengths: SGLang's ``seq_lens [bs]``, which a round's anchors are ``ahead`` of.
    """

    reqs: list[Any]
    slots: list[int]
    retractions: list[int]
    draws: Draws
    greedy: bool
    penalties: Penalties | None
    end_tokens: EndTokens | None
    classes: tuple[int, int]
    info: Any = field(default=None, compare=False)
    lengths: torch.Tensor | None = field(default=None, compare=False)
    ahead: int = 0

    def same(self, reqs: Sequence[Any], slots: list[int]) -> bool:
        """Whether these are the requests of a batch, none retracted in between."""
        return (
            slots == self.slots
            and all(a is b for a, b in zip(self.reqs, reqs, strict=True))
            and [req.retraction_count for req in reqs] == self.retractions
        )

    @cached_property
    def sampling(self) -> Sampling:
        """Their parameters, as SGLang normalises them."""
        return sampling_of(self.info)

    @cached_property
    def contexts(self) -> torch.Tensor:
        """Tokens ``[bs]`` of each context at the first row, the anchor included."""
        return self.lengths + self.ahead

    @property
    def all_greedy(self) -> bool:
        """Whether no request samples. SGLang's ``is_all_greedy`` stays False once one did."""
        return self.classes[1] == 0

    @property
    def changes_logits(self) -> bool:
        """Whether penalties, ``min_new_tokens`` or a bias change anyone's logits."""
        changed = self.penalties is not None or self.end_tokens is not None
        return changed or self.info.logit_bias is not None


class RequestState:
    """What outlives a round: seeds, generated counts, and the tensors of the batch that runs.

    Args:
        runner: the target's ``ModelRunner``; its pools are made after the worker.
        random_seed: the same on every rank (``TpModelWorker.random_seed``; the arguments' own
            differs between nodes).
    """

    def __init__(self, runner: Any, random_seed: int, device: torch.device | str) -> None:
        self.runner, self.device, self.seeds = runner, device, Seeds(random_seed)
        self.current: BatchRequests | None = None
        self._places: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()

    @cached_property
    def counts(self) -> GeneratedCounts:
        """Tokens generated by requests with penalties."""
        slots = len(self.runner.req_to_token_pool.req_to_token)
        return GeneratedCounts(slots, self.runner.model_config.vocab_size, self.device)

    def begin(self, batch: Any, prefill: bool = False) -> BatchRequests | None:
        """The requests of the pass that starts; None for a batch that samples nothing."""
        reqs, info = batch.reqs, batch.sampling_info
        if not reqs or info is None:
            self.current = None
            return None
        slots = [self._slot(req) for req in reqs]
        requests, moved = self.current, [False] * len(reqs)
        if requests is None or prefill or not requests.same(reqs, slots):
            requests, moved = gather(reqs, slots, self.seeds, self.device), self._moved(reqs, slots)
        if requests.penalties is not None:
            # A decoding request of a mixed batch goes on; all others of a prefill start.
            going_on = set(map(id, batch.decoding_reqs or ()))
            for req, slot, new in zip(reqs, slots, moved, strict=True):
                starts = new or (prefill and id(req) not in going_on)
                if starts and penalised(req.sampling_params):
                    self.counts.reset(slot, req.output_ids)
        # The anchor of a round is not in seq_lens yet.
        ahead = 0 if prefill else 1
        self.current = replace(requests, info=info, lengths=batch.seq_lens, ahead=ahead)
        return self.current

    def count(self, requests: BatchRequests, tokens: torch.Tensor, lengths: torch.Tensor) -> None:
        """The first ``lengths [bs]`` of ``tokens [bs, B]`` were generated."""
        if requests.penalties is not None:
            at, last = requests.penalties.rows, self.runner.model_config.vocab_size - 1
            self.counts.add(requests.penalties.slots, tokens[at].clamp(max=last), lengths[at])

    def _slot(self, req: Any) -> int:
        """A request's row of the request pool.

        One whose last result was processed between its batch's making and its batch's pass
        (``prefill.process_results_first``) has just left its row, which has no new owner yet.
        """
        slot = req.kv.req_pool_idx
        return self._places[req][0] if slot is None else slot

    def _moved(self, reqs: Sequence[Any], slots: list[int]) -> list[bool]:
        """Which requests are new in their slots, or were retracted since they were seen there.

        A decode node resumes a retracted request without a prefill, maybe in the slot it had.
        """
        places = [(slot, req.retraction_count) for req, slot in zip(reqs, slots, strict=True)]
        moved = [self._places.get(req) != place for req, place in zip(reqs, places, strict=True)]
        self._places.update(zip(reqs, places, strict=True))
        return moved


def gather(
    reqs: Sequence[Any], slots: list[int], seeds: Seeds, device: torch.device | str
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
        any(s and seeded for s, (_, seeded) in zip(sampled, pairs, strict=True)),
        any(s and not seeded for s, (_, seeded) in zip(sampled, pairs, strict=True)),
        not all(sampled),
    )
    chosen = [i for i, p in enumerate(parameters) if penalised(p)]
    penalties = None
    if chosen:
        values = [parameters[i] for i in chosen]
        penalties = Penalties(
            new(chosen, torch.int64),
            new([slots[i] for i in chosen], torch.int64),
            new([[p.frequency_penalty] for p in values], torch.float32),
            new([[p.presence_penalty] for p in values], torch.float32),
            new([[p.repetition_penalty] for p in values], torch.float32),
        )
    ends = _end_tokens(reqs, new)
    return BatchRequests(
        list(reqs),
        slots,
        [req.retraction_count for req in reqs],
        draws,
        not any(sampled) and penalties is None and ends is None,
        penalties,
        ends,
        (len(reqs) - sum(sampled), sum(sampled)),
    )


def penalised(parameters: Any) -> bool:
    """Whether a request's generated tokens change its logits."""
    return (
        parameters.frequency_penalty != 0.0
        or parameters.presence_penalty != 0.0
        or parameters.repetition_penalty != 1.0
    )


def _end_tokens(reqs: Sequence[Any], new: Any) -> EndTokens | None:
    found = [
        (i, req, sorted(end_tokens(req)))
        for i, req in enumerate(reqs)
        if req.sampling_params.min_new_tokens > 0
    ]
    found = [entry for entry in found if entry[2]]
    if not found:
        return None
    widest = max(len(ids) for _, _, ids in found)
    return EndTokens(
        new([i for i, _, _ in found], torch.int64),
        new([min(r.sampling_params.min_new_tokens, LONGEST) for _, r, _ in found], torch.int64),
        new([len(req.origin_input_ids) for _, req, _ in found], torch.int64),
        new([ids + ids[:1] * (widest - len(ids)) for _, _, ids in found], torch.int64),
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


def sampling_of(info: Any) -> Sampling:
    """SGLang's ``SamplingBatchInfo`` as rows of :class:`Sampling`."""
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
