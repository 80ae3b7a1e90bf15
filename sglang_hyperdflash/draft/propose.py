"""The drafts of a block and the distribution ``q`` of each: one pure function for all callers.

    s_k = u_k + head(x_{k-1}, h_k)             # u_k: LM head of h_k, its top K; x_0 the anchor
    q_k = filter(softmax(s_k / (T t)))         # t = 0: the largest alone
    x_k = argmax_c(log q_k[c] + g(seed, position_k, c))

``g`` is Gumbel noise, a hash of its arguments (``triton_ops.gumbel``): ``x_k`` is a draw from
``q_k``. Any ``q`` is exact under verification: the filters and the draft temperature ``t``, which
``serving.drafting.temperature`` learns, change acceptance only. Greedy rows take the largest ``s``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_hyperdflash.draft.filters import Sampling, filter_candidates
from triton_ops.gumbel import gumbel_noise

# Temperatures of q relative to the client's; 0 drafts the argmax.
DRAFT_TEMPERATURES = (0.0, 0.5, 0.7, 1.0)

# (previous tokens [bs], the head's gates of the rows [bs, r], candidate ids [bs, K]) -> scores to
# add, [bs, K]: draft.dependency.
Head = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# (draft's number from 0, ids [bs, K], scores [bs, K], drafts so far [bs, k]) -> scores [bs, K].
Adjust = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Candidates:
    """The K likeliest tokens of each draft row.

    Attributes:
        ids: ``[bs, D, K]`` int64, different within a row; scores: their logits, fp32.
        gates: ``[bs, D, r]`` fp32, what a head reads of the rows; None without one.
    """

    ids: torch.Tensor
    scores: torch.Tensor
    gates: torch.Tensor | None = None


@dataclass(frozen=True)
class Proposal:
    """Drafts and what verification needs of them; D drafts, K candidates.

    Attributes:
        tokens: ``[bs, D]`` int64; ids: ``[bs, D, K]`` int64.
        q: ``[bs, D, K]`` fp32, each row's distribution; one-hot where ``t`` is 0 or it is greedy.
        choice: ``[bs, D, 1]`` int64, each draft's index among its candidates.
        scores: ``[bs, D, K]`` fp32, before temperature; noise: ``[bs, D, K]`` fp64.
    """

    tokens: torch.Tensor
    ids: torch.Tensor
    q: torch.Tensor
    choice: torch.Tensor
    scores: torch.Tensor
    noise: torch.Tensor


def draft_distribution(
    scores: torch.Tensor, sampling: Sampling, draft_temperature: torch.Tensor
) -> torch.Tensor:
    """``q [N, K]`` fp32 of candidate ``scores [N, K]``, normalised whatever the drafter gives.

    A row with a NaN, or without a possible candidate, is one-hot at the candidate that is drafted.

    Args:
        draft_temperature: ``[N]``, ``t`` of each row.
    """
    argmax = (draft_temperature <= 0) | sampling.greedy
    temperature = (sampling.temperatures * draft_temperature).masked_fill(argmax, 1.0)
    q = torch.softmax(scores / temperature.unsqueeze(-1), dim=-1)
    q = filter_candidates(q, sampling)
    first = torch.zeros_like(q).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
    # Softmax and filters spread one NaN over its row.
    return torch.where((argmax | q[:, 0].isnan()).unsqueeze(-1), first, q)


def propose_greedy(candidates: Candidates, anchor: torch.Tensor, head: Head | None) -> torch.Tensor:
    """The drafts ``[bs, D]`` int64 of greedy requests: each the largest ``s`` after the one before.

    Args:
        anchor: ``[bs]`` int64, the last committed token; head: the dependency head, or None.
    """
    if head is None:  # as argmax over the vocabulary: the lowest id among equals
        lower = candidates.scores < candidates.scores.amax(-1, keepdim=True)
        return candidates.ids.masked_fill(lower, 1 << 62).amin(-1)
    tokens, previous = [], anchor
    for k in range(candidates.ids.shape[1]):
        ids = candidates.ids[:, k]
        scores = candidates.scores[:, k] + head(previous, candidates.gates[:, k], ids)
        previous = ids.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)
        tokens.append(previous)
    return torch.stack(tokens, 1)


def propose(
    candidates: Candidates,
    anchor: torch.Tensor,
    head: Head | None,
    sampling: Sampling,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    draft_temperature: torch.Tensor,
    adjust: Adjust | None = None,
) -> Proposal:
    """Draft a block; drafts depend on each other through ``head`` and ``adjust`` only.

    Args:
        anchor: ``[bs]`` int64, the last committed token.
        head: the dependency head, or None.
        sampling: of the bs requests; seeds: ``[bs]`` int64; draft_temperature: ``[bs]``.
        positions: ``[bs, D]`` int64: of the token before each draft.
        adjust: penalties and bias, or None.
    """
    bs, drafts, width = candidates.ids.shape

    def flat(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(drafts)

    noise = gumbel_noise(flat(seeds), positions.reshape(-1), candidates.ids.view(-1, width))
    noise = noise.view(bs, drafts, width)
    if head is None and adjust is None:
        rows = draft_distribution(
            candidates.scores.view(-1, width), sampling.repeated(drafts), flat(draft_temperature)
        )
        q = rows.view(bs, drafts, width)
        choice = (noise + q.log()).argmax(-1, keepdim=True)
        tokens = candidates.ids.gather(-1, choice).squeeze(-1)
        return Proposal(tokens, candidates.ids, q, choice, candidates.scores, noise)
    steps: list[tuple[torch.Tensor, ...]] = []
    previous = anchor
    for k in range(drafts):
        ids, scores = candidates.ids[:, k], candidates.scores[:, k]
        if head is not None:
            scores = scores + head(previous, candidates.gates[:, k], ids)
        if adjust is not None:
            so_far = torch.stack([step[0] for step in steps], 1) if steps else ids[:, :0]
            scores = adjust(k, ids, scores, so_far)
        q = draft_distribution(scores, sampling, draft_temperature)
        choice = (noise[:, k] + q.log()).argmax(-1, keepdim=True)
        previous = ids.gather(-1, choice).squeeze(-1)
        steps.append((previous, q, choice, scores))
    tokens, q, choice, scores = (torch.stack(part, 1) for part in zip(*steps, strict=True))
    return Proposal(tokens, candidates.ids, q, choice, scores, noise)
