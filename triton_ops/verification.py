"""The operators between a round's final logits and what it commits, and their references.

``row_statistics`` reads the rows, ``accept`` finds how many drafts of each block are accepted,
``finish`` draws the bonus token and packs what is committed. The formulas, and why they are exact:
``sglang_hyperdflash.serving.verification.exact``. The last two's arguments: their kernels' tables.

A row of logits is read once, for its probabilities' normaliser and its own token:

    y      = logits / T                     # fp32; -inf where a filter forbids the token
    p(v)   = exp(y_v - largest) / total     # largest = max y, total = sum exp(y - largest)
    token  = argmax_v logits_v              # of a greedy request; ties to the lowest id
           = argmax_v(y_v + g(seed, position, v))       # drawn: fp64, g of triton_ops.gumbel

The draw needs no normaliser, so a seeded token does not depend on the order of a sum. SGLang's
seeded sampler draws from ``log softmax(logits / T)`` rounded to fp32: the same token but where two
scores are closer than that rounding, some 1e-7 of all tokens.

    argument      shape      dtype
    logits        [N, V]     fp32, bf16 or fp16; N = bs * B, row n is of request n // B
    temperatures  [bs]       fp32, positive
    top_ks        [bs]       integer; 1 or less is greedy
    seeded        [bs]       bool: drawn with ``seeds`` as they are
    seeds         [bs]       int64, all 64 bits count
    positions     [bs, B]    int64
    kept          [N, V]     fp32, zero where a filter forbids; or None
    all_draw                 whether requests without a seed of their own draw, too, from a stream
                             that no block uses; else their token is 0

    result        shape      dtype
    tokens        [N]        int64; V where the row is broken: a NaN, +inf, or nothing finite
    largest       [N]        fp32; NaN where broken; arbitrary for greedy requests
    total         [N]        fp32; the same
"""

from __future__ import annotations

import torch

from triton_ops.gumbel import (
    RESIDUAL_STREAM,
    block_seeds,
    coins,
    gumbel_argmax,
    gumbel_noise,
)
from triton_ops.operator import register


def row_statistics_reference(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    seeded: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    kept: torch.Tensor | None,
    all_draw: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(tokens, largest, total)``; see the module."""
    block, vocabulary = positions.shape[1], logits.shape[-1]
    logits, each = logits.float(), temperatures.repeat_interleave(block)
    top, sampled = logits.amax(-1), top_ks > 1
    broken = ~top.isfinite()
    greedy = not sampled.all()
    tokens = logits.argmax(-1) if greedy else positions.new_zeros(len(logits))
    # Division is monotonic, and the likeliest token passes every filter.
    largest, total = top / each, torch.ones_like(top)
    if sampled.any():
        y = logits / each.unsqueeze(-1)
        if greedy:
            tokens = tokens.masked_fill(sampled.repeat_interleave(block), 0)
        draws = sampled if all_draw else sampled & seeded
        at = draws.repeat_interleave(block).nonzero().squeeze(-1)
        if len(at):
            own = torch.where(seeded, seeds, seeds ^ RESIDUAL_STREAM)[at // block]
            ids = torch.arange(vocabulary, device=logits.device)
            noise = gumbel_noise(own, positions.reshape(-1)[at], ids).add_(y[at])
            if kept is not None:
                noise.masked_fill_(kept[at] == 0, float("-inf"))
            tokens[at] = noise.argmax(-1)
        if kept is None:
            total = y.sub_(largest.unsqueeze(-1)).exp_().sum(-1)
        else:
            total = kept.sum(-1) / kept.amax(-1)
    nan = float("nan")
    return (
        tokens.masked_fill(broken, vocabulary),
        largest.masked_fill(broken, nan),
        total.masked_fill(broken, nan),
    )


row_statistics = register(
    "row_statistics", row_statistics_reference, "triton_ops.rows_kernel:launch"
)


def packed_size(bs: int, block: int) -> int:
    """Words of 64 bits: tokens, next anchors, and accept lengths of 32 bits."""
    return bs * (block + 1) + (bs + 1) // 2


def unpacked(
    packed: torch.Tensor, bs: int, block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(tokens [bs, B] int64, accept_lens [bs] int32, next_anchors [bs] int64)``, as views."""
    tokens, anchors, lens = packed.split([bs * block, bs, (bs + 1) // 2])
    return tokens.view(bs, block), lens.view(torch.int32)[:bs], anchors


def accept_reference(
    logits: torch.Tensor | None,
    kept: torch.Tensor | None,
    row_tokens: torch.Tensor,
    largest: torch.Tensor | None,
    total: torch.Tensor | None,
    block_tokens: torch.Tensor,
    ids: torch.Tensor | None,
    q: torch.Tensor | None,
    choice: torch.Tensor | None,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    seeded: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocabulary: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many drafts of each block are accepted.

    Returns:
        ``correct_drafts [bs]`` int32; ``weight [bs]`` fp64, ``w`` of the accepted prefix, 1 of a
        greedy or seeded request.
    """
    bs, block = block_tokens.shape
    row_tokens = row_tokens.view(bs, block)
    # A broken row's token is no draft's.
    matches = block_tokens[:, 1:] == row_tokens[:, :-1]
    correct_drafts = matches.int().cumprod(1).sum(1)
    weight = torch.ones(bs, dtype=torch.float64, device=positions.device)
    by_block = ~(seeded | (top_ks <= 1))
    if ids is None or not by_block.any():
        return correct_drafts.int(), weight
    p = _at_candidates(logits, kept, largest, total, ids, temperatures)
    w = prefix_weights(p, q, choice)
    h = accept_probabilities(p, q, w)
    # A broken row ends the block before it: no later row counts for its prefix.
    h = torch.where(row_tokens[:, 1:] == vocabulary, w[:, 1:], h)
    own = block_seeds(seeds, seeded, positions[:, 0])
    u = coins(own.unsqueeze(1).expand(bs, block - 1), positions[:, :-1])
    # Strict: a draft the target gives no mass is never accepted, whatever the coin.
    reached = torch.arange(1, block, device=u.device) * (u < h)
    correct_drafts = torch.where(by_block, reached.amax(1), correct_drafts)
    weight = torch.where(by_block, w.gather(1, correct_drafts.unsqueeze(1)).squeeze(1), weight)
    return correct_drafts.int(), weight


def prefix_weights(p: torch.Tensor, q: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    """``w_0 .. w_D`` of every block, ``[bs, D + 1]`` fp64; 0 after a broken row.

    ``log w_k`` is the sum so far less the largest sum so far: a walk held at 0 from above.

    Args:
        p, q: ``[bs, D, K]`` of the candidates; choice: ``[bs, D]`` int64, the drafts among them.
    """
    p, q = (t.gather(2, choice.unsqueeze(2)).squeeze(2).double() for t in (p, q))
    least = torch.finfo(torch.float32).tiny
    steps = torch.log(p.nan_to_num(nan=0.0)) - torch.log(q.clamp(min=least))
    total = torch.cat([torch.zeros_like(steps[:, :1]), steps.cumsum(1)], 1)
    return torch.exp(total - total.cummax(1).values)


def accept_probabilities(p: torch.Tensor, q: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``h_1 .. h_D`` of every block, ``[bs, D]`` fp64; the last k whose coin is below is accepted.

    Args:
        p, q: ``[bs, D, K]`` of the candidates; w: ``[bs, D + 1]``.
    """
    p, q = p[:, 1:].double().nan_to_num(nan=0.0), q[:, 1:].double()
    inner = w[:, 1:-1]
    # The target's mass outside the candidates, where q is zero.
    outside = (1.0 - p.sum(-1)).clamp(min=0.0) * inner
    above = (inner.unsqueeze(-1) * p - q).clamp(min=0.0).sum(-1) + outside
    below = above + (1.0 - inner)
    # 0 / 0: p and q are equal, and so the next draft is accepted anyway.
    chances = torch.where(below == 0, 1.0, above / below.clamp(min=1e-300))
    return torch.cat([chances, w[:, -1:]], 1)


def _at_candidates(
    logits: torch.Tensor,
    kept: torch.Tensor | None,
    largest: torch.Tensor,
    total: torch.Tensor,
    ids: torch.Tensor,
    temperatures: torch.Tensor,
) -> torch.Tensor:
    """The target's probability of each candidate, ``[bs, D, K]`` fp32."""
    bs, drafts, _ = ids.shape

    def of_drafts(values: torch.Tensor) -> torch.Tensor:
        return values.view(bs, drafts + 1, -1)[:, :-1]

    y = of_drafts(logits).gather(2, ids).float() / temperatures.view(-1, 1, 1)
    p = torch.exp(y - of_drafts(largest)) / of_drafts(total)
    if kept is not None:
        p = p.masked_fill((of_drafts(kept).gather(2, ids) == 0) & ~p.isnan(), 0.0)
    return p


def finish_reference(
    logits: torch.Tensor | None,
    kept: torch.Tensor | None,
    row_tokens: torch.Tensor,
    largest: torch.Tensor | None,
    total: torch.Tensor | None,
    block_tokens: torch.Tensor,
    ids: torch.Tensor | None,
    q: torch.Tensor | None,
    correct_drafts: torch.Tensor,
    weight: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    seeded: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    draws: bool,
    vocabulary: int,
) -> torch.Tensor:
    """The bonus token, and what is committed, packed (:func:`unpacked`).

    Args:
        draws: whether anyone's bonus token is drawn from what is left of ``p``.
    """
    bs, block = block_tokens.shape
    at = correct_drafts.long()
    rows = torch.arange(bs, device=at.device) * block + at
    bonus = row_tokens[rows]
    broken = bonus == vocabulary
    if draws:
        y = logits.index_select(0, rows).float() / temperatures.unsqueeze(-1)
        p = torch.exp(y - largest[rows].unsqueeze(-1)) / total[rows].unsqueeze(-1)
        if kept is not None:
            p.masked_fill_(kept.index_select(0, rows) == 0, 0.0)
        own = block_seeds(seeds, seeded, positions[:, 0])
        where = positions.gather(1, at.unsqueeze(1)).squeeze(1)
        drawn = residual_draw(p, ids, q, at, weight, own, where)
        bonus = torch.where(seeded | (top_ks <= 1) | broken, bonus, drawn)
    packed = torch.zeros(packed_size(bs, block), dtype=torch.int64, device=at.device)
    tokens, accept_lens, next_anchors = unpacked(packed, bs, block)
    tokens[:, :-1] = block_tokens[:, 1:]
    tokens.scatter_(1, at.unsqueeze(1), bonus.unsqueeze(1))
    accept_lens.copy_(correct_drafts + 1)
    next_anchors.copy_(bonus.masked_fill(broken, 0))
    return packed


def residual_draw(
    p: torch.Tensor,
    ids: torch.Tensor,
    q: torch.Tensor,
    correct_drafts: torch.Tensor,
    weight: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """A draw from ``(w p - q)+`` at the first rejected draft, from ``p`` after the last; ``[bs]``.

    Args:
        p: ``[bs, V]`` fp32 of the row after the accepted drafts; weight: ``[bs]`` fp64, their w.
        ids, q: ``[bs, D, K]``; correct_drafts, seeds, positions: ``[bs]`` int64.
    """
    bs, drafts, width = ids.shape
    at = correct_drafts.clamp(max=drafts - 1).view(bs, 1, 1).expand(-1, 1, width)
    ids, q = (t.gather(1, at).squeeze(1) for t in (ids, q))
    left = (p * weight.to(p).unsqueeze(-1)).scatter_add_(-1, ids, -q).clamp_(min=0)
    # p and q equal up to rounding leave nothing: the rejection was rounding too.
    rejected = (correct_drafts < drafts) & (left.sum(-1) > 0)
    left = torch.where(rejected.unsqueeze(-1), left, p)
    return gumbel_argmax(left, seeds ^ RESIDUAL_STREAM, positions)


accept = register("accept", accept_reference, "triton_ops.accept_kernel:launch")
finish = register("finish", finish_reference, "triton_ops.finish_kernel:launch")
