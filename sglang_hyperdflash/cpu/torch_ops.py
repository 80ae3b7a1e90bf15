"""Torch forms of the Triton helpers that SGLang's DFLASH path reaches without a GPU."""

from __future__ import annotations

import torch


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


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """``req_to_token[req_i, start_i : end_i] = next (end_i - start_i) slots``, in place.

    Seam: ``sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func``.
    """
    taken = 0
    bounds = torch.stack([req_pool_indices[:batch_size], start_offset, end_offset]).tolist()
    for row, start, end in zip(*bounds, strict=True):
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start
