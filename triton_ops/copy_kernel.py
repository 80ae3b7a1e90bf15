"""Copy drafts at the end of a round: one program per request judges, appends and matches.

One launch replaces about 60 torch operations, and temporaries of ``[bs, H]``, of the reference in
:mod:`triton_ops.copies`, which describes the arguments. A program reads the H tokens of its request
once, and again around every token that equals the last one. It reads no entry of ``history`` that
it writes: what is new comes from ``tokens``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_ops import copies as reference

_SHORTEST, _LONGEST = tl.constexpr(reference.SHORTEST), tl.constexpr(reference.LONGEST)
_KINDS = tl.constexpr(reference.KINDS)
_AHEAD, _BEHIND = tl.constexpr(reference.AHEAD), tl.constexpr(reference.BEHIND)
_AGAINST = tl.constexpr(reference.AGAINST)
_TILE, _WARPS = 2048, 16
# fmt: off
_PER_BATCH = [
    "slots_ptr", "positions_ptr", "tokens_ptr", "lengths_ptr", "drafts_ptr", "top_ks_ptr",
    "position_stride", "token_stride", "draft_stride", "size", "vocabulary",
]
# fmt: on


@triton.jit
def copy_weight(kind, top_k, counts_ptr):
    """Return ``w`` of a kind of match, as ``triton_ops.copies.copy_weights``."""
    counts_ptr += 2 * (tl.where(top_k > 1, _KINDS, 0) + kind)
    right = tl.load(counts_ptr).to(tl.float32) + _AHEAD
    first_right = tl.load(counts_ptr + 1).to(tl.float32)
    return tl.where(kind > 0, tl.div_rn(right, right + (_AGAINST * first_right + _BEHIND)), 0.0)


@triton.jit
def _token(history_ptr, tokens_ptr, p, inside, anchor, size, vocabulary):
    """Return the tokens at positions ``p``: new ones come after the last ``anchor``; -1 outside."""
    old = tl.load(history_ptr + p % size, mask=inside & (p <= anchor), other=-1)
    new = tl.load(tokens_ptr + p - anchor - 1, mask=inside & (p > anchor), other=-1)
    new = tl.where(new < vocabulary, new, -1)
    return tl.where(p <= anchor, old.to(tl.int64), new)


# fmt: off
@triton.jit(do_not_specialize=_PER_BATCH)
def _copy_kernel(
    history_ptr, slots_ptr, positions_ptr, tokens_ptr, lengths_ptr, drafts_ptr, top_ks_ptr,
    rows_ptr, counts_ptr, result_ptr, position_stride, token_stride, draft_stride, size,
    vocabulary, DRAFTS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):
    # fmt: on
    b = tl.program_id(0).to(tl.int64)
    order = tl.arange(0, ROWS)
    history_ptr += tl.load(slots_ptr + b) * size
    tokens_ptr += b * token_stride
    rows_ptr += b * (2 * D + 1)
    anchor = tl.load(positions_ptr + b * position_stride).to(tl.int32)
    length, top_k = tl.load(lengths_ptr + b), tl.load(top_ks_ptr + b)
    end = anchor + length
    committed = order < length
    tokens = _token(history_ptr, tokens_ptr, anchor + 1 + order, committed, anchor, size,
                    vocabulary)  # fmt: skip

    copies = tl.load(rows_ptr + order, mask=order < DRAFTS, other=-1)
    firsts = tl.load(rows_ptr + D + order, mask=order < DRAFTS, other=-1)
    is_right = (copies >= 0) & (tokens == copies)
    right = tl.min(tl.where(is_right, ROWS, order), 0)
    # Only at the first wrong copy can the drafter's choice be right instead.
    is_first = (order == right) & (copies >= 0) & (tokens == firsts)
    copy_right = tl.sum(((order < right) & (copies != firsts)).to(tl.int32), 0)
    first_right = tl.sum(is_first.to(tl.int32), 0)
    kind = tl.where(top_k > 1, _KINDS, 0) + tl.load(rows_ptr + 2 * D)
    if copy_right + first_right > 0:
        tl.atomic_add(counts_ptr + 2 * kind, copy_right)
        tl.atomic_add(counts_ptr + 2 * kind + 1, first_right)
    drafts = tl.load(drafts_ptr + b * draft_stride + order, mask=order < DRAFTS, other=-2)
    followed = tl.min(tl.where((copies >= 0) & (drafts == copies), ROWS, order), 0)
    tl.store(result_ptr + 2 * b + 1, followed.to(tl.int64))

    tl.store(history_ptr + (anchor + 1 + order) % size, tokens.to(tl.int32), mask=committed)

    earliest = tl.maximum(end - size + 1, 0)
    index = tl.arange(0, TILE)
    last = _token(history_ptr, tokens_ptr, end, end >= 0, anchor, size, vocabulary)
    best = tl.full([], 0, tl.int64)
    for tile in range(earliest, end, TILE):
        here = tile + index
        same = here < end
        same &= (_token(history_ptr, tokens_ptr, here, same, anchor, size, vocabulary) == last)
        same &= last >= 0
        if tl.max(same.to(tl.int32), 0) > 0:
            matched = same.to(tl.int64)
            for j in range(1, _LONGEST):
                if tl.max(same.to(tl.int32), 0) > 0:
                    before = _token(history_ptr, tokens_ptr, end - j, end - j >= earliest, anchor,
                                    size, vocabulary)  # fmt: skip
                    same &= (here - j >= earliest) & (before >= 0)
                    same &= _token(history_ptr, tokens_ptr, here - j, same, anchor, size,
                                   vocabulary) == before  # fmt: skip
                    matched += same.to(tl.int64)
            key = tl.where(matched >= _SHORTEST, (matched << 32) | here.to(tl.int64), 0)
            best = tl.maximum(best, tl.max(key, 0))
    start = (best & 0xFFFFFFFF).to(tl.int32)
    # Past the last token the copy repeats itself.
    p = start + 1 + order % tl.maximum(end - start, 1)
    copied = _token(history_ptr, tokens_ptr, p, (best > 0) & (order < D), anchor, size, vocabulary)
    tl.debug_barrier()  # all threads have read what is overwritten
    tl.store(rows_ptr + order, copied, mask=order < D)
    tl.store(rows_ptr + 2 * D, ((best >> 32) + 1) // 4)
    tl.store(result_ptr + 2 * b, ((best >> 32) + 1) // 4)


def launch(
    history: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    drafts: torch.Tensor,
    top_ks: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    vocabulary: int,
) -> torch.Tensor:
    """As ``triton_ops.copies.copy_drafts_reference``."""
    bs, n = len(lengths), rows.shape[1] // 2
    result = rows.new_empty(bs, 2)
    if bs == 0:
        return result
    _copy_kernel[(bs,)](
        *(history, slots, positions, tokens, lengths, drafts, top_ks, rows, counts, result),
        positions.stride(0),
        tokens.stride(0),
        drafts.stride(0),
        history.shape[1],
        vocabulary,
        DRAFTS=drafts.shape[1],
        D=n,
        ROWS=triton.next_power_of_2(max(n + 1, tokens.shape[1])),
        TILE=_TILE,
        num_warps=_WARPS,
    )
    return result
