"""A server plugin: SGLang's own DeepSeek-V4 on a CPU, torch in the place of its CUDA kernels.

Model class, boundaries, attention backend, metadata, plans' addresses, K/V pools and allocators
stay SGLang's. Every replacement takes arguments of the function it replaces by their names and
writes the same bytes to the same pools.
"""

import functools
import importlib
import inspect
import os
import sys
import types
from collections.abc import Callable

import torch

from sglang_hyperdflash.seams import when_imported
from tests.engine.v4 import (  # fmt: skip
    compressor,
    controls,
    drafts,
    exact,
    latents,
    planner,
    product,
    sparse,
    streams,
    trace,
)

# What a CUDA server chooses by its device; here by environment.
ENVIRONMENT = {
    "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1",
    "SGLANG_OPT_USE_FUSED_HASH_TOPK": "0",
    "SGLANG_OPT_FLASHMLA_SPARSE_PREFILL": "0",
}
DEVICE_LENGTHS = "V4_DEVICE_LENGTHS"
OPS, DSV4 = "sglang.kernels.ops", "sglang.kernels.ops.attention.dsv4"
# What is replaced, by SGLang's modules: ours has the same name.
SEAMS: dict[str, tuple[Callable, ...]] = {
    f"{DSV4}.compress": (compressor.compress_forward, compressor.compress_norm_rope_store),
    f"{DSV4}.norm_rope": (
        latents.fused_rope_inplace,
        latents.fused_q_norm_rope,
        latents.fused_k_norm_rope_flashmla,
        latents.fused_q_indexer_rope_hadamard_quant,
    ),
    f"{DSV4}.metadata_kernel": (sparse.init_compression_metadata,),
    f"{OPS}.attention.flash_mla_interface": (
        sparse.flash_mla_with_kvcache,
        sparse.get_mla_metadata,
    ),
    f"{OPS}.kvcache.dsv4_c128_cleanup": (compressor.clear_unaccepted_c128_draft_states,),
    f"{OPS}.layernorm.mhc": (streams.mhc_pre, streams.mhc_post, streams.mhc_fused_post_pre),
    f"{OPS}.activation.silu_and_mul_clamp": (streams.silu_and_mul_clamp,),
    "sglang.srt.layers.attention.dsv4.indexer": (
        sparse.fp8_paged_mqa_logits_torch,
        sparse.topk_transform_pytorch_vectorized,
    ),
}


def flash_mla_without_cuda() -> None:
    """FlashMLA's wheel is CUDA only, and SGLang's interface imports it."""
    wheel, inner = types.ModuleType("flash_mla"), types.ModuleType("flash_mla.flash_mla_interface")
    wheel.fused_norm_rope_attn_rope_cast = None
    inner.FlashMLASchedMeta = types.SimpleNamespace
    sys.modules |= {"flash_mla": wheel, "flash_mla.flash_mla_interface": inner}


def standing_in(original: Callable, ours: Callable) -> Callable:
    """``ours``, called as ``original`` is."""
    shape, wanted = inspect.signature(original), inspect.signature(ours).parameters

    @functools.wraps(original)
    def called(*args, **options):
        given = shape.bind(*args, **options)
        given.apply_defaults()
        return ours(**{name: given.arguments[name] for name in wanted})

    return called


def replace(original: Callable, new: Callable) -> None:
    """Put ``new`` where SGLang's modules imported ``original`` by name."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("sglang."):
            continue
        for key, value in list(vars(module).items()):
            if value is original:
                setattr(module, key, new)


def kernels() -> None:
    """Every kernel that a round reaches."""
    flash_mla_without_cuda()
    importlib.import_module(DSV4)
    for place, functions in SEAMS.items():
        for ours in functions:
            original = getattr(importlib.import_module(place), ours.__name__)
            replace(original, standing_in(original, ours))
    compress = importlib.import_module(f"{DSV4}.compress")
    for plan, ours in (
        (compress.CompressorDecodePlan, planner.plan_decode),
        (compress.CompressorPrefillPlan, planner.plan_prefill),
    ):
        plan.generate = staticmethod(standing_in(plan.generate, ours))
    # Pages of 256 in speculative decoding; SGLang has this one in torch too.
    from sglang.srt.mem_cache import allocation

    replace(allocation.get_last_loc_triton, allocation.get_last_loc_torch)


def backend() -> None:
    """DeepSeek-V4's attention backend as on CUDA: sequence lengths stay on the device."""
    module = importlib.import_module("sglang.srt.layers.attention.deepseek_v4_backend")
    module._is_cuda, module.is_cuda = True, lambda: True


def model() -> None:
    """The class's CUDA decoder layer, and what would refuse it on another device."""
    module = importlib.import_module("sglang.srt.models.deepseek_v4")
    get_rope = module.get_rope_wrapper
    module.get_rope_wrapper = lambda *args, device=None, **options: get_rope(*args, **options)
    module._is_cuda = True
    module.DeepseekV4DecoderLayer = module.DeepseekV4CudaDecoderLayer
    module.DeepseekV4ForCausalLM._prewarm_mhc_kernels = lambda self: None
    head = importlib.import_module(f"{OPS}.layernorm.mhc_head")
    replace(head.fused_hc_head, module.hc_head_torch)
    nextn = importlib.import_module("sglang.srt.models.deepseek_v4_nextn")
    nextn._is_cuda, nextn.DeepseekV4DecoderLayer = True, module.DeepseekV4CudaDecoderLayer
    # The model makes five streams, and uses them only while a graph is captured.
    torch.cuda.Stream = torch.cpu.Stream
    # The MTP layer waits for the device once, when it is given the target's embedding.
    torch.cuda.synchronize = torch.cpu.synchronize
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    UnquantizedFusedMoEMethod.forward_native = streams.experts_forward
    configurator = importlib.import_module("sglang.srt.mem_cache.kv_cache_configurator")
    configurator.reject_out_of_tree_path = lambda *args, **kwargs: None


def whole_pages() -> None:
    """End a server whose drafter has no whole pages: FA3 finds them by their first slots."""

    from sglang_hyperdflash.serving.drafting.draft_step import DraftStep

    draft = DraftStep.draft

    def drafted(self, batch, block, context, *rest):
        runner = self.runners.draft
        windowed = self.runners.window is not None  # in a pool of single slots
        page, table = 1 if windowed else runner.page_size, runner.req_to_token_pool.req_to_token
        ends = (context.lengths + block.width).tolist()
        for request, end in zip(batch.req_pool_indices.tolist(), ends, strict=True):
            slots = table[request, :end]
            first = slots[::page]
            assert not (first % page).any(), "a page's first token is in no page's first slot"
            inside = torch.arange(end) % page
            assert windowed or torch.equal(slots, first.repeat_interleave(page)[:end] + inside)
        return draft(self, batch, block, context, *rest)

    DraftStep.draft = drafted


def load() -> None:
    """SGLang's plugin entry point."""
    kernels()
    exact.exact_everywhere()
    backend()
    model()
    if DEVICE_LENGTHS in os.environ:  # the draft's lengths too
        from sglang_hyperdflash.cpu.platform.attention import TorchAttention

        TorchAttention.needs_cpu_seq_lens = False
    when_imported("sglang_hyperdflash.serving.drafting.draft_step", whole_pages)
    for part in (controls, trace, product):
        part.install()
    drafts.install_if_asked()
    print("V4: replacements are in place", flush=True)
