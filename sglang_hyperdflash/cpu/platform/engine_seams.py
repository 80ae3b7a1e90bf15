"""What SGLang's engine asks of a GPU or of sgl_kernel, replaced on the CPU platform.

For tensor parallelism SGLang's CPU engine binds threads and pads heads, as sgl_kernel wants them.
This platform has gloo and plain torch, and it shards as a GPU does.
"""

from __future__ import annotations

import os

import torch

from sglang_hyperdflash import is_ours
from sglang_hyperdflash.seams import after, around, replace
from triton_ops.gumbel import hash32

THREADS_BIND = "SGLANG_CPU_OMP_THREADS_BIND"


@around("sglang.srt.arg_groups.speculative_hook:_handle_dflash", "12b1b03eca9f")
def attention_data_parallelism(original, server_args):
    """Let attention data parallelism through as on CUDA: ranks gather over gloo here."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    device = resolving_view(server_args).device
    declare_resolution(server_args, "hyperdflash", device="cuda")
    try:
        return original(server_args)
    finally:
        declare_resolution(server_args, "hyperdflash", device=device)


@after("sglang.srt.models.dflash:DFlashAttention.__init__", "a3f49ffdee1f")
def no_triton_rope(result, self, *args, **kwargs):
    """Use plain q/k norm and RoPE in draft layers; the fused ones are a Triton kernel."""
    self.use_table_qk_norm_rope = False


@after("sglang.srt.speculative.dflash_worker_v2:DFlashWorkerV2.__init__", "94c547064b01")
def draft_kv_of_all_layers(result, self, *args, **kwargs):
    """Project the draft K/V of all layers at once, as on a GPU, in a third of the operations."""
    self._use_fused_kv_materialize = True
    self._init_fused_kv_helper()


@after("sglang.srt.speculative.dflash_utils:is_dflash_sampling_verify_available", "9a66c4eba0f8")
def sampling_masks(available):
    """Let requests ask for sampling masks: HYPERDFLASH needs no kernel of SGLang's to be exact."""
    from sglang.srt.runtime_context import get_spec

    return available or is_ours(get_spec().speculative_algorithm)


@replace("sglang.srt.mem_cache.allocation:get_last_loc", "b14bba7a1b96")
def last_slots(req_to_token, req_pool_indices_tensor, prefix_lens_tensor):
    """Return the last slot of each request, after which its page continues; -1 without one."""
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)


@around("sglang.srt.distributed.bootstrap:_bind_threads_if_cpu", "edf673cd20fb")
def ranks_share_a_node(original, *, device: str):
    """Let more ranks than NUMA nodes start; SGLang still checks an explicit binding.

    Only ``sgl_kernel.init_cpu_threads_env`` reads the result, and it is not called without AMX.
    """
    return original(device=device) if THREADS_BIND in os.environ else None


@around("sglang.srt.configs.update_config:adjust_config_with_unaligned_cpu_tp", "fcbd518636d1")
def unpadded_heads(original, model_config, load_config, tp_size: int):
    """Keep the config, so that K/V heads which do not divide are replicated as on a GPU.

    A padded ``num_key_value_heads`` would no longer describe the checkpoint, and DeepSeek-V4's one
    shared K/V head cannot be split at all.
    """
    return model_config


@around(
    "sglang.srt.distributed.parallel_state:GroupCoordinator.all_gather_into_tensor", "6c3b3198a56c"
)
def gather_over_gloo(original, self, output, input):
    """Concatenate ``input`` of all ranks into ``output`` on the path of SGLang's CPU engine.

    SGLang registers its custom operator for another device on an out-of-tree platform, so CPU
    tensors have no kernel there.
    """
    self._all_gather_into_tensor(output, input)


@replace("sglang.kernels.ops.sampling.murmur_hash:murmur_hash32", "b3fb6ecfaff0")
def torch_murmur_hash(seed, positions, col_indices):
    """Compute ``murmur_hash32``, ``[n, m]`` int64; SGLang's CPU form needs sgl_kernel."""
    signed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed
    return hash32(signed, positions, col_indices)


@replace(
    "sglang.srt.model_executor.model_runner:ModelRunner.maybe_enable_batch_invariant_mode",
    "50c417a13a23",
)
def keep_matrix_products(self):
    """Keep torch's products; SGLang's batch-invariant ones are Triton kernels.

    On a CPU fp32 results may differ in the last bits between batch sizes.
    """


@replace("sglang.srt.models.dflash:_radix_topk", "36f02c6d2f2b")
def torch_topk(scores, k):
    """Return the values and ids of each row's k largest; FlashInfer's kernel needs CUDA."""
    return torch.topk(scores, k, dim=-1)
