"""Torch forms of the Triton helpers that SGLang's DFLASH path calls without a GPU."""

from __future__ import annotations

import numpy as np
import torch

from sglang_hyperdflash.seams import replace


def extend_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: torch.device | str,
) -> torch.Tensor:
    """``req_to_token[req, start : start + draft_token_num]`` flattened, int64 ``[bs * n]``.

    Seam: ``SRTPlatform.get_speculative_cache_locs_fn``.
    """
    columns = start_offset.long()[:, None] + torch.arange(draft_token_num, device=device)
    return req_to_token[req_pool_indices.long()[:, None], columns].reshape(-1).long()


@replace("sglang.srt.mem_cache.allocation:assign_req_to_token_pool_func", "38afebdebbbc")
def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """``req_to_token[req_i, start_i : end_i] = next (end_i - start_i) slots``, in place."""
    # Runs every round: numpy's operations cost half of torch's here.
    inputs = (req_pool_indices, start_offset, end_offset)
    rows, starts, ends = (each[:batch_size].numpy() for each in inputs)
    counts = ends - starts
    # Where each slot goes: its place among its request's own, from the request's start.
    shifts = np.repeat(starts - (counts.cumsum() - counts), counts)
    columns = shifts + np.arange(len(shifts))
    req_to_token.numpy()[np.repeat(rows, counts), columns] = out_cache_loc[: len(shifts)].numpy()


@replace(
    "sglang.kernels.ops.speculative.fused_kv_materialize:_fused_norm_rope_stacked", "c7a956787248"
)
def norm_rope_stacked(
    kv: torch.Tensor,
    k_norm_weight: torch.Tensor,
    eps: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    k_out: torch.Tensor | None = None,
    v_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K normed and rotated, and V, of all draft layers at once: ``[layers, n, heads, head_dim]``.

    Neox form, fp32 inside; ``k_out`` and ``v_out`` are buffers that are not needed here.

    Args:
        kv: ``[n, layers, 2 * heads * head_dim]``: each layer's K, then V.
        k_norm_weight: ``[layers, head_dim]``. eps: ``[layers]``. positions: ``[n]`` int64.
        cos_sin_cache: ``[positions, rotary_dim]``: cosines, then sines.
    """
    n, layers, _ = kv.shape
    k, v = kv.view(n, layers, 2, num_kv_heads, head_dim).permute(2, 1, 0, 3, 4)
    wide = k.float()
    scale = (wide.square().mean(-1, keepdim=True) + eps.view(-1, 1, 1, 1)).rsqrt()
    wide = wide * scale * k_norm_weight.float().view(layers, 1, 1, head_dim)
    cos, sin = cos_sin_cache[positions].float().unsqueeze(1).chunk(2, -1)
    half = rotary_dim // 2
    first, second, rest = wide.split([half, half, head_dim - rotary_dim], -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)
    return turned.to(kv.dtype), v
