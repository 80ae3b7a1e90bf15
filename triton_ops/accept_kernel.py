"""The number of accepted drafts of each block: one program per request.

One launch replaces about 130 torch operations and a device synchronisation of its reference,
``triton_ops.verification.accept_reference``, which has the formulas. bs requests, D drafts each,
B = D + 1 rows each, N = bs * B, vocabulary V, K candidates of a draft:

    argument      shape       dtype
    logits        [N, V]      fp32, bf16 or fp16, unit column stride; not read without ids
    kept          [N, V]      fp32, zero where a filter forbids; or None
    row_tokens    [N]         int64; V where the row is broken
    largest       [N]         fp32; not read without ids
    total         [N]         fp32; not read without ids
    block_tokens  [bs, B]     int64, the anchor, then the drafts; unit column stride
    ids           [bs, D, K]  int64; None if all drafts are compared with row_tokens
    q             [bs, D, K]  fp32; None without ids
    choice        [bs, D]     int64, the drafts' indices among ids; None without ids
    temperatures  [bs]        fp32
    top_ks        [bs]        int32, 1 or less is greedy
    seeded        [bs]        bool
    seeds         [bs]        int64
    positions     [bs, B]     int64

    result          shape       dtype
    correct_drafts  [bs]        int32
    weight          [bs]        fp64, w of the accepted prefix; 1 for greedy and seeded requests

Sums over drafts and candidates are fp64 and run in another order than torch's. ``w`` needs ``p`` of
the drafts before any sum over candidates, so those few entries are loaded twice. In the kernel
ROWS is B padded to a power of two, and WIDTH the number of candidates that are loaded at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_ops.gumbel_kernel import block_seed, coin, divided

# With fewer warps, sm_80 and sm_100 spill a register of the filtered case.
WARPS = 16
# Entries of p that a program holds at a time; more candidates are read in several pieces.
TILE = 4096
# The lower limit of q: the smallest normal fp32.
LEAST = tl.constexpr(torch.finfo(torch.float32).tiny)
# fmt: off
# Arguments whose value, stride or alignment differs between batches: one compilation serves all.
_PER_BATCH = (
    "row_tokens_ptr", "largest_ptr", "total_ptr", "block_tokens_ptr", "ids_ptr", "q_ptr",
    "choice_ptr", "temperatures_ptr", "top_ks_ptr", "seeded_ptr", "seeds_ptr", "positions_ptr",
    "block_stride",
)


@triton.jit
def scaled(logits_ptr, kept_ptr, inside, temperature, HAS_KEPT: tl.constexpr):
    """Return ``y`` of the entries at the pointers, fp32; -inf where a filter forbids."""
    logits = tl.load(logits_ptr, mask=inside, other=0.0).to(tl.float32)
    y = divided(logits, temperature)
    if HAS_KEPT:
        y = tl.where(tl.load(kept_ptr, mask=inside, other=1.0) == 0, float("-inf"), y)
    return y


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _prefix_weights(
    logits_ptr, kept_ptr, largest_ptr, total_ptr, ids_ptr, q_ptr, choice_ptr, b, temperature,
    stride, kept_stride,
    D: tl.constexpr, K: tl.constexpr, HAS_KEPT: tl.constexpr, ROWS: tl.constexpr,
):
    """Return ``w_0 .. w_D``, fp64 ``[ROWS]``."""
    k = tl.arange(0, ROWS)
    follows = (k >= 1) & (k <= D)  # entry k adds draft row k - 1
    draft = b * D + k - 1
    row = b * (D + 1) + k - 1
    candidate = draft * K + tl.load(choice_ptr + draft, mask=follows, other=0)
    x = tl.load(ids_ptr + candidate, mask=follows, other=0)
    q = tl.load(q_ptr + candidate, mask=follows, other=1.0).to(tl.float64)
    largest = tl.load(largest_ptr + row, mask=follows, other=0.0)
    total = tl.load(total_ptr + row, mask=follows, other=1.0)
    logits, kept = logits_ptr + row * stride + x, kept_ptr + row * kept_stride + x
    y = scaled(logits, kept, follows, temperature, HAS_KEPT)
    p = divided(tl.exp(y - largest), total).to(tl.float64)
    possible = p > 0  # false for NaN
    step = tl.log(tl.where(possible, p, 1.0)) - tl.log(tl.maximum(q, LEAST))
    step = tl.where(follows, tl.where(possible, step, float("-inf")), 0.0)
    log_ratio = tl.cumsum(step, 0)
    return tl.exp(log_ratio - tl.associative_scan(log_ratio, 0, _larger))


@triton.jit
def _candidates(
    logits_ptr, kept_ptr, largest_ptr, total_ptr, ids_ptr, q_ptr, b, temperature, w,
    stride, kept_stride, D: tl.constexpr, K: tl.constexpr, HAS_KEPT: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):
    """Return each row's sums of ``p`` and of ``(w p - q)+`` over its candidates, fp64."""
    k = tl.arange(0, ROWS)
    is_draft = k < D
    row = b * (D + 1) + k
    largest = tl.load(largest_ptr + row, mask=is_draft, other=0.0)[:, None]
    total = tl.load(total_ptr + row, mask=is_draft, other=1.0)[:, None]
    mass = tl.zeros([ROWS], tl.float64)
    above = tl.zeros([ROWS], tl.float64)
    for start in range(0, K, WIDTH):
        c = start + tl.arange(0, WIDTH)
        inside = is_draft[:, None] & (c < K)[None, :]
        candidates = ((b * D + k) * K)[:, None] + c[None, :]
        ids = tl.load(ids_ptr + candidates, mask=inside, other=0)
        q = tl.load(q_ptr + candidates, mask=inside, other=0.0).to(tl.float64)
        logits = logits_ptr + (row * stride)[:, None] + ids
        kept = kept_ptr + (row * kept_stride)[:, None] + ids
        y = scaled(logits, kept, inside, temperature, HAS_KEPT)
        p = divided(tl.exp(y - largest), total)
        p = tl.where(inside & (p == p), p, 0.0).to(tl.float64)
        mass += tl.sum(p, 1)
        above += tl.sum(tl.maximum(w[:, None] * p - q, 0.0), 1)
    return mass, above


@triton.jit(do_not_specialize=[*_PER_BATCH, "vocabulary"])
def _accept_kernel(
    logits_ptr, kept_ptr, row_tokens_ptr, largest_ptr, total_ptr, block_tokens_ptr,
    ids_ptr, q_ptr, choice_ptr, temperatures_ptr, top_ks_ptr, seeded_ptr, seeds_ptr, positions_ptr,
    correct_ptr, weight_ptr, stride, kept_stride, block_stride, vocabulary,
    D: tl.constexpr, K: tl.constexpr, HAS_IDS: tl.constexpr, HAS_KEPT: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, ROWS)
    first = b * (D + 1)
    tokens = tl.load(row_tokens_ptr + first + k, mask=k <= D, other=0)
    drafts = tl.load(block_tokens_ptr + b * block_stride + k + 1, mask=k < D, other=0)
    # The token of a broken row equals no draft.
    correct = tl.min(tl.where((tokens == drafts) & (k < D), D, k), 0)
    weight = tl.full([], 1.0, tl.float64)
    if HAS_IDS:
        temperature = tl.load(temperatures_ptr + b)
        w = _prefix_weights(
            logits_ptr, kept_ptr, largest_ptr, total_ptr, ids_ptr, q_ptr, choice_ptr, b,
            temperature, stride, kept_stride, D, K, HAS_KEPT, ROWS,
        )
        mass, above = _candidates(
            logits_ptr, kept_ptr, largest_ptr, total_ptr, ids_ptr, q_ptr, b, temperature, w,
            stride, kept_stride, D, K, HAS_KEPT, ROWS, WIDTH,
        )
        # The target's mass outside the candidates, where q is zero.
        above += tl.maximum(1.0 - mass, 0.0) * w
        below = above + (1.0 - w)
        # 0 / 0 means that p and q are equal: the next draft is accepted anyway.
        h = tl.where(below == 0, 1.0, above / tl.maximum(below, 1e-300))
        # A broken row ends the block before it: no later row counts for its prefix.
        h = tl.where((k == D) | (tokens == vocabulary), w, h)
        seeded = tl.load(seeded_ptr + b)
        seed = block_seed(tl.load(seeds_ptr + b), seeded, tl.load(positions_ptr + first))
        follows = (k >= 1) & (k <= D)
        u = coin(seed, tl.load(positions_ptr + first + k - 1, mask=follows, other=0))
        # Strictly less, so a draft of probability zero is never accepted.
        reached = tl.max(tl.where(follows & (u < h), k, 0), 0)
        by_block = (tl.load(top_ks_ptr + b) > 1) & (seeded == 0)
        correct = tl.where(by_block, reached, correct)
        weight = tl.where(by_block, tl.sum(tl.where(k == reached, w, 0.0), 0), weight)
    tl.store(correct_ptr + b, correct)
    tl.store(weight_ptr + b, weight)
# fmt: on


def launch(
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
    """Run the kernel and return ``(correct_drafts, weight)``; the module describes the tensors."""
    bs, block = block_tokens.shape
    candidates = 0 if ids is None else ids.shape[2]
    correct = row_tokens.new_empty(bs, dtype=torch.int32)
    weight = row_tokens.new_empty(bs, dtype=torch.float64)
    if bs == 0:
        return correct, weight
    if ids is None:
        # None of these is read; pointers of one type need one compilation.
        logits = kept = largest = total = ids = q = choice = correct
    rows = triton.next_power_of_2(block)
    _accept_kernel[(bs,)](
        *(logits, logits if kept is None else kept, row_tokens, largest, total, block_tokens),
        *(ids, q, choice, temperatures, top_ks, seeded, seeds, positions, correct, weight),
        logits.stride(0),
        0 if kept is None else kept.stride(0),
        block_tokens.stride(0),
        vocabulary,
        D=block - 1,
        K=candidates,
        HAS_IDS=candidates > 0,
        HAS_KEPT=candidates > 0 and kept is not None,
        ROWS=rows,
        WIDTH=max(1, min(triton.next_power_of_2(candidates), TILE // rows)) if candidates else 1,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    return correct, weight
