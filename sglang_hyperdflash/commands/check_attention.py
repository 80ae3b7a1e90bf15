"""Attention of drafted blocks over paged K/V: the kernels that a draft may use, against torch.

A block's rows attend to their request's context and to the block. Each token's K/V lie in a slot.
Slots are in whole pages, as the target's are, or single slots of a ring for a windowed drafter.
Each kernel gets what SGLang's backend of that name gives it in ``TARGET_VERIFY``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_hyperdflash.serving.draft_kv.attention import TOKEN_BACKENDS
from triton_ops.comparison import largest_difference

HEADS = (32, 8, 128)  # query heads, K/V heads, and their width
BLOCK, WINDOW = 7, 128
LENGTHS = (1, 255, 256, 1000)
# The page size of each layout; a window's slots are single slots of a ring.
LAYOUTS = {"page 1": 1, "page 256": 256, "window": 1}
# Largest relative error ||result - expected|| / ||expected|| of a row in bf16; that of a wrong page
# is far larger.
TOLERANCE = 1e-2


@dataclass(frozen=True)
class Batch:
    """Drafted blocks of some requests.

    Attributes:
        q: ``[bs * B, heads, D]``, the blocks' queries.
        k: ``[slots, kv_heads, D]``, the keys of the contexts and of the blocks.
        v: ``[slots, kv_heads, D]``, their values.
        slots: ``[bs, length]`` int64, the slots of each request's tokens; arbitrary past its end.
        lengths: ``[bs]`` int32, the tokens of each context.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    block: int
    page: int

    @property
    def starts(self) -> torch.Tensor:
        """The first row of each block and the end of the last, ``[bs + 1]`` int32."""
        blocks = torch.arange(len(self.slots) + 1, device=self.q.device, dtype=torch.int32)
        return blocks * self.block

    def packed_slots(self, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return offsets ``[bs + 1]`` int32 and the slots of each request's first tokens."""
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
        first = torch.arange(self.slots.shape[1], device=offsets.device) < lengths.unsqueeze(1)
        return offsets, self.slots[first]


def new_batch(
    layout: str,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    sizes: tuple[int, int, int] = HEADS,
    lengths: tuple[int, ...] = LENGTHS,
) -> Batch:
    """Return random K/V in pages in any order; those of a window are in single slots."""
    heads, kv_heads, width = sizes
    generator, page = torch.Generator().manual_seed(0), LAYOUTS[layout]
    if layout == "window":
        lengths = tuple(min(length, WINDOW) for length in lengths)
    longest = max(lengths) + BLOCK
    pages = -(-longest // page)
    order = torch.randperm(len(lengths) * pages, generator=generator).view(-1, pages, 1)
    slots = (order * page + torch.arange(page)).flatten(1)[:, :longest]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    k, v = (normal(len(lengths) * pages * page, kv_heads, width) for _ in range(2))
    q = normal(len(lengths) * BLOCK, heads, width)
    contexts = torch.tensor(lengths, dtype=torch.int32).to(device)
    return Batch(q, k, v, slots.to(device), contexts, BLOCK, page)


def reference(batch: Batch, causal: bool) -> torch.Tensor:
    """Return the attention ``[bs * B, heads, D]`` fp32 in torch, one request after the other."""
    results = []
    for b, length in enumerate(batch.lengths.tolist()):
        slots = batch.slots[b, : length + batch.block]
        k, v = (kv[slots].float().transpose(0, 1) for kv in (batch.k, batch.v))
        q = batch.q[b * batch.block : (b + 1) * batch.block].float().transpose(0, 1)
        visible = torch.ones(batch.block, len(slots), dtype=torch.bool, device=q.device)
        if causal:
            visible = visible.tril(length)
        result = scaled_dot_product_attention(q, k, v, visible, enable_gqa=True)
        results.append(result.transpose(0, 1))
    return torch.cat(results)


def flash_attention(version: int, batch: Batch, causal: bool) -> torch.Tensor:
    """Run FA3 of sgl_kernel or SGLang's FA4; seam: ``FlashAttentionBackend.forward_extend``."""
    if version == 3:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache
    else:
        from sglang.kernels.ops.attention.flash_attention_v4 import flash_attn_with_kvcache
    page, lengths = batch.page, batch.lengths + batch.block
    return flash_attn_with_kvcache(
        q=batch.q,
        k_cache=batch.k.view(-1, page, *batch.k.shape[1:]),
        v_cache=batch.v.view(-1, page, *batch.v.shape[1:]),
        page_table=(batch.slots[:, ::page] // page).to(torch.int32),
        cache_seqlens=lengths,
        cu_seqlens_q=batch.starts,
        cu_seqlens_k_new=batch.packed_slots(lengths)[0],
        max_seqlen_q=batch.block,
        softmax_scale=batch.q.shape[-1] ** -0.5,
        causal=causal,
        window_size=(-1, -1),
        softcap=0.0,
        return_softmax_lse=False,
        num_splits=0,
        ver=version,
    )


def triton(batch: Batch, causal: bool) -> torch.Tensor:
    """Run SGLang's Triton kernel, which reads the context by its slots and the block directly."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    offsets, context = batch.packed_slots(batch.lengths)
    rows = torch.arange(batch.block, device=offsets.device)
    block = batch.slots.gather(1, batch.lengths.long().unsqueeze(1) + rows).flatten()
    out = torch.empty_like(batch.q)
    extend_attention_fwd(
        *(batch.q, batch.k[block], batch.v[block], out, batch.k, batch.v),
        *(batch.starts, offsets, context, None, causal, None, batch.block, 1.0, 1.0),
        sm_scale=batch.q.shape[-1] ** -0.5,
        page_size=batch.page,
    )
    return out


def flashinfer(batch: Batch, causal: bool) -> torch.Tensor:
    """Run FlashInfer's paged prefill on pages of one slot, planned on the host."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    offsets, slots = batch.packed_slots(batch.lengths + batch.block)
    heads, width = batch.q.shape[1:]
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=batch.q.device)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    last = torch.ones_like(batch.lengths)
    pages = batch.starts, offsets, slots.to(torch.int32), last
    sizes, dtype = (heads, batch.k.shape[1], width, 1), batch.q.dtype
    wrapper.plan(*pages, *sizes, causal=causal, q_data_type=dtype, kv_data_type=dtype)
    return wrapper.run(batch.q, (batch.k.unsqueeze(1), batch.v.unsqueeze(1)))


BACKENDS: dict[str, Callable[[Batch, bool], torch.Tensor]] = {
    "fa3": partial(flash_attention, 3),
    "fa4": partial(flash_attention, 4),
    "triton": triton,
    "flashinfer": flashinfer,
}


def uncompiled_flashinfer_modules() -> list[str]:
    """Return FlashInfer's modules that are compiled at first use, for minutes; all without it."""
    try:
        from flashinfer.jit.attention.modules import _gen_batch_prefill_primary_module
        from flashinfer.jit.sampling import gen_sampling_module
        from flashinfer.jit.topk import gen_topk_module
    except (ImportError, RuntimeError):
        return ["attention", "topk", "sampling"]

    dtypes = *(torch.bfloat16,) * 3, torch.int32
    sizes = HEADS[2], HEADS[2], 0, False, False, False
    modules = {
        "attention": _gen_batch_prefill_primary_module("fa2", *dtypes, *sizes),
        "topk": gen_topk_module(),
        "sampling": gen_sampling_module(),
    }
    return [name for name, module in modules.items() if not module.is_compiled]


def layouts(name: str) -> list[str]:
    """Return the layouts that a backend can address; only some read single slots."""
    return [layout for layout in LAYOUTS if layout != "window" or name in TOKEN_BACKENDS]


def difference(attention: Callable, batch: Batch, causal: bool) -> str | None:
    """Describe the largest difference from torch, or return None if there is only rounding."""
    expected, result = reference(batch, causal), attention(batch, causal).float()
    norms = expected.flatten(1).norm(dim=1)
    errors = (result - expected).flatten(1).norm(dim=1)
    wrong = ~(errors <= TOLERANCE * norms)
    if not wrong.any():
        return None
    return largest_difference("output", result, expected, wrong.view(-1, 1, 1).expand_as(result))
