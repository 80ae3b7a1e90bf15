"""The bonus token of each block, and the packed tokens that a round commits.

One launch, or two if a bonus token is drawn, replaces about 15 or 110 torch operations of the
reference ``triton_ops.verification.finish_reference``, and the ``[bs, V]`` tensors of its draw.
Arguments are those of :mod:`triton_ops.accept_kernel`, without ``choice``, and

    argument        shape  dtype
    correct_drafts  [bs]   int32
    weight          [bs]   fp64, w of the accepted drafts
    draws                  bool, whether some request is verified by blocks

    result  shape                               dtype
    packed  [bs * B + bs + ceil(bs / 2)]        int64: tokens, next anchors, accept lengths (int32)

A program takes one row's share of the vocabulary, so a single row still fills the GPU; a second
kernel takes the best of the shares and commits. Where ``q`` is 0, the score of a token is

    log(w p_v) + g_v  =  y_v - largest + g_v + constant

without another logarithm than those of the noise. The last program of a row scores its candidates,
``(w p - q)+`` of all K at once, and the others exclude them; only a tile that contains candidates
looks up which. The residual ``(w p - q)+`` may be zero everywhere, which no share knows, so each
share also stores its best draw from ``p``. WIDTH is K, ROWS is B padded to a power of two.

The results of a share, ``[bs, parts, 2]``, of the residual and of ``p``:

    scores  fp64   the best score of its ids
    ids     int32  its id, the lowest of equals; NONE if no id has a score
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_ops.accept_kernel import scaled
from triton_ops.gumbel_kernel import RESIDUAL_STREAM, block_seed, divided, noise, row_hash
from triton_ops.rows_kernel import NONE, shares
from triton_ops.verification import packed_size, unpacked

BLOCK, WARPS = 1024, 8
# The programs of one row: shares of the vocabulary, and one for the candidates.
MAX_SHARES = 127
MAX_PARTS = MAX_SHARES + 1
# fmt: off
# Arguments whose value, stride or alignment differs between batches: one compilation serves all.
_PER_BATCH = (
    "row_tokens_ptr", "largest_ptr", "total_ptr", "block_tokens_ptr", "ids_ptr", "q_ptr",
    "correct_ptr", "weight_ptr", "temperatures_ptr", "top_ks_ptr", "seeded_ptr", "seeds_ptr",
    "positions_ptr", "lens_ptr", "block_stride", "tiles", "parts",
)


@triton.jit
def _store_best(scores_ptr, ids_ptr, part, best, ids):
    top = tl.max(best, 0)
    tl.store(scores_ptr + part, top)
    tl.store(ids_ptr + part, tl.min(tl.where(best == top, ids, NONE), 0))


@triton.jit
def _candidate_scores(
    logits_ptr, kept_ptr, q_ptr, ids, is_candidate, temperature, largest, total, w, hashed,
    HAS_KEPT: tl.constexpr,
):
    """Return the residual's scores of the candidates, on the scale of ``y - largest + g``."""
    q = tl.load(q_ptr, mask=is_candidate, other=0.0)
    y = scaled(logits_ptr + ids, kept_ptr + ids, is_candidate, temperature, HAS_KEPT)
    residual = divided(tl.exp(y - largest), total) * w - q
    possible = is_candidate & (residual > 0)
    log_residual = tl.log(tl.where(possible, residual, 1.0).to(tl.float64))
    scale = tl.log(total.to(tl.float64)) - tl.log(tl.where(w > 0, w, 1.0).to(tl.float64))
    score = log_residual + scale + noise(hashed, ids.to(tl.uint32))
    return tl.where(possible, score, float("-inf"))


@triton.jit
def _best_of_tiles(
    logits_ptr, kept_ptr, candidates, temperature, largest, total, w, hashed, vocabulary, first,
    tiles, HAS_KEPT: tl.constexpr, BLOCK: tl.constexpr,
):
    """Return each lane's best score and id of the residual outside the candidates, and of ``p``."""
    best = tl.full([BLOCK], float("-inf"), tl.float64)
    best_left = tl.full([BLOCK], float("-inf"), tl.float64)
    best_ids = tl.full([BLOCK], NONE, tl.int32)
    best_left_ids = tl.full([BLOCK], NONE, tl.int32)
    last = tl.minimum(first + tiles, tl.cdiv(vocabulary, BLOCK))
    for tile in range(first, last):
        start = tile * BLOCK
        ids = start + tl.arange(0, BLOCK)
        inside = ids < vocabulary
        y = scaled(logits_ptr + ids, kept_ptr + ids, inside, temperature, HAS_KEPT)
        y = tl.where(inside, y, float("-inf"))
        score = y.to(tl.float64) - largest.to(tl.float64) + noise(hashed, ids.to(tl.uint32))
        better = score > best
        best = tl.where(better, score, best)
        best_ids = tl.where(better, ids, best_ids)
        has_mass = divided(tl.exp(y - largest), total) * w > 0
        score = tl.where(has_mass, score, float("-inf"))
        here = (candidates >= start) & (candidates < start + BLOCK)
        if tl.max(here.to(tl.int32), 0) > 0:
            counts = tl.histogram(tl.where(here, candidates - start, 0), BLOCK, mask=here)
            score = tl.where(counts > 0, float("-inf"), score)
        better = score > best_left
        best_left = tl.where(better, score, best_left)
        best_left_ids = tl.where(better, ids, best_left_ids)
    return best_left, best_left_ids, best, best_ids


@triton.jit(do_not_specialize=_PER_BATCH)
def _share_kernel(
    logits_ptr, kept_ptr, row_tokens_ptr, largest_ptr, total_ptr, ids_ptr, q_ptr, correct_ptr,
    weight_ptr, temperatures_ptr, top_ks_ptr, seeded_ptr, seeds_ptr, positions_ptr,
    scores_ptr, best_ids_ptr, vocabulary, stride, kept_stride, tiles,
    D: tl.constexpr, K: tl.constexpr, HAS_KEPT: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):
    """Store the best of one row's share, of the residual and of ``p``."""
    b, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    correct = tl.load(correct_ptr + b)
    row = b * (D + 1) + correct
    seeded = tl.load(seeded_ptr + b)
    greedy = tl.load(top_ks_ptr + b) <= 1
    if greedy | seeded | (tl.load(row_tokens_ptr + row) == vocabulary):
        return
    temperature = tl.load(temperatures_ptr + b)
    largest = tl.load(largest_ptr + row)
    total = tl.load(total_ptr + row)
    w = tl.load(weight_ptr + b).to(tl.float32)
    seed = block_seed(tl.load(seeds_ptr + b), seeded, tl.load(positions_ptr + b * (D + 1)))
    hashed = row_hash(seed ^ RESIDUAL_STREAM, tl.load(positions_ptr + row))
    logits, kept = logits_ptr + row * stride, kept_ptr + row * kept_stride
    result = (b * parts + part) * 2
    # After the last draft nothing was rejected, and the row has no candidates.
    c = tl.arange(0, WIDTH)
    is_candidate = (c < K) & (correct < D)
    entries = (b * D + tl.minimum(correct, D - 1)) * K + c
    candidates = tl.load(ids_ptr + entries, mask=is_candidate, other=-1).to(tl.int32)
    if part == parts - 1:
        score = _candidate_scores(
            logits, kept, q_ptr + entries, candidates, is_candidate, temperature, largest,
            total, w, hashed, HAS_KEPT,
        )
        possible_ids = tl.where(score > float("-inf"), candidates, NONE)
        _store_best(scores_ptr, best_ids_ptr, result, score, possible_ids)
        tl.store(scores_ptr + result + 1, float("-inf"))
        tl.store(best_ids_ptr + result + 1, NONE)
    else:
        best_left, best_left_ids, best, best_ids = _best_of_tiles(
            logits, kept, candidates, temperature, largest, total, w, hashed, vocabulary,
            part * tiles, tiles, HAS_KEPT, BLOCK,
        )
        _store_best(scores_ptr, best_ids_ptr, result, best_left, best_left_ids)
        _store_best(scores_ptr, best_ids_ptr, result + 1, best, best_ids)


@triton.jit
def _best_of_shares(scores_ptr, ids_ptr, parts, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    scores = tl.load(scores_ptr + part * 2, mask=part < parts, other=float("-inf"))
    ids = tl.load(ids_ptr + part * 2, mask=part < parts, other=NONE)
    return tl.min(tl.where(scores == tl.max(scores, 0), ids, NONE), 0)


@triton.jit(do_not_specialize=[*_PER_BATCH, "vocabulary"])
def _commit_kernel(
    row_tokens_ptr, block_tokens_ptr, correct_ptr, top_ks_ptr, seeded_ptr, scores_ptr, ids_ptr,
    packed_ptr, lens_ptr, block_stride, parts, vocabulary,
    D: tl.constexpr, DRAWS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
):
    """Shift the drafts left, append the bonus token, and pack what the round commits."""
    b, bs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    correct = tl.load(correct_ptr + b)
    bonus = tl.load(row_tokens_ptr + b * (D + 1) + correct)
    broken = bonus == vocabulary
    if DRAWS:
        shares = b * parts * 2
        left = _best_of_shares(scores_ptr + shares, ids_ptr + shares, parts, PARTS)
        drawn = _best_of_shares(scores_ptr + shares + 1, ids_ptr + shares + 1, parts, PARTS)
        # An empty residual means that p and q are equal up to rounding: draw from p.
        drawn = tl.where(left == NONE, drawn, left)
        drawn = tl.where(drawn == NONE, 0, drawn)
        is_row_token = (tl.load(top_ks_ptr + b) <= 1) | tl.load(seeded_ptr + b)
        bonus = tl.where(is_row_token | broken, bonus, drawn.to(tl.int64))
    k = tl.arange(0, ROWS)
    drafts = tl.load(block_tokens_ptr + b * block_stride + k + 1, mask=k < D, other=0)
    tokens = tl.where(k == correct, bonus, drafts)
    tl.store(packed_ptr + b * (D + 1) + k, tokens, mask=k <= D)
    tl.store(packed_ptr + bs * (D + 1) + b, tl.where(broken, 0, bonus))
    tl.store(lens_ptr + b, correct + 1)
    # An odd batch leaves half a word, which ranks broadcast like the rest.
    tl.store(lens_ptr + bs, 0, mask=(b == bs - 1) & (bs % 2 == 1))
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
    """Run the kernels and return ``packed``; the module describes the tensors."""
    bs, block = block_tokens.shape
    packed = row_tokens.new_empty(packed_size(bs, block))
    if bs == 0:
        return packed
    # Without draws none of these is read.
    parts, scores, best_ids = 0, packed, packed
    if draws:
        count, tiles = shares(bs, vocabulary, BLOCK, MAX_SHARES)
        parts, candidates = count + 1, ids.shape[2]
        scores = weight.new_empty(bs, parts, 2)
        best_ids = correct_drafts.new_empty(bs, parts, 2)
        _share_kernel[(bs, parts)](
            *(logits, logits if kept is None else kept, row_tokens, largest, total, ids, q),
            *(correct_drafts, weight, temperatures, top_ks, seeded, seeds, positions),
            *(scores, best_ids, vocabulary, logits.stride(0)),
            0 if kept is None else kept.stride(0),
            tiles,
            D=block - 1,
            K=candidates,
            HAS_KEPT=kept is not None,
            WIDTH=triton.next_power_of_2(candidates),
            BLOCK=BLOCK,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    _commit_kernel[(bs,)](
        *(row_tokens, block_tokens, correct_drafts, top_ks, seeded, scores, best_ids),
        *(packed, unpacked(packed, bs, block)[1]),
        *(block_tokens.stride(0), parts, vocabulary),
        D=block - 1,
        DRAWS=draws,
        ROWS=triton.next_power_of_2(block),
        PARTS=MAX_PARTS,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return packed
