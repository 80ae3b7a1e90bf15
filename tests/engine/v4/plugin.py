"""A server plugin: SGLang's own DeepSeek-V4 on a CPU, torch in the place of its CUDA kernels.

Model class, boundaries, attention backend, metadata, plans' addresses, K/V pools and allocators
stay SGLang's. Every replacement has the arguments of the function it replaces and writes the same
bytes to the same pools.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Callable

import torch

from tests.engine.v4 import (
    compressor,
    controls,
    drafts,
    exact,
    latents,
    plans,
    product,
    sparse,
    states,
    streams,
)
from tests.engine.v4 import trace as traces

# What a CUDA server chooses by its device; here by environment.
ENVIRONMENT = {
    "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1",
    "SGLANG_OPT_USE_FUSED_HASH_TOPK": "0",
    "SGLANG_OPT_FLASHMLA_SPARSE_PREFILL": "0",
}
DEVICE_LENGTHS = "V4_DEVICE_LENGTHS"


def replace(original: Callable, new: Callable) -> None:
    """Put ``new`` where SGLang's modules imported ``original`` by name."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("sglang."):
            continue
        for key, value in list(vars(module).items()):
            if value is original:
                setattr(module, key, new)


def flash_mla() -> None:
    """FlashMLA's wheel is CUDA only, and the backend imports it."""
    name = "sglang.kernels.ops.attention.flash_mla_interface"
    module = types.ModuleType(name)
    module.flash_mla_with_kvcache = sparse.flash_mla_with_kvcache
    module.get_mla_metadata = lambda *args, **kwargs: (types.SimpleNamespace(), None)
    module.FlashMLASchedMeta = types.SimpleNamespace
    module.SPLIT_KV_MIN_TOPK = 641
    sys.modules[name] = module
    importlib.import_module("sglang.kernels.ops.attention").flash_mla_interface = module


def kernels() -> None:
    """Every kernel that a round reaches."""
    importlib.import_module("sglang.kernels.ops.attention.dsv4")
    from sglang.kernels.ops.activation import silu_and_mul_clamp
    from sglang.kernels.ops.attention.dsv4 import compress, metadata_kernel, norm_rope
    from sglang.kernels.ops.kvcache import dsv4_c128_cleanup
    from sglang.kernels.ops.layernorm import mhc, mhc_head
    from sglang.srt.mem_cache import allocation

    compress.CompressorDecodePlan.generate = staticmethod(plans.plan_decode)
    compress.CompressorPrefillPlan.generate = staticmethod(plans.plan_prefill)
    for module, ours, names in (
        (compress, compressor, ("compress_forward", "compress_norm_rope_store")),
        (dsv4_c128_cleanup, compressor, ("clear_unaccepted_c128_draft_states",)),
        (norm_rope, latents, ("fused_rope_inplace", "fused_q_norm_rope")),
        (norm_rope, latents, ("fused_k_norm_rope_flashmla",)),
        (norm_rope, latents, ("fused_q_indexer_rope_hadamard_quant",)),
        (metadata_kernel, sparse, ("init_compression_metadata",)),
        (mhc, streams, ("mhc_pre", "mhc_post", "mhc_fused_post_pre")),
        (mhc_head, streams, ("fused_hc_head",)),
        (silu_and_mul_clamp, streams, ("silu_and_mul_clamp",)),
    ):
        for name in names:
            replace(getattr(module, name), getattr(ours, name))
    # Pages of 256 in speculative decoding; SGLang has this one in torch too.
    replace(allocation.get_last_loc_triton, allocation.get_last_loc_torch)


def backend() -> None:
    """DeepSeek-V4's attention backend as on CUDA: sequence lengths stay on the device."""
    module = importlib.import_module("sglang.srt.layers.attention.deepseek_v4_backend")
    module._is_cuda = True
    module.is_cuda = lambda: True
    indexer = importlib.import_module("sglang.srt.layers.attention.dsv4.indexer")
    indexer.fp8_paged_mqa_logits_torch = sparse.index_logits
    indexer.topk_transform_pytorch_vectorized = sparse.topk_transform


def model() -> None:
    """The class's CUDA decoder layer, and what would refuse it on another device."""
    module = importlib.import_module("sglang.srt.models.deepseek_v4")
    get_rope = module.get_rope_wrapper
    module.get_rope_wrapper = lambda *args, device=None, **options: get_rope(*args, **options)
    module._is_cuda = True
    module.DeepseekV4DecoderLayer = module.DeepseekV4CudaDecoderLayer
    module.DeepseekV4ForCausalLM._prewarm_mhc_kernels = lambda self: None
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


def load() -> None:
    """SGLang's plugin entry point."""
    flash_mla()
    kernels()
    exact.exact_everywhere()
    backend()
    model()
    if DEVICE_LENGTHS in os.environ:  # the draft's lengths too
        from cpu_engine.platform.attention import TorchAttention

        TorchAttention.needs_cpu_seq_lens = False
    controls.install()
    traces.install()
    states.install()
    product.install()
    drafts.install()
    print("V4: replacements are in place", flush=True)
