"""What a round tells of every draft temperature: a program takes a request, a last one adds up.

Arguments and formulas: ``sglang_hyperdflash.serving.drafting.temperature``, whose
``learn_reference`` these kernels follow. Sums over requests run in a fixed order: two ranks, or two
runs, learn the same. What a request leaves, of T draft temperatures:

    gains  [bs, T]  fp64   of its reached drafts: accepted share, or whether the draft is emitted
    rows   [bs]     fp64   its reached drafts
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_ops.accept_kernel import LEAST
from triton_ops.distribution_kernel import draft_distribution, drawn
from triton_ops.gumbel_kernel import block_seed, noise, row_hash

# Requests that the last program adds up at a time.
REQUESTS = 256
# Their number, stride or alignment differs from batch to batch; no batch may need a compilation.
_PER_BATCH = [
    "ids_ptr", "scores_ptr", "choice_ptr", "p_ptr", "tokens_ptr", "lens_ptr", "temperatures_ptr",
    "top_ks_ptr", "top_ps_ptr", "min_ps_ptr", "seeded_ptr", "seeds_ptr", "positions_ptr",
    "token_stride", "position_stride", "vocabulary",
]  # fmt: skip


# fmt: off
@triton.jit
def _gain(
    ids_ptr, scores_ptr, choice_ptr, p_ptr, tokens_ptr, positions_ptr, top_p_ptr, min_p_ptr,
    temperature, value, top_k, seeded, seed, reached,
    FILTERS: tl.constexpr, SEQUENTIAL: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
):
    """Of one request's ``reached`` drafts at the draft temperature ``value``; fp64."""
    at = tl.arange(0, WIDTH)
    inside = at < K
    gain = tl.full([], 0.0, tl.float64)
    # verification.weights_along: the sum of logarithms so far, and the largest so far.
    walk = tl.full([], 0.0, tl.float64)
    highest = tl.full([], 0.0, tl.float64)
    for k in range(reached):
        s = tl.load(scores_ptr + k * K + at, mask=inside, other=float("-inf"))
        q, _ = draft_distribution(s, at, inside, temperature * value, value <= 0, top_k, top_p_ptr,
                                  min_p_ptr, FILTERS, SEQUENTIAL, K, WIDTH)
        ids = tl.load(ids_ptr + k * K + at, mask=inside, other=-1)
        if seeded:
            g = noise(row_hash(seed, tl.load(positions_ptr + k)), ids.to(tl.uint32))
            found = tl.sum(tl.where(at == drawn(q, g, at, WIDTH), ids, 0), 0)
            gain += (found == tl.load(tokens_ptr + k)).to(tl.float64)
        else:
            p = tl.load(p_ptr + k * K + at, mask=inside, other=0.0)
            weight = tl.exp(walk - highest)
            kept = weight.to(tl.float32) * p
            kept = tl.minimum(kept, q, propagate_nan=tl.PropagateNan.ALL)
            share = tl.sum(kept, 0).to(tl.float64) / weight
            # A row of NaN would stay for ever.
            gain += tl.where(share == share, tl.minimum(share, 1.0), 0.0)
            own = at == tl.load(choice_ptr + k)
            p_own = tl.sum(tl.where(own, p, 0.0), 0).to(tl.float64)
            q_own = tl.sum(tl.where(own, q, 0.0), 0).to(tl.float64)
            possible = tl.where(p_own == 0, 1.0, p_own)
            step = tl.log(possible) - tl.log(tl.maximum(q_own, LEAST))
            walk += tl.where(p_own == 0, float("-inf"), step)
            highest = tl.maximum(highest, walk)
    return gain


@triton.jit(do_not_specialize=_PER_BATCH)
def _request_kernel(
    ids_ptr, scores_ptr, choice_ptr, p_ptr, tokens_ptr, lens_ptr, temperatures_ptr, top_ks_ptr,
    top_ps_ptr, min_ps_ptr, seeded_ptr, seeds_ptr, positions_ptr, values_ptr, gains_ptr, rows_ptr,
    token_stride, position_stride, vocabulary, FILTERS: tl.constexpr, SEQUENTIAL: tl.constexpr,
    T: tl.constexpr, D: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
):
    """One request's gains; a program for each draft temperature."""
    b, t = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens_ptr += b * token_stride
    positions_ptr += b * position_stride
    last = tl.load(lens_ptr + b) - 1
    top_k = tl.load(top_ks_ptr + b)
    reached = tl.minimum(last + 1, D)
    if (top_k <= 1) | (tl.load(tokens_ptr + last) == vocabulary):  # greedy, or broken
        reached = 0
    seeded = tl.load(seeded_ptr + b)
    seed = block_seed(tl.load(seeds_ptr + b), seeded, tl.load(positions_ptr))
    drafts = b * D * K
    gain = _gain(
        ids_ptr + drafts, scores_ptr + drafts, choice_ptr + b * D, p_ptr + drafts, tokens_ptr,
        positions_ptr, top_ps_ptr + b, min_ps_ptr + b, tl.load(temperatures_ptr + b),
        tl.load(values_ptr + t), top_k, seeded, seed, reached, FILTERS, SEQUENTIAL, K, WIDTH,
    )
    tl.store(gains_ptr + b * T + t, gain)
    tl.store(rows_ptr + b, reached.to(tl.float64), mask=t == 0)


@triton.jit(do_not_specialize=["seeded_ptr", "requests"])
def _sum_kernel(
    gains_ptr, rows_ptr, seeded_ptr, values_ptr, accepted_ptr, current_ptr, requests, memory,
    T: tl.constexpr, WIDTH: tl.constexpr, REQUESTS: tl.constexpr,
):
    """Of one class, without a seed or with one: fade, add, and choose the best temperature."""
    kind = tl.program_id(0)
    t = tl.arange(0, WIDTH)
    gains = tl.zeros([REQUESTS, WIDTH], tl.float64)
    rows = tl.zeros([REQUESTS], tl.float64)
    for start in range(0, requests, REQUESTS):
        b = start + tl.arange(0, REQUESTS)
        inside = b < requests
        own = inside & (tl.load(seeded_ptr + b, mask=inside, other=0).to(tl.int32) == kind)
        rows += tl.load(rows_ptr + b, mask=own, other=0.0)
        at = b[:, None] * T + t[None, :]
        gains += tl.load(gains_ptr + at, mask=own[:, None] & (t < T)[None, :], other=0.0)
    fade = tl.exp(-tl.sum(rows, 0) / memory)
    at = accepted_ptr + kind * T + t
    accepted = tl.load(at, mask=t < T, other=float("-inf")) * fade + tl.sum(gains, 0)
    tl.store(at, accepted, mask=t < T)
    best = tl.min(tl.where(accepted == tl.max(accepted, 0), t, WIDTH), 0)
    tl.store(current_ptr + kind, tl.load(values_ptr + best))
# fmt: on


def launch(
    ids: torch.Tensor,
    scores: torch.Tensor,
    choice: torch.Tensor,
    p: torch.Tensor,
    tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    seeded: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    filters: bool,
    sequential: bool,
    values: torch.Tensor,
    accepted: torch.Tensor,
    current: torch.Tensor,
    vocabulary: int,
    memory: float,
) -> None:
    """Run both kernels: ``accepted [2, T]`` and ``current [2]`` change in place."""
    (bs, drafts, candidates), tried = ids.shape, len(values)
    if bs == 0:
        return
    gains = accepted.new_empty(bs, tried)
    rows = accepted.new_empty(bs)
    width = max(2, triton.next_power_of_2(candidates))
    _request_kernel[(bs, tried)](
        *(ids, scores, choice, p, tokens, accept_lens, temperatures, top_ks, top_ps, min_ps),
        *(seeded, seeds, positions, values, gains, rows),
        *(tokens.stride(0), positions.stride(0), vocabulary),
        FILTERS=filters,
        SEQUENTIAL=sequential,
        T=tried,
        D=drafts,
        K=candidates,
        WIDTH=width,
        num_warps=min(16, max(1, width // 16)),
        enable_fp_fusion=False,
    )
    _sum_kernel[(2,)](
        *(gains, rows, seeded, values, accepted, current, bs, memory),
        T=tried,
        WIDTH=triton.next_power_of_2(tried),
        REQUESTS=REQUESTS,
        num_warps=4,
        enable_fp_fusion=False,
    )
