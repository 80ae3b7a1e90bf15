"""Sizes of the CPU platform's K/V pools, read from a server's log."""

import re
from typing import NamedTuple

# Of sglang_hyperdflash/cpu/platform/kv_pool.py.
POOL_LINE = "Torch K/V pool: layers=%d heads=%d head_dim=%d slots=%d"


class LoggedPool(NamedTuple):
    """One pool of one rank; ``rank`` is 0 in a server of one."""

    rank: int
    layers: int
    heads: int
    head_dim: int
    slots: int


def logged_pools(log: str) -> list[LoggedPool]:
    """Every pool in a server's log, in its order."""
    pattern = r"^(.*)" + POOL_LINE.replace("%d", r"(\d+)")
    found = []
    for prefix, *sizes in re.findall(pattern, log, re.MULTILINE):
        rank = re.search(r"TP(\d+)\]", prefix)
        found.append(LoggedPool(int(rank[1]) if rank else 0, *map(int, sizes)))
    return found
