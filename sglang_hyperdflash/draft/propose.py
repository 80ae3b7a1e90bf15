"""The drafts of a block and the distribution ``q`` of each: one pure function for all callers.

    s_k = u_k + head(x_{k-1}, h_k)             # u_k: LM head of h_k, its top K; x_0 the anchor
    q_k = filter(softmax(s_k / (T t)))         # t = 0: the largest alone
    x_k = argmax_c(log q_k[c] + g(seed, position_k, c))

``g`` is Gumbel noise, a hash of its arguments (``triton_ops.gumbel``): ``x_k`` is a draw from
``q_k``. Any ``q`` is exact under verification: the filters and the draft temperature ``t`` change
acceptance only. Where the target's entropy is low a draw from a flat ``q`` loses: with p a point
and q = (.6, .4) it is accepted .52 of the time, the argmax .6. Greedy rows take the largest ``s``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_hyperdflash.draft.adjust import Adjustments, adjust_candidates
from sglang_hyperdflash.draft.dependency import DependencyHead, dependency_scores
from sglang_hyperdflash.draft.filters import Sampling, filter_candidates
from triton_ops.gumbel import block_seeds, gumbel_noise
from triton_ops.operator import register

NO_ADJUSTMENTS = Adjustments()


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
class Draws:
    """Which noise each request of a batch draws from.

    Attributes:
        seeds: ``[bs]`` int64; seeded: ``[bs]`` bool, by the client: verified coupled.
        any_unseeded: of the requests that are not greedy, known without a device read.
    """

    seeds: torch.Tensor
    seeded: torch.Tensor
    any_unseeded: bool = True


@dataclass(frozen=True)
class Proposal:
    """Drafts and what verification needs of them; D drafts, K candidates.

    Attributes:
        tokens: ``[bs, D]`` int64; ids: ``[bs, D, K]`` int64.
        q: ``[bs, D, K]`` fp32, each row's distribution; one-hot where ``t`` is 0 or it is greedy.
        choice: ``[bs, D]`` int64, each draft's index among its candidates.
    """

    tokens: torch.Tensor
    ids: torch.Tensor
    q: torch.Tensor
    choice: torch.Tensor


def draft_scale(sampling: Sampling, draft_temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What divides the scores of N rows at ``t``; which of them draft the argmax, ``[N]`` bool."""
    argmax = sampling.greedy | (draft_temperature <= 0)
    return (sampling.temperatures * draft_temperature).masked_fill(argmax, 1.0), argmax


def draft_distribution(
    scores: torch.Tensor, sampling: Sampling, temperature: torch.Tensor, argmax: torch.Tensor
) -> torch.Tensor:
    """``q [N, K]`` fp32 of candidate ``scores [N, K]``, normalised whatever the drafter gives.

    A row with a NaN, or without a possible candidate, is one-hot at the candidate that is drafted.

    Args:
        temperature, argmax: ``[N]`` of :func:`draft_scale`.
    """
    q = torch.softmax(scores / temperature.unsqueeze(-1), dim=-1)
    q = filter_candidates(q, sampling)
    # Softmax and filters spread one NaN over its row.
    argmax = argmax | q[:, 0].isnan()
    if not argmax.any():
        return q
    first = torch.zeros_like(q).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
    return torch.where(argmax.unsqueeze(-1), first, q)


def propose_greedy(
    candidates: Candidates, anchor: torch.Tensor, head: DependencyHead | None
) -> torch.Tensor:
    """The drafts ``[bs, D]`` int64 of greedy requests: each the largest ``s`` after the one before.

    Args:
        anchor: ``[bs]`` int64, the last committed token; head: the dependency head, or None.
    """
    tables = (None, None) if head is None else (head.predecessor, head.successor)
    gates = None if head is None else candidates.gates
    return propose_greedy_op(candidates.ids, candidates.scores, gates, *tables, anchor)


def propose_greedy_reference(
    ids: torch.Tensor,
    scores: torch.Tensor,
    gates: torch.Tensor | None,
    predecessor: torch.Tensor | None,
    successor: torch.Tensor | None,
    anchors: torch.Tensor,
) -> torch.Tensor:
    """Operator ``propose_greedy``: :func:`propose_greedy` of the tensors of its arguments."""
    if gates is None:  # as argmax over the vocabulary: the lowest id among equals
        lower = scores < scores.amax(-1, keepdim=True)
        return ids.masked_fill(lower, 1 << 62).amin(-1)
    tokens, previous = [], anchors
    for k in range(ids.shape[1]):
        at = ids[:, k]
        s = scores[:, k] + dependency_scores(predecessor, successor, previous, gates[:, k], at)
        previous = at.gather(-1, s.argmax(-1, keepdim=True)).squeeze(-1)
        tokens.append(previous)
    return torch.stack(tokens, 1)


def propose(
    candidates: Candidates,
    head: DependencyHead | None,
    block_tokens: torch.Tensor,
    positions: torch.Tensor,
    sampling: Sampling,
    draws: Draws,
    draft_temperature: float,
    adjustments: Adjustments = NO_ADJUSTMENTS,
) -> Proposal:
    """Draft a block; drafts depend on each other through ``head`` and penalties only.

    Args:
        head: the dependency head, or None.
        block_tokens: ``[bs, B]`` int64, the anchor first, the last committed token.
        positions: ``[bs, B]`` int64: of the token before each draft, the last unused.
        sampling, draws: of the bs requests.
        draft_temperature: ``t``.
    """
    s = sampling
    tables = (None, None) if head is None else (head.predecessor, head.successor)
    tokens, q, choice = propose_op(
        *(candidates.ids, candidates.scores, None if head is None else candidates.gates, *tables),
        *(block_tokens, draws.seeds, draws.seeded, positions),
        *(s.temperatures, s.top_ks, s.top_ps, s.min_ps, draft_temperature),
        *(s.filters, s.any_sequential, *adjustments.tensors),
    )
    return Proposal(tokens, candidates.ids, q, choice)


def propose_reference(
    ids: torch.Tensor,
    scores: torch.Tensor,
    gates: torch.Tensor | None,
    predecessor: torch.Tensor | None,
    successor: torch.Tensor | None,
    block_tokens: torch.Tensor,
    seeds: torch.Tensor,
    seeded: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    draft_temperature: float,
    filters: bool,
    sequential: bool,
    *adjusting: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Operator ``propose``: ``(tokens, q, choice)`` of a :class:`Proposal`.

    Args:
        filters: whether anyone has top-k, top-p or min-p; sequential: ``Sampling.any_sequential``.
        adjusting: of :class:`Adjustments`.
    """
    bs, drafts, width = ids.shape
    sampling = Sampling(temperatures, top_ks, top_ps, min_ps, filters, filters, filters, sequential)
    adjustments = Adjustments(*adjusting)
    changed = any(tensor is not None for tensor in adjusting)
    own = block_seeds(seeds, seeded, positions[:, 0]).repeat_interleave(drafts)
    noise = gumbel_noise(own, positions[:, :drafts].reshape(-1), ids.view(-1, width))
    noise = noise.view(bs, drafts, width)
    if gates is None and not changed:
        flat, each = scores.reshape(-1, width), sampling.repeated(drafts)
        q = draft_distribution(flat, each, *draft_scale(each, draft_temperature))
        q = q.view(bs, drafts, width)
        choice = (noise + q.log()).argmax(-1, keepdim=True)
        return ids.gather(-1, choice).squeeze(-1), q, choice.squeeze(-1)
    steps: list[tuple[torch.Tensor, ...]] = []
    tokens, scale = ids.new_empty(bs, 0), draft_scale(sampling, draft_temperature)
    for k in range(drafts):
        at, s = ids[:, k], scores[:, k]
        if gates is not None:
            previous = tokens[:, -1] if k else block_tokens[:, 0]
            s = s + dependency_scores(predecessor, successor, previous, gates[:, k], at)
        if changed:
            s = adjust_candidates(s, at, tokens, positions[:, k], adjustments)
        q = draft_distribution(s, sampling, *scale)
        choice = (noise[:, k] + q.log()).argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, at.gather(-1, choice)], 1)
        steps.append((q, choice.squeeze(-1)))
    return tokens, *(torch.stack(part, 1) for part in zip(*steps, strict=True))


propose_op = register("propose", propose_reference, "triton_ops.propose_kernel:launch")
propose_greedy_op = register(
    "propose_greedy", propose_greedy_reference, "triton_ops.propose_kernel:launch_greedy"
)
