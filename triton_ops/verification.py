"""The operators between a round's final logits and its committed tokens, and their references.

``row_statistics`` reads the rows, ``accept`` counts the accepted drafts of each block, ``finish``
draws the bonus token and packs the committed tokens; the kernels of the last two describe their
arguments. The formulas, and why they are exact: ``sglang_hyperdflash.serving.verification.exact``.

``row_statistics`` reads a row of logits once, for the normaliser of its distribution and its token:

    y      = logits / T                     # fp32; -inf where a filter forbids the token
    p(v)   = exp(y_v - largest) / total     # largest = max y, total = sum exp(y - largest)
    token  = argmax_v logits_v                      # greedy requests; ties to the lowest id
           = argmax_v(y_v + g(seed, position, v))   # other requests: fp64, g of triton_ops.gumbel

The draw needs no normaliser, so a seeded token does not depend on the order of a sum. SGLang's
seeded sampler draws from ``log softmax(logits / T)`` rounded to fp32: its tokens differ only where
two scores are closer than that rounding, some 1e-7 of all tokens.

    argument      shape      dtype
    logits        [N, V]     fp32, bf16 or fp16; N = bs * B, row n belongs to request n // B
    temperatures  [bs]       fp32, positive
    top_ks        [bs]       integer; 1 or less is greedy
    seeded        [bs]       bool, whether the request has a seed of its own
    seeds         [bs]       int64, all 64 bits count
    positions     [bs, B]    int64
    kept          [N, V]     fp32, zero where a filter forbids; or None
    all_draw                 bool, whether unseeded requests draw as well, from a stream that no
                             block uses; if not, their token is 0

    result        shape      dtype
    tokens        [N]        int64; V where the row is broken: a NaN, +inf, or nothing finite
    largest       [N]        fp32; NaN where broken; arbitrary for greedy requests
    total         [N]        fp32; NaN where broken; arbitrary for greedy requests
"""

from __future__ import annotations

import torch

from triton_ops.gumbel import RESIDUAL_STREAM, block_seeds, coins, gumbel_argmax, gumbel_noise
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
    """Return ``(tokens, largest, total)``; the module describes the tensors."""
    block, vocabulary = positions.shape[1], logits.shape[-1]
    logits, row_temperatures = logits.float(), temperatures.repeat_interleave(block)
    top, sampled = logits.amax(-1), top_ks > 1
    broken = ~top.isfinite()
    greedy = not sampled.all()
    tokens = logits.argmax(-1) if greedy else positions.new_zeros(len(logits))
    # Division is monotonic, and the likeliest token passes every filter.
    largest, total = top / row_temperatures, torch.ones_like(top)
    if sampled.any():
        y = logits / row_temperatures.unsqueeze(-1)
        if greedy:
            tokens = tokens.masked_fill(sampled.repeat_interleave(block), 0)
        draws = sampled if all_draw else sampled & seeded
        rows = draws.repeat_interleave(block).nonzero().squeeze(-1)
        if len(rows):
            row_seeds = torch.where(seeded, seeds, seeds ^ RESIDUAL_STREAM)[rows // block]
            ids = torch.arange(vocabulary, device=logits.device)
            scores = gumbel_noise(row_seeds, positions.reshape(-1)[rows], ids).add_(y[rows])
            if kept is not None:
                scores.masked_fill_(kept[rows] == 0, float("-inf"))
            tokens[rows] = scores.argmax(-1)
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
    """Return how many 64-bit words tokens, next anchors and 32-bit accept lengths take."""
    return bs * (block + 1) + (bs + 1) // 2


def unpacked(
    packed: torch.Tensor, bs: int, block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views ``(tokens [bs, B] int64, accept_lens [bs] int32, next_anchors [bs] int64)``."""
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
    """Count the accepted drafts of each block.

    Returns:
        ``correct_drafts [bs]`` int32, and ``weight [bs]`` fp64, ``w`` of the accepted prefix; 1 for
        greedy and seeded requests.
    """
    bs, block = block_tokens.shape
    row_tokens = row_tokens.view(bs, block)
    # The token of a broken row equals no draft.
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
    request_seeds = block_seeds(seeds, seeded, positions[:, 0])
    u = coins(request_seeds.unsqueeze(1).expand(bs, block - 1), positions[:, :-1])
    # Strictly less, so a draft of probability zero is never accepted.
    reached = torch.arange(1, block, device=u.device) * (u < h)
    correct_drafts = torch.where(by_block, reached.amax(1), correct_drafts)
    weight = torch.where(by_block, w.gather(1, correct_drafts.unsqueeze(1)).squeeze(1), weight)
    return correct_drafts.int(), weight


def prefix_weights(p: torch.Tensor, q: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    """Return ``w_0 .. w_D`` of every block, ``[bs, D + 1]`` fp64; 0 after a broken row.

    ``log w_k`` is the sum of ``log p / q`` so far less the largest sum so far.

    Args:
        p, q: ``[bs, D, K]`` of the candidates.
        choice: ``[bs, D]`` int64, the drafts' indices among the candidates.
    """
    p, q = (t.gather(2, choice.unsqueeze(2)).squeeze(2).double() for t in (p, q))
    least = torch.finfo(torch.float32).tiny
    steps = torch.log(p.nan_to_num(nan=0.0)) - torch.log(q.clamp(min=least))
    total = torch.cat([torch.zeros_like(steps[:, :1]), steps.cumsum(1)], 1)
    return torch.exp(total - total.cummax(1).values)


def accept_probabilities(p: torch.Tensor, q: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return ``h_1 .. h_D`` of every block, ``[bs, D]`` fp64.

    The accepted prefix ends at the last k whose coin is below ``h_k``.

    Args:
        p, q: ``[bs, D, K]`` of the candidates.
        w: ``[bs, D + 1]`` fp64, the prefix weights.
    """
    p, q = p[:, 1:].double().nan_to_num(nan=0.0), q[:, 1:].double()
    inner = w[:, 1:-1]
    # The target's mass outside the candidates, where q is zero.
    outside = (1.0 - p.sum(-1)).clamp(min=0.0) * inner
    above = (inner.unsqueeze(-1) * p - q).clamp(min=0.0).sum(-1) + outside
    below = above + (1.0 - inner)
    # 0 / 0 means that p and q are equal: the next draft is accepted anyway.
    h = torch.where(below == 0, 1.0, above / below.clamp(min=1e-300))
    return torch.cat([h, w[:, -1:]], 1)


def _at_candidates(
    logits: torch.Tensor,
    kept: torch.Tensor | None,
    largest: torch.Tensor,
    total: torch.Tensor,
    ids: torch.Tensor,
    temperatures: torch.Tensor,
) -> torch.Tensor:
    """Return the target's probability of each candidate, ``[bs, D, K]`` fp32."""
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
    """Choose the bonus token and return what is committed, packed (see :func:`unpacked`).

    Args:
        draws: whether some request is verified by blocks, so that its bonus token is drawn.
    """
    bs, block = block_tokens.shape
    accepted = correct_drafts.long()
    rows = torch.arange(bs, device=accepted.device) * block + accepted
    bonus = row_tokens[rows]
    broken = bonus == vocabulary
    if draws:
        y = logits.index_select(0, rows).float() / temperatures.unsqueeze(-1)
        p = torch.exp(y - largest[rows].unsqueeze(-1)) / total[rows].unsqueeze(-1)
        if kept is not None:
            p.masked_fill_(kept.index_select(0, rows) == 0, 0.0)
        request_seeds = block_seeds(seeds, seeded, positions[:, 0])
        bonus_positions = positions.gather(1, accepted.unsqueeze(1)).squeeze(1)
        drawn = residual_draw(p, ids, q, accepted, weight, request_seeds, bonus_positions)
        bonus = torch.where(seeded | (top_ks <= 1) | broken, bonus, drawn)
    packed = torch.zeros(packed_size(bs, block), dtype=torch.int64, device=accepted.device)
    tokens, accept_lens, next_anchors = unpacked(packed, bs, block)
    tokens[:, :-1] = block_tokens[:, 1:]
    tokens.scatter_(1, accepted.unsqueeze(1), bonus.unsqueeze(1))
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
    """Draw from the residual ``(w p - q)+`` of the first rejected draft, or from ``p``; ``[bs]``.

    Args:
        p: ``[bs, V]`` fp32, the target's distribution after the accepted drafts.
        ids, q: ``[bs, D, K]``, the candidates.
        correct_drafts, seeds, positions: ``[bs]`` int64.
        weight: ``[bs]`` fp64, w of the accepted drafts.
    """
    bs, drafts, candidates = ids.shape
    row = correct_drafts.clamp(max=drafts - 1).view(bs, 1, 1).expand(-1, 1, candidates)
    ids, q = (t.gather(1, row).squeeze(1) for t in (ids, q))
    residual = (p * weight.to(p).unsqueeze(-1)).scatter_add_(-1, ids, -q).clamp_(min=0)
    # An empty residual means that p and q are equal up to rounding: draw from p.
    rejected = (correct_drafts < drafts) & (residual.sum(-1) > 0)
    weights = torch.where(rejected.unsqueeze(-1), residual, p)
    return gumbel_argmax(weights, seeds ^ RESIDUAL_STREAM, positions)


accept = register("accept", accept_reference, "triton_ops.accept_kernel:launch")
finish = register("finish", finish_reference, "triton_ops.finish_kernel:launch")
