"""The drafts of a block and the distribution ``q`` of each, as pure functions.

    s_k = u_k + head(x_{k-1}, h_k)             # u_k: LM head of h_k, its top K; x_0 the anchor
    q_k = filter(softmax(s_k / (T t)))         # t = 0: one-hot at the largest s
    x_k = argmax_c(log q_k[c] + g(seed, position_k, c))

``g`` is Gumbel noise, a hash of its arguments (``triton_ops.gumbel``), so ``x_k`` is a draw from
``q_k``. Verification is exact for any ``q``: the filters and the draft temperature ``t`` change
acceptance only. Where the target's entropy is low, a draw from a flat ``q`` is accepted less often:
with p a point and q = (.6, .4), .52 of the time, the argmax .6. Greedy rows draft the argmax.
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
        ids: ``[bs, D, K]`` int64, distinct within a row.
        scores: ``[bs, D, K]`` fp32, their logits.
        gates: ``[bs, D, r]`` fp32, ``DependencyHead.gates`` of the rows; None without a head.
    """

    ids: torch.Tensor
    scores: torch.Tensor
    gates: torch.Tensor | None = None


@dataclass(frozen=True)
class Draws:
    """The noise that each request of a batch draws from.

    Attributes:
        seeds: ``[bs]`` int64.
        client_seeded: ``[bs]`` bool, whether the client set the seed: verified coupled.
        any_by_block: whether a sampled request has a seed of ours: verified by blocks. Known on
            the host.
    """

    seeds: torch.Tensor
    client_seeded: torch.Tensor
    any_by_block: bool = True


@dataclass(frozen=True)
class Proposal:
    """The D drafts of each block, and what verification needs of them.

    Attributes:
        tokens: ``[bs, D]`` int64, the drafts.
        ids: ``[bs, D, K]`` int64, their candidates.
        q: ``[bs, D, K]`` fp32, each row's distribution; one-hot if the row is greedy or t is 0.
        choice: ``[bs, D]`` int64, each draft's index among its candidates.
    """

    tokens: torch.Tensor
    ids: torch.Tensor
    q: torch.Tensor
    choice: torch.Tensor


def draft_scale(sampling: Sampling, draft_temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the divisors ``[N]`` of N rows' scores, and which rows draft the argmax, bool."""
    argmax = sampling.greedy | (draft_temperature <= 0)
    return (sampling.temperatures * draft_temperature).masked_fill(argmax, 1.0), argmax


def draft_distribution(
    scores: torch.Tensor, sampling: Sampling, temperature: torch.Tensor, argmax: torch.Tensor
) -> torch.Tensor:
    """Return ``q [N, K]`` fp32 of candidate ``scores [N, K]``; every row sums to 1.

    A row with a NaN, or without a possible candidate, is one-hot at the candidate that is drafted.

    Args:
        temperature, argmax: ``[N]``, the results of :func:`draft_scale`.
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
    """Return the drafts of greedy requests, ``[bs, D]`` int64: each the candidate of largest ``s``.

    Args:
        anchor: ``[bs]`` int64, the last committed token.
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
    """The reference of operator ``propose_greedy``; see :func:`propose_greedy`."""
    if gates is None:  # as argmax over the vocabulary: the lowest id among equals
        lower = scores < scores.amax(-1, keepdim=True)
        return ids.masked_fill(lower, 1 << 62).amin(-1)
    tokens, previous = [], anchors
    for k in range(ids.shape[1]):
        row = ids[:, k]
        s = scores[:, k] + dependency_scores(predecessor, successor, previous, gates[:, k], row)
        previous = row.gather(-1, s.argmax(-1, keepdim=True)).squeeze(-1)
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
        block_tokens: ``[bs, B]`` int64, the anchor first.
        positions: ``[bs, B]`` int64, of the token before each draft; the last is not read.
        sampling: the parameters of the bs requests.
        draft_temperature: ``t``.
    """
    s = sampling
    tables = (None, None) if head is None else (head.predecessor, head.successor)
    tokens, q, choice = propose_op(
        *(candidates.ids, candidates.scores, None if head is None else candidates.gates, *tables),
        *(block_tokens, draws.seeds, draws.client_seeded, positions),
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
    """The reference of operator ``propose``: ``(tokens, q, choice)`` of a :class:`Proposal`.

    Args:
        filters: ``Sampling.filters``.
        sequential: ``Sampling.any_sequential``.
        adjusting: the fields of :class:`Adjustments`, in order.
    """
    bs, drafts, candidates = ids.shape
    sampling = Sampling(temperatures, top_ks, top_ps, min_ps, filters, filters, filters, sequential)
    adjustments = Adjustments(*adjusting)
    changed = any(tensor is not None for tensor in adjusting)
    row_seeds = block_seeds(seeds, seeded, positions[:, 0]).repeat_interleave(drafts)
    noise = gumbel_noise(row_seeds, positions[:, :drafts].reshape(-1), ids.view(-1, candidates))
    noise = noise.view(ids.shape)
    if gates is None and not changed:
        rows, row_sampling = scores.reshape(-1, candidates), sampling.repeated(drafts)
        scale = draft_scale(row_sampling, draft_temperature)
        q = draft_distribution(rows, row_sampling, *scale).view(ids.shape)
        choice = (noise + q.log()).argmax(-1, keepdim=True)
        return ids.gather(-1, choice).squeeze(-1), q, choice.squeeze(-1)
    steps: list[tuple[torch.Tensor, ...]] = []
    tokens, scale = ids.new_empty(bs, 0), draft_scale(sampling, draft_temperature)
    for k in range(drafts):
        row, s = ids[:, k], scores[:, k]
        if gates is not None:
            previous = tokens[:, -1] if k else block_tokens[:, 0]
            s = s + dependency_scores(predecessor, successor, previous, gates[:, k], row)
        if changed:
            s = adjust_candidates(s, row, tokens, positions[:, k], adjustments)
        q = draft_distribution(s, sampling, *scale)
        choice = (noise[:, k] + q.log()).argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, row.gather(-1, choice)], 1)
        steps.append((q, choice.squeeze(-1)))
    return tokens, *(torch.stack(part, 1) for part in zip(*steps, strict=True))


propose_op = register("propose", propose_reference, "triton_ops.propose_kernel:launch")
propose_greedy_op = register(
    "propose_greedy", propose_greedy_reference, "triton_ops.propose_kernel:launch_greedy"
)
