"""Assumptions of SGLang's CPU start-up about tensor parallelism that do not hold here.

The assumptions belong to SGLang's own CPU engine: sgl_kernel's operators bind threads and pad
heads. This platform has gloo and plain torch, and its shards follow the GPU's rules.
"""

from __future__ import annotations

import os

from sglang_hyperdflash.seams import around

THREADS_BIND = "SGLANG_CPU_OMP_THREADS_BIND"


@around("sglang.srt.distributed.bootstrap:_bind_threads_if_cpu", "a97202ca9092")
def ranks_share_a_node(original, *, device: str):
    """Let more ranks than NUMA nodes start; an explicit binding is still SGLang's to check.

    Only ``sgl_kernel.init_cpu_threads_env`` reads the result, and it is not called without AMX.
    """
    return original(device=device) if THREADS_BIND in os.environ else None


@around("sglang.srt.configs.update_config:adjust_config_with_unaligned_cpu_tp", "7ea0f5579da6")
def unpadded_heads(original, model_config, load_config, tp_size: int):
    """Keep the config: K/V heads that do not divide are replicated, as on a GPU, not padded.

    A padded ``num_key_value_heads`` would no longer describe the checkpoint, and DeepSeek-V4's
    one shared K/V head cannot be split at all.
    """
    return model_config


@around(
    "sglang.srt.distributed.parallel_state:GroupCoordinator.all_gather_into_tensor", "5d02718ce1e7"
)
def gather_over_gloo(original, self, output, input):
    """Concatenate every rank's ``input [n]`` into ``output [ranks * n]``, of any shape.

    SGLang registers its custom operator for its out-of-tree platform's own device only, so CPU
    tensors have no kernel there; its plain path is what its CPU engine takes.
    """
    self._all_gather_into_tensor(output, input)
