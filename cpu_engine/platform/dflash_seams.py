"""Triton kernels of SGLang's DFLASH path, replaced on the CPU platform."""

from __future__ import annotations

from cpu_engine.platform.torch_ops import assign_req_to_token_pool, norm_rope_stacked
from sglang_hyperdflash.seams import Seam


def no_triton_rope(result, self, *args, **kwargs):
    """Use the draft layers' plain q/k norm and RoPE: the fused one is a Triton kernel."""
    self.use_table_qk_norm_rope = False


def draft_kv_of_all_layers(result, self, *args, **kwargs):
    """Project draft K/V of all layers at once, as on a GPU: a third of the operations."""
    self._use_fused_kv_materialize = True
    self._init_fused_kv_helper()


def last_slots(req_to_token, req_pool_indices_tensor, prefix_lens_tensor):
    """The last slot of each request, -1 for an empty one; pages are continued after it."""
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)


SEAMS = (
    Seam(
        "sglang.srt.speculative.dflash_worker_v2:DFlashWorkerV2.__init__",
        "after",
        draft_kv_of_all_layers,
        ("self", "server_args", "gpu_id", "nccl_port", "target_worker"),
        "c6c8b572f6f4",
        "a CPU writes draft K/V layer by layer, in ninety operations",
    ),
    Seam(
        "sglang.kernels.ops.speculative.fused_kv_materialize:_fused_norm_rope_stacked",
        "replace",
        norm_rope_stacked,
        (
            "kv",
            "k_norm_weight",
            "eps",
            "cos_sin_cache",
            "positions",
            "num_kv_heads",
            "head_dim",
            "rotary_dim",
            "k_out",
            "v_out",
        ),
        "c7a956787248",
        "norm and RoPE of all layers' draft K are a Triton kernel",
    ),
    Seam(
        "sglang.srt.models.dflash:DFlashAttention.__init__",
        "after",
        no_triton_rope,
        ("self", "config", "layer_id", "quant_config", "prefix"),
        "03ca3f5e0ec5",
        "the fused q/k norm and RoPE of the draft layers is a Triton kernel",
    ),
    Seam(
        "sglang.srt.mem_cache.allocation:assign_req_to_token_pool_func",
        "replace",
        assign_req_to_token_pool,
        (
            "req_pool_indices",
            "req_to_token",
            "start_offset",
            "end_offset",
            "out_cache_loc",
            "batch_size",
        ),
        "38afebdebbbc",
        "the request-to-token writer of speculative decoding is a Triton kernel",
    ),
    Seam(
        "sglang.srt.mem_cache.allocation:get_last_loc",
        "replace",
        last_slots,
        ("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
        "b13e5670f932",
        "with pages of several tokens, where a request's last one ends is found by a Triton kernel",
    ),
)
