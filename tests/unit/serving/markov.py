"""A target whose next token depends on the last one alone, decoded by rounds of drafts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from sglang_hyperdflash.draft.adjust import adjust_rows
from sglang_hyperdflash.draft.filters import Sampling
from sglang_hyperdflash.draft.propose import NO_ADJUSTMENTS, Candidates, Draws, propose
from sglang_hyperdflash.serving.drafting.temperature import DraftTemperature
from sglang_hyperdflash.serving.verification.exact import (
    read_rows,
    unpack,
    verify_block,
    weights_of,
)
from triton_ops.gumbel import gumbel_argmax

VOCAB, WIDTH, DRAFTS = 12, 8, 3
START, FIRST_POSITION = 0, 40


class Markov:
    """Logits ``table [V, V]`` after each token, and a drafter that is wrong in its own way."""

    head: SimpleNamespace | None = None

    def __init__(self, seed: int = 0, sure: float = 1.5, agreement: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(VOCAB, VOCAB, generator=generator) * sure
        noise = torch.randn(VOCAB, DRAFTS, VOCAB, generator=generator) * 1.5
        self.drafter = agreement * self.table.unsqueeze(1) + (1 - agreement / 2) * noise

    def candidates(self, anchor: torch.Tensor, drafts: int = DRAFTS) -> Candidates:
        scores, ids = self.drafter[anchor, :drafts].topk(WIDTH, dim=-1)
        return Candidates(ids, scores, torch.ones(*ids.shape[:2], VOCAB))


class Linked(Markov):
    """The same target; its drafts know the one before them, through a dependency head."""

    @property
    def head(self) -> SimpleNamespace:
        """Half of what the target makes of the draft before."""
        return SimpleNamespace(predecessor=0.5 * self.table, successor=torch.eye(VOCAB))


def same(sampling: Sampling, rows: int) -> Sampling:
    """One request's parameters for ``rows`` requests."""
    return sampling.repeated(rows)


def one_round(
    model: Markov,
    anchor: torch.Tensor,
    positions: torch.Tensor,
    sampling: Sampling,
    draws: Draws,
    draft_temperature: float | DraftTemperature,
    penalties: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens ``[N, width]`` of a round at ``positions [N, width]``, and accepted drafts ``[N]``.

    Of the tokens those up to the bonus count: one more than are accepted.
    """
    count, width = positions.shape
    learns = isinstance(draft_temperature, DraftTemperature)
    t = draft_temperature.current if learns else torch.full((2,), float(draft_temperature))
    adjustments = NO_ADJUSTMENTS if penalties is None else penalties.adjustments()
    block, proposal = anchor.unsqueeze(1), None
    if width > 1:
        candidates = model.candidates(anchor, width - 1)
        drafting = model.head, block, positions, sampling, draws, t, adjustments
        proposal = propose(candidates, *drafting)
        block = torch.cat([block, proposal.tokens], 1)
    logits = model.table[block]
    if penalties is not None:
        adjust_rows(logits, block, positions, *adjustments.tensors)
    kept = weights_of(logits, sampling).flatten(0, 1) if sampling.filters else None
    flat = logits.flatten(0, 1)
    rows = read_rows(flat, kept, sampling, draws, positions, all_draw=proposal is None)
    packed, p = verify_block(rows, block, positions, proposal, sampling, draws, VOCAB)
    committed = unpack(packed, count, width)
    if learns and proposal is not None:
        draft_temperature.learn(proposal, p, committed, positions, sampling, draws, VOCAB)
    return committed.tokens, committed.accept_lens.long() - 1


def decode(
    model: Markov,
    sampling: Sampling,
    seeds: torch.Tensor,
    seeded: bool,
    tokens: int,
    draft_temperature: float | DraftTemperature = 1.0,
    widths: Iterator[int] = itertools.repeat(DRAFTS + 1),  # noqa: B008
    penalties: Any = None,
) -> tuple[torch.Tensor, float]:
    """``[N, tokens]`` of N requests with one context, and the mean accepted drafts of a round.

    Args:
        widths: of the rounds, one after another. penalties: a worker's ``adjustments`` and
            ``count``, as ``test_penalised_law`` has them.
    """
    count = len(seeds)
    sampling = same(sampling, count)
    draws = Draws(seeds, torch.full((count,), seeded), not seeded)
    out = torch.full((count, tokens + DRAFTS + 1), -1)
    out[:, 0] = START
    length = torch.ones(count, dtype=torch.long)  # with the context's token
    accepted, rounds = 0.0, 0.0
    offsets = torch.arange(DRAFTS + 1)
    while int(length.min()) <= tokens:
        width = next(widths)
        anchor = out.gather(1, (length - 1).unsqueeze(1)).squeeze(1)
        positions = FIRST_POSITION + (length - 1).unsqueeze(1) + offsets[:width]
        emitted, accept = one_round(
            model, anchor, positions, sampling, draws, draft_temperature, penalties
        )
        # Requests that are done stay as they are.
        open_ = length <= tokens
        for k in range(width):
            write = open_ & (k <= accept) & (length + k < out.shape[1])
            out[write, (length + k)[write]] = emitted[write, k]
        if penalties is not None:
            penalties.count(emitted, torch.where(open_, accept + 1, 0))
        accepted += float(accept[open_].sum())
        rounds += float(open_.sum())
        length = torch.where(open_, length + accept + 1, length)
    return out[:, 1 : tokens + 1], accepted / rounds


def alone(
    model: Markov,
    sampling: Sampling,
    seeds: torch.Tensor,
    tokens: int,
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """``[N, tokens]`` of target-only decoding with the same noise: one token a step.

    Args:
        change: the logits ``[N, V]`` to use instead, given what was generated ``[N, step]``.
    """
    sampling = same(sampling, len(seeds))
    last = torch.full_like(seeds, START)
    made = []
    for step in range(tokens):
        logits = model.table[last]
        if change is not None:
            before = torch.stack(made, 1) if made else seeds.new_empty(len(seeds), 0)
            logits = change(logits, before)
        weights = weights_of(logits.unsqueeze(1), sampling).squeeze(1)
        drawn = gumbel_argmax(weights, seeds, torch.full_like(seeds, FIRST_POSITION + step))
        last = torch.where(sampling.greedy, logits.argmax(-1), drawn)
        made.append(last)
    return torch.stack(made, 1)


def one(**values: float) -> Sampling:
    """The parameters of one request."""
    return Sampling(
        torch.tensor([float(values.get("temperature", 1.0))]),
        torch.tensor([int(values.get("top_k", 1 << 30))]),
        torch.tensor([float(values.get("top_p", 1.0))]),
        torch.tensor([float(values.get("min_p", 0.0))]),
        "top_k" in values,
        "top_p" in values,
        "min_p" in values,
    )
