"""The drafts of a block and the distribution ``q`` of each; the first choices are kept for copies.

    s_k = u_k + head(x_{k-1}, h_k)             # u_k: LM head of h_k, its top K; x_0 the anchor
    q_k = filter(softmax(s_k / (T t)))         # t = 0: one-hot at the largest s
    x_k = argmax_c(log q_k[c] + g(seed, position_k, c))

``g`` is Gumbel noise, a hash of its arguments (``triton_ops.gumbel``), so ``x_k`` is a draw from
``q_k``. Verification is exact for any ``q``: the filters and the draft temperature ``t`` change
acceptance only. Where the target's entropy is low, a draw from a flat ``q`` is accepted less often:
with p a point and q = (.6, .4), .52 of the time, the argmax .6. Greedy rows draft the argmax.

In a batch that samples, a copy (``triton_ops.copies``) that is no candidate replaces the last one,
unless that is the likeliest, and has its part of ``q``. Then copies get their share ``w`` of ``q``,
while all drafts so far were copies; one that is the likeliest token changes nothing. Greedy
requests draft the copies or the argmaxes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_hyperdflash.draft.adjust import Adjustments, adjust_candidates
from sglang_hyperdflash.draft.dependency import DependencyHead, dependency_scores
from sglang_hyperdflash.draft.filters import Sampling, filter_candidates
from triton_ops.copies import Copies, copy_weights, matched, parts
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
        ids: ``[bs, D, K]`` int64, their candidates, copies among them.
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
    candidates: Candidates,
    anchor: torch.Tensor,
    head: DependencyHead | None,
    copies: Copies | None = None,
) -> torch.Tensor:
    """Return the drafts of greedy requests, ``[bs, D]`` int64: the copy or the best candidate.

    Args:
        anchor: ``[bs]`` int64, the last committed token.
        copies: of at least as many requests and drafts; None for none.
    """
    tables = (None, None) if head is None else (head.predecessor, head.successor)
    gates = None if head is None else candidates.gates
    copied = (None, None) if copies is None else (copies.rows[: len(anchor)], copies.counts)
    return propose_greedy_op(candidates.ids, candidates.scores, gates, *tables, anchor, *copied)


def propose_greedy_reference(
    ids: torch.Tensor,
    scores: torch.Tensor,
    gates: torch.Tensor | None,
    predecessor: torch.Tensor | None,
    successor: torch.Tensor | None,
    anchors: torch.Tensor,
    copy_rows: torch.Tensor | None = None,
    copy_counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """The reference of operator ``propose_greedy``; see :func:`propose_greedy`."""
    drafts = ids.shape[1]
    # Without a head as argmax over the vocabulary: the lowest id among equals.
    first = ids.masked_fill(scores < scores.amax(-1, keepdim=True), 1 << 62).amin(-1)
    tokens, copied = first.clone(), torch.zeros_like(first).bool()
    copy_rows = matched(copy_rows)
    if copy_rows is not None:
        copies, firsts, _ = parts(copy_rows)
        follows = copy_weights(copy_rows, copy_counts, torch.ones_like(anchors)) > 0.5
        copied = follows.unsqueeze(1) & (copies[:, :drafts] >= 0).cumprod(1).bool()
        tokens[copied] = copies[:, :drafts][copied]
    previous = anchors
    for k in range(drafts if gates is not None else 0):
        given = previous, gates[:, k], ids[:, k]
        s = scores[:, k] + dependency_scores(predecessor, successor, *given)
        first[:, k] = ids[:, k].gather(-1, s.argmax(-1, keepdim=True)).squeeze(-1)
        tokens[:, k] = previous = torch.where(copied[:, k], tokens[:, k], first[:, k])
    if copy_rows is not None:
        firsts[:, :drafts] = first
    return tokens


def propose(
    candidates: Candidates,
    head: DependencyHead | None,
    block_tokens: torch.Tensor,
    positions: torch.Tensor,
    sampling: Sampling,
    draws: Draws,
    draft_temperature: float,
    adjustments: Adjustments = NO_ADJUSTMENTS,
    copies: Copies | None = None,
) -> Proposal:
    """Draft a block; drafts depend on each other through ``head``, penalties and copies only.

    Args:
        block_tokens: ``[bs, B]`` int64, the anchor first.
        positions: ``[bs, B]`` int64, of the token before each draft; the last is not read.
        sampling: the parameters of the bs requests.
        draft_temperature: ``t``.
        copies: as of :func:`propose_greedy`.
    """
    s = sampling
    tables = (None, None) if head is None else (head.predecessor, head.successor)
    copied = (None, None) if copies is None else (copies.rows[: len(positions)], copies.counts)
    tokens, q, choice, ids = propose_op(
        *(candidates.ids, candidates.scores, None if head is None else candidates.gates, *tables),
        *(block_tokens, draws.seeds, draws.client_seeded, positions),
        *(s.temperatures, s.top_ks, s.top_ps, s.min_ps, draft_temperature),
        *(s.filters, s.any_sequential, *copied, *adjustments.tensors),
    )
    return Proposal(tokens, ids, q, choice)


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
    copy_rows: torch.Tensor | None,
    copy_counts: torch.Tensor | None,
    *adjusting: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The reference of operator ``propose``: ``(tokens, q, choice, ids)`` of a :class:`Proposal`.

    Args:
        filters: ``Sampling.filters``.
        sequential: ``Sampling.any_sequential``.
        copy_rows, copy_counts: of a ``Copies``, or None.
        adjusting: the fields of :class:`Adjustments`, in order.
    """
    bs, drafts, candidates = ids.shape
    sampling = Sampling(temperatures, top_ks, top_ps, min_ps, filters, filters, filters, sequential)
    adjustments = Adjustments(*adjusting)
    changed = any(tensor is not None for tensor in adjusting)
    row_seeds, copy_rows = block_seeds(seeds, seeded, positions[:, 0]), matched(copy_rows)
    if gates is None and not changed and copy_rows is None:
        rows, row_sampling = scores.reshape(-1, candidates), sampling.repeated(drafts)
        scale = draft_scale(row_sampling, draft_temperature)
        q = draft_distribution(rows, row_sampling, *scale)
        given = row_seeds.repeat_interleave(drafts), positions[:, :drafts].reshape(-1)
        noise = gumbel_noise(*given, ids.view(-1, candidates))
        choice = (noise + q.log()).argmax(-1).view(bs, drafts)
        return ids.gather(-1, choice.unsqueeze(-1)).squeeze(-1), q.view(ids.shape), choice, ids
    steps: list[tuple[torch.Tensor, ...]] = []
    tokens, scale = ids.new_empty(bs, 0), draft_scale(sampling, draft_temperature)
    if copy_rows is not None:
        copies, firsts, _ = parts(copy_rows)
        w = copy_weights(copy_rows, copy_counts, top_ks)
        w = torch.where(scale[1], (w > 0.5).to(w.dtype), w).unsqueeze(-1)  # q stays one-hot
    for k in range(drafts):
        s, row = scores[:, k], ids[:, k]
        if gates is not None:
            previous = tokens[:, -1] if k else block_tokens[:, 0]
            s = s + dependency_scores(predecessor, successor, previous, gates[:, k], row)
        if changed:
            s = adjust_candidates(s, row, tokens, positions[:, k], adjustments)
        q = draft_distribution(s, sampling, *scale)
        if copy_rows is not None:
            copy, first = copies[:, k : k + 1], s.argmax(-1, keepdim=True)
            firsts[:, k : k + 1] = row.gather(-1, first)
            is_copy = row == copy
            is_copy[:, -1] |= ~is_copy.any(-1)
            replaced = is_copy.gather(-1, first) & ~scale[1].unsqueeze(-1)
            share = w.masked_fill((copy < 0) | replaced, 0.0)
            row = torch.where(is_copy & (share > 0), copy, row)
            q = (1 - share) * q + share * is_copy
        noise = gumbel_noise(row_seeds, positions[:, k], row)
        choice = (noise + q.log()).argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, row.gather(-1, choice)], 1)
        if copy_rows is not None:
            w = w.masked_fill(tokens[:, -1:] != copy, 0.0)
        steps.append((q, choice.squeeze(-1), row))
    return tokens, *(torch.stack(part, 1) for part in zip(*steps, strict=True))


propose_op = register("propose", propose_reference, "triton_ops.propose_kernel:launch")
propose_greedy_op = register(
    "propose_greedy", propose_greedy_reference, "triton_ops.propose_kernel:launch_greedy"
)
