"""Torch replacements for the Triton helpers of SGLang's DFLASH path."""

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
    """Return ``req_to_token[req, start : start + draft_token_num]``, ``[bs * n]`` int64.

    Seam: ``SRTPlatform.get_speculative_cache_locs_fn``.
    """
    columns = start_offset.long()[:, None] + torch.arange(draft_token_num, device=device)
    return req_to_token[req_pool_indices.long()[:, None], columns].reshape(-1).long()


@replace("sglang.srt.mem_cache.allocation:assign_req_to_token_pool_func", "fdbe87d4a60c")
def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Set ``req_to_token[req_i, start_i : end_i]`` to the next ``end_i - start_i`` slots."""
    # Runs every round; numpy's operations take half as long as torch's here.
    inputs = (req_pool_indices, start_offset, end_offset)
    rows, starts, ends = (tensor[:batch_size].numpy() for tensor in inputs)
    counts = ends - starts
    # A slot's column is its number among the slots of its request, plus the request's start.
    shifts = np.repeat(starts - (counts.cumsum() - counts), counts)
    columns = shifts + np.arange(len(shifts))
    req_to_token.numpy()[np.repeat(rows, counts), columns] = out_cache_loc[: len(shifts)].numpy()


@replace(
    "sglang.kernels.ops.speculative.fused_kv_materialize:_fused_norm_rope_stacked", "50887806aa49"
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
    """Norm and rotate K of all draft layers at once; return it and V.

    Both are ``[layers, n, heads, head_dim]``, RoPE in neox form, fp32 inside; ``k_out`` and
    ``v_out`` are not used.

    Args:
        kv: ``[n, layers, 2 * heads * head_dim]``, each layer's K, then V.
        k_norm_weight: ``[layers, head_dim]``.
        eps: ``[layers]`` fp32.
        cos_sin_cache: ``[max_position, rotary_dim]``, cosines, then sines.
        positions: ``[n]`` int64.
    """
    n, layers, _ = kv.shape
    k, v = kv.view(n, layers, 2, num_kv_heads, head_dim).permute(2, 1, 0, 3, 4)
    k = k.float()
    scale = (k.square().mean(-1, keepdim=True) + eps.view(-1, 1, 1, 1)).rsqrt()
    k = k * scale * k_norm_weight.float().view(layers, 1, 1, head_dim)
    cos, sin = cos_sin_cache[positions].float().unsqueeze(1).chunk(2, -1)
    half = rotary_dim // 2
    first, second, rest = k.split([half, half, head_dim - rotary_dim], -1)
    k = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)
    return k.to(kv.dtype), v
