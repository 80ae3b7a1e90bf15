"""The memory of a server on the CPU platform, independent of other processes.

SGLang sizes a K/V pool from the difference of free memory before and after loading. On a CPU it
reads the host's free memory, which includes what other processes allocate meanwhile.
"""

from __future__ import annotations

import logging

import psutil

from sglang_hyperdflash.seams import after, replace
from sglang_hyperdflash.tools.environment import positive_number

logger = logging.getLogger(__name__)

# The variable with the GiB of K/V of a server without --max-total-tokens.
KV_GIB = "HYPERDFLASH_CPU_KV_GIB"
GIB = 1 << 30


@replace("sglang.srt.utils.common:get_free_cpu_memory", "eea369dced06")
def memory_of_this_process() -> int:
    """Return the memory of the machine or control group less that of this process, in bytes."""
    from sglang.srt.utils.common import get_instance_memory_status

    limit = get_instance_memory_status("/sys/fs/cgroup/memory.max")
    total = psutil.virtual_memory().total
    used = psutil.Process().memory_info().rss
    return max(0, (total if limit is None else min(total, limit)) - used)


def kv_limit() -> int:
    """Return the largest size of a K/V pool in bytes, if the user gave none in tokens.

    Raises:
        HyperDFlashConfigError: ``HYPERDFLASH_CPU_KV_GIB`` is not a positive number.
    """
    return int(positive_number(KV_GIB, "a positive number of GiB") * GIB)


@after(
    "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator._profile_available_bytes",
    "6ec7533cd782",
)
def bound_kv(result: int, self, pre_model_load_memory) -> int:
    """Limit the K/V pool to :func:`kv_limit` unless ``--max-total-tokens`` is given."""
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
