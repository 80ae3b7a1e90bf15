"""What a worker knows of the requests of one forward pass: parameters, seeds, penalties.

Every request draws from hashed noise, so every request has a seed: the client's (SGLang's
``sampling_seed``, OpenAI's ``seed``; 42 under deterministic inference, as SGLang has it), or one
drawn when it is first seen. Tensor-parallel ranks see the same requests in the same order, so they
draw the same seeds. The tensors of a batch are kept while its requests stay.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.runtime_context import get_exec
from sglang.srt.utils import async_h2d

from sglang_hyperdflash.draft.filters import Sampling
from sglang_hyperdflash.serving.exact import Draws
from sglang_hyperdflash.serving.penalties import EndTokens, Penalties

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
class Requests:
    """The requests of a batch, in its order; bs of them.

    Attributes:
        reqs: SGLang's requests, held so that no other may take their identity; slots: their rows
            of the request pool, which change over a retraction.
        draws: their noise; greedy: all of them are, and nothing changes their logits' order.
        penalties, ends: None without such requests.
        retractions: how often each was retracted.
        mine: requests whose generated tokens are counted, and their rows.
        classes: how many are greedy and how many sampled.
    """

    reqs: list[Any]
    slots: list[int]
    retractions: list[int]
    draws: Draws
    greedy: bool
    penalties: Penalties | None
    ends: EndTokens | None
    mine: list[tuple[int, Any]]
    classes: tuple[int, int]

    def same(self, reqs: Sequence[Any], slots: list[int]) -> bool:
        """Whether these are the requests of a batch, none retracted in between."""
        return (
            slots == self.slots
            and all(a is b for a, b in zip(self.reqs, reqs, strict=True))
            and [req.retraction_count for req in reqs] == self.retractions
        )


def gather(
    reqs: Sequence[Any], slots: list[int], seeds: Seeds, device: torch.device | str
) -> Requests:
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
    mine = [(i, req) for i, req in enumerate(reqs) if penalised(parameters[i])]
    penalties = None
    if mine:
        chosen = [parameters[i] for i, _ in mine]
        penalties = Penalties(
            new([i for i, _ in mine], torch.int64),
            new([slots[i] for i, _ in mine], torch.int64),
            new([[p.frequency_penalty] for p in chosen], torch.float32),
            new([[p.presence_penalty] for p in chosen], torch.float32),
            new([[p.repetition_penalty] for p in chosen], torch.float32),
        )
    ends = _ends(reqs, new)
    greedy = not any(sampled) and penalties is None and ends is None
    classes = len(reqs) - sum(sampled), sum(sampled)
    return Requests(
        list(reqs),
        slots,
        [req.retraction_count for req in reqs],
        draws,
        greedy,
        penalties,
        ends,
        mine,
        classes,
    )


def penalised(parameters: Any) -> bool:
    """Whether a request's generated tokens change its logits."""
    return (
        parameters.frequency_penalty != 0.0
        or parameters.presence_penalty != 0.0
        or parameters.repetition_penalty != 1.0
    )


def _ends(reqs: Sequence[Any], new: Any) -> EndTokens | None:
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
