"""What a row of logits says, in one read of it: probabilities' normaliser, and the row's own token.

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

from triton_ops.gumbel import RESIDUAL_STREAM, gumbel_noise
from triton_ops.operator import define


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


def _fake(logits, *rest):
    tokens = logits.new_empty(len(logits), dtype=torch.int64)
    largest = logits.new_empty(len(logits), dtype=torch.float32)
    return tokens, largest, torch.empty_like(largest)


row_statistics = define(
    "row_statistics(Tensor logits, Tensor temperatures, Tensor top_ks, Tensor seeded, Tensor seeds,"
    " Tensor positions, Tensor? kept, bool all_draw) -> (Tensor, Tensor, Tensor)",
    row_statistics_reference,
    "triton_ops.rows_kernel:launch",
    _fake,
)
