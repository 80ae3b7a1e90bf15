"""Rounds rehearsed at start: their memory, as large as it will be, and their kernels."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import torch

from sglang_hyperdflash.draft.adjust import NEUTRAL, Adjustments, adjust_rows
from sglang_hyperdflash.draft.filters import Sampling
from sglang_hyperdflash.draft.propose import Candidates, Draws, propose, propose_greedy
from sglang_hyperdflash.serving.verification.exact import (
    Rows,
    read_rows,
    verify_block,
    weights_of,
)
from triton_ops.copies import KINDS, Copies, copy_drafts

logger = logging.getLogger(__name__)

# Kinds of rehearsed numbers: any; with many equal ones; with NaN, infinities, and rows of nothing
# possible.
RANDOM, TIES, BROKEN = "random", "ties", "NaN"
NAN, INF, NO_TOP_K = float("nan"), float("inf"), 1 << 30
REQUESTS = 4


def verification_peak(renorm: Any, candidates: int, bs: int, logits: torch.Tensor) -> int:
    """Peak bytes of one verification of ``logits [bs * B, V]`` on CUDA.

    Half the requests have a seed, all filter by top-k, top-p and min-p: the most there is.

    Args:
        renorm: of ``exact.weights_of``. candidates: K of each draft.
    """
    block, device = len(logits) // bs, logits.device
    ones, seeds = torch.ones(bs, device=device), torch.arange(bs, device=device)
    limits = torch.full((bs,), candidates, dtype=torch.int32, device=device)
    sampling = Sampling(ones, limits, 0.95 * ones, 0.01 * ones, True, True, True, True)
    draws = Draws(seeds, seeds % 2 == 0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["allocated_bytes.all.current"]
    # The proposal lives through its verification.
    ids = torch.arange(candidates, device=device).repeat(bs, block - 1, 1)
    likeliest = Candidates(ids, torch.zeros_like(ids, dtype=torch.float32))
    zeros = torch.zeros(bs, block, dtype=torch.int64, device=device)
    proposal = propose(likeliest, None, zeros, zeros, sampling, draws, 0.5)
    kept = weights_of(logits.view(bs, block, -1), sampling, renorm).flatten(0, 1)
    rows = read_rows(logits, kept, sampling, draws, zeros, all_draw=False)
    verify_block(rows, zeros, zeros, proposal, sampling, draws, logits.shape[-1])
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["allocated_bytes.all.peak"] - before


@dataclass(frozen=True)
class Numbers:
    """The inputs of rehearsed rounds, the same in every process.

    Attributes:
        vocabulary, candidates: V and K. width: rows of a block.
    """

    kind: str
    vocabulary: int
    candidates: int
    width: int
    device: torch.device | str
    generator: torch.Generator
    requests: int = REQUESTS
    drafts: int = 1  # of a whole block, which have copies

    def integers(self, low: int, high: int, *shape: int, dtype=torch.int64) -> torch.Tensor:
        """From ``low`` to below ``high``."""
        drawn = torch.randint(low, high, shape, generator=self.generator, dtype=dtype)
        return drawn.to(self.device)

    def cycle(self, *values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A value for each request, in turn."""
        each = [values[b % len(values)] for b in range(self.requests)]
        return torch.tensor(each, dtype=dtype).to(self.device)

    def scores(self, *shape: int) -> torch.Tensor:
        """Logits ``[..., n]`` fp32 of the kind."""
        drawn = torch.randn(shape, generator=self.generator) * 4
        drawn = drawn.round().clamp(max=10.0) if self.kind == TIES else drawn
        return self.broken(drawn.to(self.device))

    def broken(self, scores: torch.Tensor) -> torch.Tensor:
        """With NaN in some rows, infinities, and nothing possible, if that is the kind."""
        if self.kind == BROKEN:
            rows = scores.view(-1, scores.shape[-1])
            rows[1::5, rows.shape[1] // 2], rows[2::5, -1], rows[3::5] = NAN, INF, -INF
        return scores

    def rows(self, candidates: Candidates | None) -> torch.Tensor:
        """A target's logits ``[bs * width, V]``, which has most of its mass on the candidates."""
        shape = self.requests, self.width, self.vocabulary
        logits = replace(self, kind=RANDOM).scores(*shape)
        if candidates is not None:
            likely = candidates.scores.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            logits[:, :-1].scatter_(2, candidates.ids, likely + 12.0)
        logits = logits.round() if self.kind == TIES else logits
        return self.broken(logits.flatten(0, 1))

    def candidates_of_drafts(self, head: Any) -> Candidates:
        """K different ids of each draft, and what a dependency ``head`` reads, or None."""
        shape = self.requests, self.width - 1, self.candidates
        step = self.vocabulary // self.candidates
        ids = self.integers(0, step, *shape[:2], 1) + self.integers(0, 1, shape[2])
        ids += torch.arange(shape[2], device=self.device) * step
        gates = None
        if head is not None:
            gates = self.scores(*shape[:2], head.gate.out_features).nan_to_num(nan=0.0) / 16
        return Candidates(ids, self.scores(*shape), gates)

    def copies(self, candidates: Candidates | None) -> Copies:
        """Copies among the ``candidates`` and any others, of every kind of match and of none."""
        rows = self.integers(-1, self.vocabulary, self.requests, 2 * self.drafts + 1)
        if candidates is not None:
            rows[:, 1 : self.width - 1] = candidates.ids[:, 1:, 0]
        rows[:, -1] = self.cycle(4, 1, 0, 2, 3, dtype=torch.int64)
        return Copies(rows, self.integers(0, 9, 2, KINDS, 2, dtype=torch.int32))

    def history(self, tokens: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The first arguments of ``copy_drafts``: few different tokens, so that many match."""
        history = self.integers(-1, 4, self.requests, 2000, dtype=torch.int32)
        slots = torch.arange(self.requests).to(self.device)
        positions = self.cycle(5, 1400, 2500, dtype=torch.int64)
        return history, slots, positions, tokens % 4, lengths

    def kept(self, logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        """What any filter might keep of ``logits [N, V]``: half of each row, and its largest."""
        probs = torch.softmax(logits / temperatures.repeat_interleave(self.width).unsqueeze(-1), -1)
        half = self.integers(0, 2, *probs.shape).bool()
        return probs * (half | (probs == probs.amax(-1, keepdim=True)))

    def changes(self, candidates: Candidates | None) -> list[Adjustments]:
        """Nothing that changes logits, then each part and all together; one request has none."""
        vocabulary = self.vocabulary
        counts = self.integers(0, 3, self.requests, vocabulary, dtype=torch.int32)
        some = NEUTRAL, (0.3, 0.0, 1.0), (0.0, 0.7, 1.3)
        penalties = torch.tensor([some[b % 3] for b in range(self.requests)]).to(self.device)
        ends = self.integers(0, vocabulary, self.requests, 2)
        if candidates is not None:
            ends[:, 0] = candidates.ids[:, 0, 0]
        slots = torch.arange(self.requests).to(self.device)
        bias = self.scores(self.requests, vocabulary)
        known = (
            {"counts": counts, "slots": slots, "penalties": penalties},
            {"end_ids": ends, "earliest": self.integers(1, 8, self.requests)},
            {"bias": bias.nan_to_num(nan=0.0, posinf=1.0, neginf=-INF)},
        )
        return [
            Adjustments(**{name: tensor for part in chosen for name, tensor in part.items()})
            for n in range(4)
            for chosen in combinations(known, n)
        ]


def rehearse(
    head: Any,
    candidates: int,
    vocabulary: int,
    widths: Iterable[int],
    device: torch.device | str,
    kind: str = RANDOM,
    requests: int = REQUESTS,
    copied: int = 0,
) -> None:
    """Run each operator of a round once for every kind of batch: none compiles while serving.

    Args:
        head: the dependency head, or None; candidates: K of each draft; widths: of rounds.
        kind: of numbers. copied: drafts of a whole block that may be copies; 0 without copies.
    """
    for width in widths:
        begun, generator = time.monotonic(), torch.Generator().manual_seed(width)
        numbers = Numbers(kind, vocabulary, candidates, width, device, generator, requests, copied)
        _rehearse_width(numbers, head)
        logger.info("HYPERDFLASH: kernels of width %d: %.0f s", width, time.monotonic() - begun)


def _rehearse_width(numbers: Numbers, head: Any) -> None:
    """Rounds of one width: with and without filters and seeds, with all that changes logits."""
    width, cycle = numbers.width, numbers.cycle
    requests, vocabulary = numbers.requests, numbers.vocabulary
    drafted = numbers.candidates_of_drafts(head) if width > 1 else None
    copies = numbers.copies(drafted) if numbers.drafts else None
    logits, changes = numbers.rows(drafted), numbers.changes(drafted)
    block = numbers.integers(0, vocabulary, requests, width)
    positions = numbers.integers(0, 9, requests, 1)
    positions = positions + torch.arange(width, device=numbers.device)
    seeds = numbers.integers(0, 1 << 60, requests)
    # Greedy and seeded requests follow the target for as many drafts as their number.
    follow = torch.arange(requests).unsqueeze(1) > torch.arange(width - 1)
    follow = follow.to(numbers.device)
    if drafted is not None:
        propose_greedy(drafted, block[:, 0], head, copies)
    temperatures = cycle(1.0, 0.7, 1.3)
    half = numbers.kept(logits, temperatures)
    settings = ((False, False), (True, False), (True, True))
    for (filters, joint), seeded in product(settings, (True, False)):
        top_ks = cycle(NO_TOP_K, 1, 20 if filters else NO_TOP_K, dtype=torch.int32)
        limits = top_ks, cycle(0.9, 1.0, 0.7), cycle(0.0, 0.05)
        sampling = Sampling(temperatures, *limits, filters, filters, filters, joint)
        kept = half if filters else None
        draws = Draws(seeds, torch.full_like(seeds, seeded).bool(), not seeded)
        asked, proposal, tokens = (sampling, draws), None, block
        rows = read_rows(logits, kept, *asked, positions, all_draw=drafted is None)
        if drafted is not None:
            for change in changes:
                given = drafted, head, block, positions, *asked, 0.5, change, copies
                proposal = propose(*given)
            target = rows.tokens.view(requests, width)[:, :-1]
            follows = follow & (seeded | (top_ks == 1).unsqueeze(1))
            drafts = torch.where(follows, target, proposal.tokens)
            tokens = torch.cat([block[:, :1], drafts], 1)
        verify_block(rows, tokens, positions, proposal, *asked, vocabulary)
        verify_block(Rows(rows.tokens), tokens, positions, None, *asked, vocabulary)
        # Batches without drafts, of greedy requests with penalties among others.
        read_rows(logits, None, *asked, positions, all_draw=True)
    if copies is not None:
        history = numbers.history(block, cycle(width, 1, dtype=torch.int32))
        given = *history, block[:, 1:] % 4, cycle(1, 5, dtype=torch.int32)
        copies.rows[:, :-1] %= 4
        for _ in range(2):
            copy_drafts(*given, copies.rows, copies.counts, 3)
    for change in changes[1:]:
        by_block = logits.view(requests, width, vocabulary).clone()
        adjust_rows(by_block, block, positions, *change.tensors)
