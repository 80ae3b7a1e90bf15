"""Penalties, end tokens and bias of a batch's logits, in place.

One launch replaces about 50 torch operations and 3 device synchronisations of its reference in
``sglang_hyperdflash.draft.adjust``, and their fp32 copies of the logits. It has the reference's
bits: fp32 in the same order of operations, rounded to the logits' dtype after the penalties and
again after the bias. A program takes a tile of the vocabulary and iterates over the rows of one
request's block, so it reads the counts once and adds the block's drafts as it goes.

Every row of a request with penalties, and with a bias every row of the batch, is read and written
once. For a request with end tokens alone only their entries are written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_ops.propose_kernel import is_end_token, penalised

BLOCK, WARPS = 1024, 4


@triton.jit
def _narrowed(x, dtype: tl.constexpr):
    """Round fp32 ``x`` to another dtype, to nearest, ties to even."""
    if dtype == tl.bfloat16:
        # Like a cast on CUDA; the cast of Triton's interpreter truncates.
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
        out = tl.where(x != x, 0x7FC0, bits).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        out = x.to(dtype)
    return out


# fmt: off
@triton.jit(do_not_specialize=["block_ptr", "positions_ptr", "slots_ptr", "penalties_ptr",
                               "end_ids_ptr", "earliest_ptr", "rows", "ends"])
def _adjust_kernel(
    logits_ptr, block_ptr, positions_ptr, counts_ptr, slots_ptr, penalties_ptr, end_ids_ptr,
    earliest_ptr, bias_ptr, vocabulary, row_stride, rows, ends, BLOCK: tl.constexpr,
):
    # fmt: on
    dtype: tl.constexpr = logits_ptr.dtype.element_ty
    b = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocabulary
    penalise = tl.full([], bias_ptr is not None, tl.int1)
    whole = penalise  # whole rows are read and written, not only end tokens
    if counts_ptr is not None:
        frequency = tl.load(penalties_ptr + b * 3)
        presence = tl.load(penalties_ptr + b * 3 + 1)
        repetition = tl.load(penalties_ptr + b * 3 + 2)
        penalise = (frequency != 0) | (presence != 0) | (repetition != 1)
        whole = whole | penalise
        counts = tl.zeros([BLOCK], tl.int32)
        if penalise:
            slot = tl.load(slots_ptr + b)
            counts = tl.load(counts_ptr + slot * vocabulary + ids, mask=inside, other=0)
    forbidden = ids < 0
    if end_ids_ptr is not None:
        end = is_end_token(ids, end_ids_ptr + b * ends, ends)
        earliest = tl.load(earliest_ptr + b)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + b * vocabulary + ids, mask=inside, other=0.0).to(tl.float32)
        bias = _narrowed(bias, dtype).to(tl.float32)
    for k in range(rows):
        row = b * rows + k
        entries = logits_ptr + row * row_stride + ids
        if end_ids_ptr is not None:
            forbidden = end & (tl.load(positions_ptr + row) + 1 < earliest)
        if whole:
            x = tl.load(entries, mask=inside, other=0.0).to(tl.float32)
            if counts_ptr is not None:
                changed = penalised(x, counts, frequency, presence, repetition)
                x = tl.where(penalise, _narrowed(changed, dtype).to(tl.float32), x)
                # Row k + 1 follows one more draft.
                draft = tl.load(block_ptr + row + 1, mask=k + 1 < rows, other=-1)
                counts += (ids == draft).to(tl.int32)
            x = tl.where(forbidden, float("-inf"), x)
            if bias_ptr is not None:
                x = x + bias
            tl.store(entries, _narrowed(x, dtype), mask=inside)
        else:
            lowest = tl.full([BLOCK], float("-inf"), tl.float32)
            tl.store(entries, _narrowed(lowest, dtype), mask=inside & forbidden)


def launch(
    logits: torch.Tensor,
    block_tokens: torch.Tensor,
    positions: torch.Tensor,
    counts: torch.Tensor | None,
    slots: torch.Tensor | None,
    penalties: torch.Tensor | None,
    end_ids: torch.Tensor | None,
    earliest: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> None:
    """Adjust ``logits [bs, B, V]`` in place, like ``draft.adjust.adjust_rows_reference``."""
    bs, rows, vocabulary = logits.shape
    if logits.stride(-1) != 1:
        raise ValueError(f"logits must have unit column stride, found {logits.stride()}")
    if logits.numel() == 0:
        return
    for table in (counts, bias):
        if table is not None and table.shape[-1] != vocabulary:
            raise ValueError(f"expected rows of {vocabulary} tokens, found {tuple(table.shape)}")
    _adjust_kernel[(bs, triton.cdiv(vocabulary, BLOCK))](
        logits,
        block_tokens,
        positions,
        counts,
        slots,
        penalties,
        end_ids,
        earliest,
        bias,
        vocabulary,
        logits.stride(1),  # more than the vocabulary if the LM head is padded
        rows,
        0 if end_ids is None else end_ids.shape[-1],
        BLOCK=BLOCK,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
