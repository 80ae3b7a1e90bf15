"""Triton kernels of SGLang's DFLASH path that the CPU platform replaces."""

from __future__ import annotations

from sglang_hyperdflash.cpu.torch_ops import assign_req_to_token_pool
from sglang_hyperdflash.seams import Seam


def no_triton_rope(result, self, *args, **kwargs):
    """Use the draft layers' plain q/k norm and RoPE: the fused one is a Triton kernel."""
    self.use_table_qk_norm_rope = False


SEAMS = (
    Seam(
        "sglang.srt.models.dflash:DFlashAttention.__init__",
        "after",
        no_triton_rope,
        ("self", "config", "layer_id", "quant_config", "prefix"),
        "a3f49ffdee1f",
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
        "fdbe87d4a60c",
        "the request-to-token writer of speculative decoding is a Triton kernel",
    ),
)
