"""One pass over each row: hash, two logarithms, running argmax; see ``triton_ops.gumbel``.

A program takes one row's share of the vocabulary, so a single row still fills the GPU; a second
kernel takes the best of the shares. Ties go to the lower id, as ``torch.argmax`` on a CPU has it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 1024, 8
# Programs wanted in flight: about eight for each of an H200's 132 multiprocessors.
PROGRAMS = 1024
MAX_SHARES = 64


@triton.jit
def _rotate(x, r: tl.constexpr):
    return (x << r) | (x >> (32 - r))


@triton.jit
def _mix(h, k):
    k = k * 0xCC9E2D51
    k = _rotate(k, 15) * 0x1B873593
    return _rotate(h ^ k, 13) * 5 + 0xE6546B64


@triton.jit
def _noise(row_hash, ids):
    """Gumbel noise, fp64, of uint32 ``ids`` under a row's hash of seed and position."""
    h = _mix(row_hash, ids) ^ 16
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h = h ^ (h >> 16)
    x = h.to(tl.float64) / 4294967295.0
    # log(0) is -inf; the clamp of the reference makes it the lowest fp64.
    y = tl.where(h == 0, -1.7976931348623157e308, tl.log(tl.where(h == 0, 0.5, x)))
    y = -tl.minimum(y, -2.3283064365386963e-10)
    return -tl.log(y)


@triton.jit
def _share_kernel(
    weights_ptr,
    rows_ptr,
    seeds_ptr,
    positions_ptr,
    best_ptr,
    ids_ptr,
    vocabulary,
    stride,
    share,
    HAS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best score of one row's share and its id."""
    n, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row = n.to(tl.int64)
    if HAS_ROWS:
        row = tl.load(rows_ptr + n)
    seed = tl.load(seeds_ptr + n).to(tl.uint64, bitcast=True)
    h = _mix(tl.zeros([], tl.uint32), (seed & 0xFFFFFFFF).to(tl.uint32))
    h = _mix(h, (seed >> 32).to(tl.uint32))
    h = _mix(h, tl.load(positions_ptr + n).to(tl.uint32))
    best = tl.full([BLOCK], float("-inf"), tl.float64)
    where = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    first = part * share
    last = tl.minimum(first + share, vocabulary)
    for start in range(first, last, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        inside = ids < last
        w = tl.load(weights_ptr + row * stride + ids, mask=inside, other=0.0)
        kept = inside & (w > 0)
        log_w = tl.log(tl.where(kept, w, 1.0)).to(tl.float64)
        score = tl.where(kept, log_w + _noise(h, ids.to(tl.uint32)), float("-inf"))
        better = score > best
        best = tl.where(better, score, best)
        where = tl.where(better, ids, where)
    top = tl.max(best, 0)
    lowest = tl.min(tl.where(best == top, where, 0x7FFFFFFF), 0)
    tl.store(best_ptr + n * parts + part, top)
    tl.store(ids_ptr + n * parts + part, lowest)


# Batches differ in their number of shares: one compilation, and none while serving.
@triton.jit(do_not_specialize=["parts"])
def _best_kernel(best_ptr, ids_ptr, out_ptr, parts, PARTS: tl.constexpr):
    """The best of a row's shares; a row without mass gives 0."""
    n = tl.program_id(0)
    at = tl.arange(0, PARTS)
    inside = at < parts
    best = tl.load(best_ptr + n * parts + at, mask=inside, other=float("-inf"))
    ids = tl.load(ids_ptr + n * parts + at, mask=inside, other=0x7FFFFFFF)
    top = tl.max(best, 0)
    lowest = tl.min(tl.where(best == top, ids, 0x7FFFFFFF), 0)
    tl.store(out_ptr + n, tl.where(lowest == 0x7FFFFFFF, 0, lowest).to(tl.int64))


def shares(rows: int, vocabulary: int) -> tuple[int, int]:
    """How many programs share a row, and how many ids each of them takes."""
    blocks = -(-vocabulary // BLOCK)
    wanted = max(1, min(blocks, MAX_SHARES, -(-PROGRAMS // max(rows, 1))))
    share = -(-blocks // wanted) * BLOCK
    return -(-vocabulary // share), share


def launch(
    weights: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor | None,
) -> torch.Tensor:
    """Run both kernels; arguments as the table of ``triton_ops.gumbel``; ``[N]`` int64."""
    count, vocabulary = len(seeds), weights.shape[-1]
    out = torch.empty(count, dtype=torch.int64, device=weights.device)
    if count == 0:
        return out
    parts, share = shares(count, vocabulary)
    best = torch.empty(count, parts, dtype=torch.float64, device=weights.device)
    ids = torch.empty(count, parts, dtype=torch.int32, device=weights.device)
    _share_kernel[(count, parts)](
        weights,
        seeds if rows is None else rows,
        seeds,
        positions,
        best,
        ids,
        vocabulary,
        weights.stride(0),
        share,
        HAS_ROWS=rows is not None,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    _best_kernel[(count,)](best, ids, out, parts, PARTS=MAX_SHARES, num_warps=1)
    return out
