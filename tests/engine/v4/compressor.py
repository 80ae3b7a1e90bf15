"""Torch forms of DeepSeek-V4's compressors (``c4_v2.cuh``, ``c128_v2.cuh``, their fused store)."""

import torch

from tests.engine.v4.latents import NOPE, rms, rotate_end, store_index, store_latents
from tests.engine.v4.planner import NO_ROW


def plan_rows(plan: torch.Tensor) -> torch.Tensor:
    """A plan's bytes as int32 rows."""
    return plan.contiguous().view(torch.int32).view(-1, plan.shape[1] // 4)


def compress_forward(
    kv_score_buffer, kv_score_input, ape, plan, head_dim, compress_ratio, out, is_online
):
    """Softmax over a window of 8 or 128 rows, per channel; the step's rows enter the rings."""
    assert not is_online
    if out is None:
        # Uninitialised on a GPU: a row that is never written must not be read.
        out = kv_score_input.new_full((plan[1].shape[0], head_dim), float("nan"))
    flat = kv_score_buffer.view(-1, kv_score_buffer.shape[-1])
    window = 8 if compress_ratio == 4 else 128

    def compress(page_0, page_1, source, from_ring, seq_len) -> torch.Tensor:
        """The first ``from_ring`` rows of a window are in the ring, the others are the step's."""
        pages = [page_0, page_1] if compress_ratio == 4 else [page_1]
        ring = kv_score_buffer[pages].flatten(0, 1)[:from_ring]
        rows = torch.cat([ring, kv_score_input[source + 1 - window + from_ring : source + 1]])
        kv, score = rows.float().chunk(2, dim=1)
        if compress_ratio == 4:  # a series for the four tokens before, one for the four at hand
            kv, score = (torch.cat([x[:4, :head_dim], x[4:, head_dim:]]) for x in (kv, score))
            if seq_len <= 4:
                kv[:4], score[:4] = 0, torch.finfo(torch.float32).min
        weights = (score.double() + ape.double()).softmax(0)
        return (weights * kv.double()).sum(0).float().to(out.dtype)

    rows = plan_rows(plan[1]).tolist()
    if plan.is_decode:
        for i, (seq_len, write, page_0, page_1) in enumerate(rows):
            flat[write] = kv_score_input[i].to(flat.dtype)
            if seq_len % compress_ratio == 0:
                out[i] = compress(page_0, page_1, i, window, seq_len)
        return out
    for i, (seq_len, packed, page_0, page_1) in enumerate(rows):
        if seq_len != NO_ROW:
            out[i] = compress(page_0, page_1, packed & 0xFFFF, (packed >> 16) & 0xFFFF, seq_len)
    # On a GPU too, all compressions are launched before the writes.
    for source, write in plan_rows(plan[2]).tolist():
        if source != NO_ROW:
            flat[write] = kv_score_input[source].to(flat.dtype)
    return out


def compress_norm_rope_store(
    kv, plan, norm_weight, norm_eps, freq_cis, out_loc, kvcache, page_size,
    use_fp4, bf16_store, fp8_2buff,
) -> None:  # fmt: skip
    """Norm, RoPE at the window's first position, store."""
    assert not (use_fp4 or bf16_store or fp8_2buff) and out_loc.dtype == torch.int64
    rows = plan_rows(plan[1]).long()
    if plan.is_decode:
        chosen = torch.nonzero(rows[:, 0] % plan.compress_ratio == 0)[:, 0]
        loc = out_loc[chosen]
    else:
        chosen = torch.nonzero(rows[:, 0] != NO_ROW)[:, 0]
        loc = out_loc[rows[chosen, 1] & 0xFFFF]
    if not len(chosen):
        return
    position = rows[chosen, 0] - plan.compress_ratio
    x = rotate_end(rms(kv[chosen], norm_eps, norm_weight), freq_cis, position)
    assert torch.isfinite(x).all(), "a compressed row that was never computed"
    if kv.shape[1] == 512:
        x = torch.cat([x[:, :NOPE].to(torch.bfloat16).float(), x[:, NOPE:]], dim=1)
        store_latents(x, loc, kvcache, page_size)
    else:
        store_index(x, loc, kvcache, page_size)


def clear_unaccepted_c128_draft_states(
    state, req_pool_indices, seq_lens, accept_lens, ring_size, num_draft_tokens
) -> None:
    """Empty the ring rows of rejected drafts, as EAGLE asks for after every round."""
    half = state.shape[-1] // 2
    offsets = torch.arange(num_draft_tokens)
    rows = req_pool_indices.long()[:, None] * ring_size
    rows = (rows + (seq_lens.long()[:, None] + offsets) % ring_size)[
        offsets >= accept_lens[:, None]
    ]
    flat = state.view(-1, state.shape[-1])
    flat[rows, :half], flat[rows, half:] = 0.0, float("-inf")
