"""Attention of drafted blocks over paged K/V: the kernels that a draft may use, against torch.

A block's rows attend to their request's context and to the block. K/V lie in slots, one for each
token: whole pages where the target has pages, single ones of a ring for a windowed drafter. Each
kernel gets what SGLang's backend of that name gives it in ``TARGET_VERIFY``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from sglang_hyperdflash.serving.draft_kv.attention import TOKEN_BACKENDS, chosen
from triton_ops.comparison import largest_difference

# Heads of queries and of K/V, and their width.
HEADS, BLOCK = (32, 8, 128), 7
LENGTHS = (1, 255, 256, 1000)
# Tokens a page of each layout; a window's slots are single ones, of a ring.
LAYOUTS = {"page 1": 1, "page 256": 256, "window": 1}
# ||result - expected|| / ||expected|| of bf16, and for one row: a wrong page is far above.
TOLERANCE = 1e-2


@dataclass(frozen=True)
class Batch:
    """Drafted blocks of some requests.

    Attributes:
        q: ``[bs * B, heads, D]``; k, v: ``[slots, kv_heads, D]``, the blocks' own among them.
        slots: ``[bs, length]`` int64, of each request's tokens; rows past its end are any.
        lengths: ``[bs]`` int32, tokens of the contexts.
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
        """``[bs + 1]`` int32: the first row of each block."""
        return torch.arange(len(self.slots) + 1, device=self.q.device, dtype=torch.int32) * (
            self.block
        )

    def rows(self, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``([bs + 1] int32, slots)`` of each request's first tokens, one after the other."""
        ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
        wanted = torch.arange(self.slots.shape[1], device=ends.device) < lengths.unsqueeze(1)
        return ends, self.slots[wanted]


def new_batch(
    layout: str,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    sizes: tuple[int, int, int] = HEADS,
    lengths: tuple[int, ...] = LENGTHS,
) -> Batch:
    """A batch whose K/V lie in pages in any order; of a window, in single slots."""
    heads, kv_heads, width = sizes
    generator, page = torch.Generator().manual_seed(0), LAYOUTS[layout]
    if layout == "window":
        lengths = tuple(min(length, 128) for length in lengths)
    longest = max(lengths) + BLOCK
    pages = -(-longest // page)
    order = torch.randperm(len(lengths) * pages, generator=generator).view(-1, pages, 1)
    slots = (order * page + torch.arange(page)).flatten(1)[:, :longest]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    k, v = (normal(len(lengths) * pages * page, kv_heads, width) for _ in range(2))
    given = torch.tensor(lengths, dtype=torch.int32).to(device)
    q = normal(len(lengths) * BLOCK, heads, width)
    return Batch(q, k, v, slots.to(device), given, BLOCK, page)


def reference(batch: Batch, causal: bool) -> torch.Tensor:
    """``[bs * B, heads, D]`` fp32 in torch, one request after the other."""
    results, group = [], batch.q.shape[1] // batch.k.shape[1]
    for b, length in enumerate(batch.lengths.tolist()):
        read = batch.slots[b, : length + batch.block]
        k, v = (
            t[read].float().repeat_interleave(group, 1).transpose(0, 1) for t in (batch.k, batch.v)
        )
        q = batch.q[b * batch.block : (b + 1) * batch.block].float().transpose(0, 1)
        scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
        if causal:
            place = torch.arange(len(read), device=q.device)
            hidden = place > place[length:].unsqueeze(1)
            scores = scores.masked_fill(hidden, float("-inf"))
        results.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(results)


def flash_attention(version: int, batch: Batch, causal: bool) -> torch.Tensor:
    """FA3 of sgl_kernel or SGLang's FA4; seam: ``FlashAttentionBackend.forward_extend``."""
    if version == 3:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache
    else:
        from sglang.kernels.ops.attention.flash_attention_v4 import flash_attn_with_kvcache
    page, ends = batch.page, batch.lengths + batch.block
    return flash_attn_with_kvcache(
        q=batch.q,
        k_cache=batch.k.view(-1, page, *batch.k.shape[1:]),
        v_cache=batch.v.view(-1, page, *batch.v.shape[1:]),
        page_table=(batch.slots[:, ::page] // page).to(torch.int32),
        cache_seqlens=ends,
        cu_seqlens_q=batch.starts,
        cu_seqlens_k_new=batch.rows(ends)[0],
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
    """SGLang's Triton kernel: the context by its slots, the block as it is."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    ends, context = batch.rows(batch.lengths)
    block = batch.slots.gather(
        1, batch.lengths.long().unsqueeze(1) + torch.arange(batch.block, device=ends.device)
    ).flatten()
    out = torch.empty_like(batch.q)
    extend_attention_fwd(
        *(batch.q, batch.k[block], batch.v[block], out, batch.k, batch.v),
        *(batch.starts, ends, context, None, causal, None, batch.block, 1.0, 1.0),
        sm_scale=batch.q.shape[-1] ** -0.5,
        page_size=batch.page,
    )
    return out


def flashinfer(batch: Batch, causal: bool) -> torch.Tensor:
    """FlashInfer's paged prefill on pages of one slot, planned on the host."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    (ends, read), (heads, width) = batch.rows(batch.lengths + batch.block), batch.q.shape[1:]
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=batch.q.device)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    last = torch.ones_like(batch.lengths)
    pages = batch.starts, ends, read.to(torch.int32), last
    sizes, dtype = (heads, batch.k.shape[1], width, 1), batch.q.dtype
    wrapper.plan(*pages, *sizes, causal=causal, q_data_type=dtype, kv_data_type=dtype)
    return wrapper.run(batch.q, (batch.k.unsqueeze(1), batch.v.unsqueeze(1)))


BACKENDS: dict[str, Callable[[Batch, bool], torch.Tensor]] = {
    "fa3": partial(flash_attention, 3),
    "fa4": partial(flash_attention, 4),
    "triton": triton,
    "flashinfer": flashinfer,
}


def backends(capability: tuple[int, int]) -> list[str]:
    """What a draft may use on a GPU without compiling for minutes: the default, and Triton."""
    generation = {"sm90": capability[0] == 9, "sm100": capability[0] == 10}
    default, _ = chosen("dsv4", None, (), **generation)
    return list(dict.fromkeys([default, "triton"]))


def uncompiled_flashinfer_modules() -> list[str]:
    """FlashInfer's modules that their first use compiles, for minutes; all where it is missing."""
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
    """Those whose slots a backend can name: whole pages, or single slots."""
    return [layout for layout in LAYOUTS if layout != "window" or name in TOKEN_BACKENDS]


def difference(attention: Callable, batch: Batch, causal: bool) -> str | None:
    """The largest difference from torch, if it is more than rounding."""
    expected, result = reference(batch, causal), attention(batch, causal).float()
    sizes = expected.flatten(1).norm(dim=1)
    errors = (result - expected).flatten(1).norm(dim=1)
    wrong = ~(errors <= TOLERANCE * sizes)
    if not wrong.any():
        return None
    return largest_difference("output", result, expected, wrong.view(-1, 1, 1).expand_as(result))
