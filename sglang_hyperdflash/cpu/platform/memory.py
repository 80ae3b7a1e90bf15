"""How much memory a server on the CPU platform has, whatever other processes use.

SGLang sizes a pool of K/V from the difference of free memory before and after loading. On a CPU
it reads the host's free memory, so memory that other processes allocate meanwhile would count.
"""

from __future__ import annotations

import logging

import psutil

from sglang_hyperdflash.seams import after, replace
from sglang_hyperdflash.tools.environment import positive_number

logger = logging.getLogger(__name__)

# GiB of K/V of a server without --max-total-tokens.
KV_GIB = "HYPERDFLASH_CPU_KV_GIB"
GIB = 1 << 30


@replace("sglang.srt.utils.common:get_free_cpu_memory", "96c5f51c9488")
def memory_of_this_process() -> int:
    """Bytes of the machine, or of its control group, less what this process holds.

    SGLang reads it for the device ``cpu`` only.
    """
    from sglang.srt.utils.common import get_instance_memory_status

    limit = get_instance_memory_status("/sys/fs/cgroup/memory.max")
    total = psutil.virtual_memory().total
    own = psutil.Process().memory_info().rss
    return max(0, (total if limit is None else min(total, limit)) - own)


def kv_limit() -> int:
    """Bytes that a pool of K/V may take unless the user gave its size in tokens.

    Raises:
        HyperDFlashConfigError: ``HYPERDFLASH_CPU_KV_GIB`` is not a positive number.
    """
    return int(positive_number(KV_GIB, "a positive number of GiB") * GIB)


@after(
    "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator._profile_available_bytes",
    "4d54d290be83",
)
def bound_kv(result: int, self, pre_model_load_memory) -> int:
    """Unless ``--max-total-tokens`` says so, do not take most of a machine for K/V."""
    from sglang.srt.runtime_context import get_schedule

    limit = kv_limit()
    if get_schedule().max_total_tokens is not None or result <= limit:
        return result
    logger.info(
        "K/V on the CPU platform: %.2f GiB of the %.2f GiB that --mem-fraction-static allows; "
        "%s or --max-total-tokens changes that.",
        limit / GIB,
        result / GIB,
        KV_GIB,
    )
    return limit
