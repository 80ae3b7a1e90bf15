"""The drafts of a block: one program per request proposes its drafts one after the other.

For six drafts one launch replaces about 170 torch operations (280 with filters) and 6 device
synchronisations, or 43 operations of greedy requests, of the references in
``sglang_hyperdflash.draft.propose``, which describe the arguments. D drafts, K candidates of each,
rank r of the dependency head, V vocabulary:

    s      = scores + sum_j (A[x_{k-1}, j] * gates[j]) * B[ids, j]       # fp32; x_0 the anchor
    s      = penalties, end tokens and bias at the candidates            # fp32, every step rounded
    q_k    = filter(softmax(s / (T t)))                                  # fp32
    q_k    = (1 - w) q_k + w [copy_k]                                    # while x follows the copy
    x_k    = ids[argmax_c(g(seed, position_k, ids_c) + log q_k[c])]      # fp64, first among ties

Sums over r, K and the sorted candidates run in another order than torch's, so ``s`` with a head and
``q`` differ from the references in their last bits; all else has their bits. In a kernel WIDTH is K
padded to a power of two, and CHUNK the columns of the head that a program holds at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_ops.copy_kernel import copy_weight
from triton_ops.distribution_kernel import draft_distribution, drawn, first_largest
from triton_ops.gumbel_kernel import block_seed, divided, noise, row_hash

UNLIKELY = tl.constexpr(-1e30)
_NO_KEY = tl.constexpr(0x7FFFFFFFFFFFFFFF)
# Entries of the successor table that a program holds at a time.
_TILE = 16_384
# fmt: off
# Arguments whose value, stride or alignment differs between batches: one compilation serves all.
_PER_BATCH = [
    "ids_ptr", "scores_ptr", "gates_ptr", "block_ptr", "seeds_ptr", "seeded_ptr", "positions_ptr",
    "temperatures_ptr", "top_ks_ptr", "top_ps_ptr", "min_ps_ptr", "t", "slots_ptr",
    "penalties_ptr", "end_ids_ptr", "earliest_ptr", "bias_ptr", "ends", "block_stride",
    "position_stride", "copies_ptr", "copy_stride", "drafted_ids_ptr",
]
# fmt: on
_PER_GREEDY_BATCH = _PER_BATCH[:3] + ["anchors_ptr", "copies_ptr", "anchor_stride", "copy_stride"]


@triton.jit
def _head(previous, ids, inside, gates_ptr, predecessor_ptr, successor_ptr,
          RANK: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Return the dependency head's scores of candidates ``ids`` after the token ``previous``."""
    total = tl.zeros([WIDTH], tl.float32)
    for start in range(0, RANK, CHUNK):
        j = start + tl.arange(0, CHUNK)
        real = j < RANK
        entries, real_entries = ids[:, None] * RANK + j[None, :], inside[:, None] & real[None, :]
        successors = tl.load(successor_ptr + entries, mask=real_entries, other=0.0)
        state = tl.load(predecessor_ptr + previous * RANK + j, mask=real, other=0.0)
        state = state.to(tl.float32) * tl.load(gates_ptr + j, mask=real, other=0.0)
        total += tl.sum(successors.to(tl.float32) * state[None, :], 1)
    return total


@triton.jit
def penalised(x, counts, frequency, presence, repetition):
    """Return fp32 ``x`` with the penalties for int32 ``counts``; see ``draft.adjust``."""
    seen = counts > 0
    x = x - frequency * counts.to(tl.float32)
    x = x - presence * seen.to(tl.float32)
    scaled = tl.where(x < 0, x * repetition, divided(x, repetition))
    return tl.where(seen, scaled, x)


@triton.jit
def is_end_token(ids, end_ids_ptr, ends):
    """Return which of ``ids`` are among a request's ``ends`` end tokens."""
    is_end = ids < 0
    for e in range(ends):
        is_end = is_end | (ids == tl.load(end_ids_ptr + e))
    return is_end


# fmt: off
@triton.jit(do_not_specialize=_PER_BATCH)
def _propose_kernel(
    ids_ptr, scores_ptr, gates_ptr, predecessor_ptr, successor_ptr, block_ptr,
    seeds_ptr, seeded_ptr, positions_ptr, temperatures_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr,
    t, copies_ptr, copy_counts_ptr, counts_ptr, slots_ptr, penalties_ptr, end_ids_ptr,
    earliest_ptr, bias_ptr,
    tokens_ptr, q_ptr, choice_ptr, drafted_ids_ptr,
    block_stride, position_stride, copy_stride, vocabulary, ends,
    FILTERS: tl.constexpr, SEQUENTIAL: tl.constexpr, D: tl.constexpr, DRAFTS: tl.constexpr,
    K: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, CHUNK: tl.constexpr,
):
    # fmt: on
    b = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, WIDTH)
    inside = index < K
    order = tl.arange(0, DRAFTS)
    drafted = tl.full([DRAFTS], -1, tl.int64)
    positions_ptr += b * position_stride
    seeded = tl.load(seeded_ptr + b)
    seed = block_seed(tl.load(seeds_ptr + b), seeded, tl.load(positions_ptr))
    top_k = tl.load(top_ks_ptr + b)
    argmax = (t <= 0) | (top_k <= 1)
    temperature = tl.where(argmax, 1.0, tl.load(temperatures_ptr + b) * t)
    previous = tl.load(block_ptr + b * block_stride)
    w = 0.0
    if copies_ptr is not None:  # a row: copies, first choices, the kind of match
        copies_ptr += b * copy_stride
        w = copy_weight(tl.load(copies_ptr + copy_stride - 1), top_k, copy_counts_ptr)
        w = tl.where(argmax, tl.where(w > 0.5, 1.0, 0.0), w)  # q stays one-hot
    for k in range(D):
        row = b * D + k
        ids = tl.load(ids_ptr + row * K + index, mask=inside, other=0)
        s = tl.load(scores_ptr + row * K + index, mask=inside, other=0.0)
        position = tl.load(positions_ptr + k)
        if gates_ptr is not None:
            s += _head(previous, ids, inside, gates_ptr + row * RANK, predecessor_ptr,
                       successor_ptr, RANK, CHUNK, WIDTH)  # fmt: skip
        if counts_ptr is not None:
            frequency = tl.load(penalties_ptr + b * 3)
            presence = tl.load(penalties_ptr + b * 3 + 1)
            repetition = tl.load(penalties_ptr + b * 3 + 2)
            counts_row = counts_ptr + tl.load(slots_ptr + b) * vocabulary
            counts = tl.load(counts_row + ids, mask=inside, other=0)
            for j in range(k):
                draft = tl.sum(tl.where(order == j, drafted, 0), 0)
                counts += (ids == draft).to(tl.int32)
            s = penalised(s, counts, frequency, presence, repetition)
        if end_ids_ptr is not None:
            early = position + 1 < tl.load(earliest_ptr + b)
            s = tl.where(early & is_end_token(ids, end_ids_ptr + b * ends, ends), UNLIKELY, s)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + b * vocabulary + ids, mask=inside, other=0.0)
            s += bias.to(tl.float32)
        s = tl.where(inside, s, float("-inf"))

        q, choice = draft_distribution(s, index, inside, temperature, argmax, top_k,
                                       top_ps_ptr + b, min_ps_ptr + b, FILTERS, SEQUENTIAL,
                                       K, WIDTH)  # fmt: skip
        if copies_ptr is not None:
            first = tl.sum(tl.where(index == choice, ids, 0), 0)
            tl.store(copies_ptr + copy_stride // 2 + k, first)
            copy = tl.load(copies_ptr + k)
            place = tl.min(tl.where(ids == copy, index, K - 1), 0)
            # The likeliest candidate is replaced where q is one-hot alone.
            if (copy >= 0) & ((place != choice) | argmax) & (w > 0):
                ids = tl.where(index == place, copy, ids)
                q = (1.0 - w) * q + tl.where(index == place, w, 0.0)
                choice = tl.where(argmax, place, choice)
            tl.store(drafted_ids_ptr + row * K + index, ids, mask=inside)
        if argmax == 0:
            g = noise(row_hash(seed, position), ids.to(tl.uint32))
            choice = drawn(q, g, index, WIDTH)
        previous = tl.sum(tl.where(index == choice, ids, 0), 0)
        if copies_ptr is not None:
            w = tl.where(previous == copy, w, 0.0)
        drafted = tl.where(order == k, previous, drafted)
        tl.store(tokens_ptr + row, previous)
        tl.store(choice_ptr + row, choice.to(tl.int64))
        tl.store(q_ptr + row * K + index, q, mask=inside)


# fmt: off
@triton.jit(do_not_specialize=_PER_GREEDY_BATCH)
def _greedy_kernel(
    ids_ptr, scores_ptr, gates_ptr, predecessor_ptr, successor_ptr, anchors_ptr, copies_ptr,
    copy_counts_ptr, tokens_ptr, anchor_stride, copy_stride, D: tl.constexpr, K: tl.constexpr,
    WIDTH: tl.constexpr, RANK: tl.constexpr, CHUNK: tl.constexpr,
):
    # fmt: on
    b = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, WIDTH)
    inside = index < K
    previous = tl.load(anchors_ptr + b * anchor_stride)
    if copies_ptr is not None:
        copies_ptr += b * copy_stride
        follows = copy_weight(tl.load(copies_ptr + copy_stride - 1), 1, copy_counts_ptr) > 0.5
    for k in range(D):
        row = b * D + k
        ids = tl.load(ids_ptr + row * K + index, mask=inside, other=0)
        s = tl.load(scores_ptr + row * K + index, mask=inside, other=float("-inf"))
        if gates_ptr is not None:
            s += _head(previous, ids, inside, gates_ptr + row * RANK, predecessor_ptr,
                       successor_ptr, RANK, CHUNK, WIDTH)  # fmt: skip
            choice = first_largest(s, index, inside, WIDTH)
            previous = tl.sum(tl.where(index == choice, ids, 0), 0)
        else:  # like an argmax over the vocabulary: the lowest id among equals
            nan = s != s
            broken = tl.max(nan.to(tl.int32), 0)
            largest = (s == tl.max(tl.where(nan, float("-inf"), s), 0)) | (broken > 0)
            previous = tl.min(tl.where(largest & inside, ids, _NO_KEY), 0)
        if copies_ptr is not None:
            tl.store(copies_ptr + copy_stride // 2 + k, previous)
            copy = tl.load(copies_ptr + k)
            follows &= copy >= 0
            previous = tl.where(follows, copy, previous)
        tl.store(tokens_ptr + row, previous)


def shape(candidates: int, gates: torch.Tensor | None) -> tuple[dict[str, int], int]:
    """Return the compile-time sizes, and the warps of a program; ``gates`` None without a head."""
    padded = max(2, triton.next_power_of_2(candidates))
    rank = 1 if gates is None else gates.shape[-1]
    chunk = min(triton.next_power_of_2(rank), max(1, _TILE // padded))
    # 64 entries of a tile for each thread, or 32 of the pairs of 64 candidates.
    tile = 0 if gates is None else padded * chunk
    warps = min(16, max(1, tile // 2048, padded // 16))
    return {"K": candidates, "WIDTH": padded, "RANK": rank, "CHUNK": chunk}, warps


def launch(
    ids: torch.Tensor,
    scores: torch.Tensor,
    gates: torch.Tensor | None,
    predecessor: torch.Tensor | None,
    successor: torch.Tensor | None,
    block_tokens: torch.Tensor,
    seeds: torch.Tensor,
    seeded: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    draft_temperature: float,
    filters: bool,
    sequential: bool,
    copy_rows: torch.Tensor | None,
    copy_counts: torch.Tensor | None,
    counts: torch.Tensor | None,
    slots: torch.Tensor | None,
    penalties: torch.Tensor | None,
    end_ids: torch.Tensor | None,
    earliest: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return drafts, ``q``, choices and candidates, like ``draft.propose.propose_reference``."""
    bs, drafts, candidates = ids.shape
    tokens, choice = ids.new_empty(bs, drafts), ids.new_empty(bs, drafts)
    q = torch.empty_like(scores)
    drafted_ids = ids if copy_rows is None else torch.empty_like(ids)
    if tokens.numel() == 0:
        return tokens, q, choice, drafted_ids
    sizes, warps = shape(candidates, gates)
    table = counts if counts is not None else bias
    if counts is not None and bias is not None and counts.shape[-1] != bias.shape[-1]:
        raise ValueError(f"counts are {tuple(counts.shape)}, bias is {tuple(bias.shape)}")
    _propose_kernel[(bs,)](
        *(ids, scores, gates, predecessor, successor, block_tokens, seeds, seeded, positions),
        *(temperatures, top_ks, top_ps, min_ps, draft_temperature),
        *(copy_rows, copy_counts, counts, slots, penalties, end_ids, earliest, bias),
        *(tokens, q, choice, drafted_ids),
        block_tokens.stride(0),
        positions.stride(0),
        0 if copy_rows is None else copy_rows.stride(0),
        0 if table is None else table.shape[-1],
        0 if end_ids is None else end_ids.shape[-1],
        FILTERS=filters,
        SEQUENTIAL=sequential,
        D=drafts,
        DRAFTS=triton.next_power_of_2(drafts),
        **sizes,
        num_warps=warps,
        enable_fp_fusion=False,
    )
    return tokens, q, choice, drafted_ids


def launch_greedy(
    ids: torch.Tensor,
    scores: torch.Tensor,
    gates: torch.Tensor | None,
    predecessor: torch.Tensor | None,
    successor: torch.Tensor | None,
    anchors: torch.Tensor,
    copy_rows: torch.Tensor | None = None,
    copy_counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the drafts of greedy requests, like ``draft.propose.propose_greedy_reference``."""
    bs, drafts, candidates = ids.shape
    tokens = ids.new_empty(bs, drafts)
    if tokens.numel() == 0:
        return tokens
    sizes, warps = shape(candidates, gates)
    _greedy_kernel[(bs,)](
        ids,
        scores,
        gates,
        predecessor,
        successor,
        anchors,
        copy_rows,
        copy_counts,
        tokens,
        anchors.stride(0),
        0 if copy_rows is None else copy_rows.stride(0),
        D=drafts,
        **sizes,
        num_warps=warps,
        enable_fp_fusion=False,
    )
    return tokens
