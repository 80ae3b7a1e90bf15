"""Each row's largest logit, sum of exponentials and token, from one read of the logits.

Two launches replace up to 100 torch operations of :mod:`triton_ops.verification`, which describes
arguments and results, and the ``[N, V]`` fp32 and fp64 tensors that torch's draw writes and reads.

A program takes one row's share of the vocabulary, so a single row still fills the GPU; a second
kernel takes the best of the shares. Each lane keeps a running maximum with a sum relative to it,
which costs one exponential per element. Only programs whose row draws compute noise, two fp64
logarithms per element. Ties go to the lower id, as in ``torch.argmax`` on a CPU.

The results of a share, ``[N, parts]``:

    scores    fp64    the best score of its ids: the logit in a greedy row, -inf without a draw
    ids       int32   its id; NONE if no id has a score
    sums      fp32    [3, N, parts]: largest logit, NaN if one is NaN; largest y; sum of exp(y - it)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_ops.gumbel_kernel import RESIDUAL_STREAM, divided, noise, row_hash

BLOCK, UNROLL, WARPS = 1024, 2, 8
TILE = BLOCK * UNROLL
# The wanted number of programs: about eight for each of an H200's 132 multiprocessors.
PROGRAMS = 1024
MAX_SHARES = 64

NONE = tl.constexpr(0x7FFFFFFF)
# The start of a running maximum: -inf would give -inf - (-inf), which is NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)
GREEDY, SUMS, DRAWS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


# fmt: off
@triton.jit
def _share(
    logits_ptr, kept_ptr, temperature, hashed, first, last,
    MODE: tl.constexpr, HAS_KEPT: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):
    """Return (score, id, largest logit, largest y, sum) of one row's ids ``first`` to ``last``."""
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    largest = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    best = tl.full([BLOCK], float("-inf"), tl.float64 if MODE == DRAWS else tl.float32)
    best_ids = tl.full([BLOCK], NONE, tl.int32)
    for start in range(first, last, BLOCK * UNROLL):
        # The loads of all steps come first, so that they are in flight together.
        values = ()
        keeps = ()
        for step in tl.static_range(UNROLL):
            ids = start + step * BLOCK + tl.arange(0, BLOCK)
            inside = ids < last
            values = values + (tl.load(logits_ptr + ids, mask=inside, other=float("-inf")),)
            if HAS_KEPT and MODE != GREEDY:
                keeps = keeps + (tl.load(kept_ptr + ids, mask=inside, other=0.0),)
        for step in tl.static_range(UNROLL):
            ids = start + step * BLOCK + tl.arange(0, BLOCK)
            score = values[step].to(tl.float32)
            top = tl.maximum(top, score, propagate_nan=tl.PropagateNan.ALL)
            if MODE != GREEDY:
                y = divided(score, temperature)
                if HAS_KEPT:
                    y = tl.where(keeps[step] == 0, float("-inf"), y)
                e = tl.exp(-tl.abs(y - largest))
                total = tl.where(y > largest, tl.fma(total, e, 1.0), total + e)
                largest = tl.maximum(largest, y)
                score = y
            if MODE == DRAWS:
                score = y.to(tl.float64) + noise(hashed, ids.to(tl.uint32))
            if MODE != SUMS:
                better = score > best
                best = tl.where(better, score, best)
                best_ids = tl.where(better, ids, best_ids)
    score = tl.max(best, 0)
    lowest = tl.min(tl.where(best == score, best_ids, NONE), 0)
    nan = top != top
    row_top = tl.max(tl.where(nan, float("-inf"), top), 0)
    row_top = tl.where(tl.max(nan.to(tl.int32), 0) > 0, float("nan"), row_top)
    if MODE == GREEDY:  # the sums are not read
        return score.to(tl.float64), lowest, row_top, row_top, tl.full([], 1.0, tl.float32)
    row_largest = tl.max(largest, 0)
    row_total = tl.sum(total * tl.exp(largest - row_largest), 0)
    return score.to(tl.float64), lowest, row_top, row_largest, row_total


# Addresses differ between batches and ``block`` between widths: one compilation serves all.
@triton.jit(do_not_specialize=[
    "temperatures_ptr", "top_ks_ptr", "seeded_ptr", "seeds_ptr", "positions_ptr", "block",
])
def _share_kernel(
    logits_ptr, kept_ptr, temperatures_ptr, top_ks_ptr, seeded_ptr, seeds_ptr, positions_ptr,
    scores_ptr, ids_ptr, sums_ptr, vocabulary, stride, share, block,
    HAS_KEPT: tl.constexpr, ALL_DRAW: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):
    n, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    request, row = n // block, n.to(tl.int64)
    logits = logits_ptr + row * stride
    kept = kept_ptr + row * vocabulary
    first = part * share
    last = tl.minimum(first + share, vocabulary)
    t = tl.load(temperatures_ptr + request)
    seeded = tl.load(seeded_ptr + request)
    seed = tl.load(seeds_ptr + request)
    hashed = row_hash(tl.where(seeded, seed, seed ^ RESIDUAL_STREAM), tl.load(positions_ptr + n))
    if tl.load(top_ks_ptr + request) <= 1:
        score, lowest, top, largest, total = _share(
            logits, kept, t, hashed, first, last, GREEDY, HAS_KEPT, BLOCK, UNROLL
        )
    elif seeded | ALL_DRAW:
        # Smaller blocks: noise takes registers, and fewer programs would fit.
        score, lowest, top, largest, total = _share(
            logits, kept, t, hashed, first, last, DRAWS, HAS_KEPT, BLOCK // 2, 1
        )
    else:
        score, lowest, top, largest, total = _share(
            logits, kept, t, hashed, first, last, SUMS, HAS_KEPT, BLOCK, UNROLL
        )
    result, count = n * parts + part, tl.num_programs(0) * parts
    tl.store(scores_ptr + result, score)
    tl.store(ids_ptr + result, lowest)
    tl.store(sums_ptr + result, top)
    tl.store(sums_ptr + count + result, largest)
    tl.store(sums_ptr + 2 * count + result, total)


@triton.jit(do_not_specialize=["vocabulary", "parts"])
def _best_kernel(
    scores_ptr, ids_ptr, sums_ptr, tokens_ptr, largest_ptr, total_ptr, vocabulary, parts,
    PARTS: tl.constexpr,
):
    """Store the best of a row's shares, and the row's sums."""
    n, count = tl.program_id(0), tl.num_programs(0) * parts
    part = tl.arange(0, PARTS)
    inside, results = part < parts, n * parts + part
    scores = tl.load(scores_ptr + results, mask=inside, other=float("-inf"))
    ids = tl.load(ids_ptr + results, mask=inside, other=NONE)
    tops = tl.load(sums_ptr + results, mask=inside, other=float("-inf"))
    largest = tl.load(sums_ptr + count + results, mask=inside, other=LOWEST)
    totals = tl.load(sums_ptr + 2 * count + results, mask=inside, other=0.0)
    best = tl.max(scores, 0)
    lowest = tl.min(tl.where(scores == best, ids, NONE), 0)
    lowest = tl.where(lowest == NONE, 0, lowest)
    row_largest = tl.max(largest, 0)
    row_total = tl.sum(totals * tl.exp(largest - row_largest), 0)
    top = tl.max(tl.where(tops != tops, float("inf"), tops), 0)
    broken = (top == float("inf")) | (top == float("-inf"))
    tl.store(tokens_ptr + n, tl.where(broken, vocabulary, lowest).to(tl.int64))
    tl.store(largest_ptr + n, tl.where(broken, float("nan"), row_largest))
    tl.store(total_ptr + n, tl.where(broken, float("nan"), row_total))
# fmt: on


def shares(rows: int, vocabulary: int, tile: int = TILE, most: int = MAX_SHARES) -> tuple[int, int]:
    """Return how many programs share a row, and how many tiles of ids each of them takes."""
    tiles = -(-vocabulary // tile)
    wanted = max(1, min(tiles, most, -(-PROGRAMS // max(rows, 1))))
    each = -(-tiles // wanted)
    return -(-tiles // each), each


def launch(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    seeded: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    kept: torch.Tensor | None,
    all_draw: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run both kernels and return ``(tokens, largest, total)`` of ``triton_ops.verification``."""
    count, vocabulary = logits.shape
    if logits.stride(-1) != 1:
        raise ValueError(f"logits must have unit column stride, found {logits.stride()}")
    tokens = logits.new_empty(count, dtype=torch.int64)
    largest = logits.new_empty(count, dtype=torch.float32)
    total = torch.empty_like(largest)
    if count == 0:
        return tokens, largest, total
    parts, tiles = shares(count, vocabulary)
    scores = logits.new_empty(count, parts, dtype=torch.float64)
    ids = logits.new_empty(count, parts, dtype=torch.int32)
    sums = logits.new_empty(3, count, parts, dtype=torch.float32)
    _share_kernel[(count, parts)](
        logits,
        logits if kept is None else kept,
        *(temperatures, top_ks, seeded, seeds, positions, scores, ids, sums),
        *(vocabulary, logits.stride(0), tiles * TILE, positions.shape[1]),
        HAS_KEPT=kept is not None,
        ALL_DRAW=all_draw,
        BLOCK=BLOCK,
        UNROLL=UNROLL,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    _best_kernel[(count,)](
        *(scores, ids, sums, tokens, largest, total, vocabulary, parts),
        PARTS=MAX_SHARES,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return tokens, largest, total
