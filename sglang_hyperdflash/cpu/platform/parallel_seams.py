"""Seams that disable assumptions of SGLang's CPU engine about tensor parallelism.

There sgl_kernel's operators bind threads and pad heads. This platform has gloo and plain torch, and
it shards as a GPU does.
"""

from __future__ import annotations

import os

from sglang_hyperdflash.seams import around

THREADS_BIND = "SGLANG_CPU_OMP_THREADS_BIND"


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
