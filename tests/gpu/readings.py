"""What logs, traces and files of a server say; no GPU is needed to read them."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import psutil
import torch

from sglang_hyperdflash.cpu.pool_log import logged_pools

# Calls of the host that wait for the device.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
# What torch calls a value that is read back.
READS = ("aten::_local_scalar_dense", "aten::nonzero")
CUDA_POOL = r"#tokens: (\d+), K size: ([\d.]+) GB, V size: ([\d.]+) GB"
GRAPH = r"[Cc]apture.*graph.*end.*mem usage=([\d.]+) GB"


def draft_pool(log: str) -> tuple[int, float]:
    """Slots and bytes of the last K/V pool of a log: the drafter's, made after the target's."""
    pools = re.findall(CUDA_POOL, log)
    if pools:
        slots, key, value = pools[-1]
        return int(slots), (float(key) + float(value)) * 2**30
    pool = logged_pools(log)[-1]
    return pool.slots, 2 * 2.0 * pool.layers * pool.heads * pool.head_dim * pool.slots


def graph_gib(log: str) -> list[float]:
    """GiB that each capture of CUDA graphs took, in the log's order: the target's, the draft's."""
    return [float(found) for found in re.findall(GRAPH, log)]


def draft_attention(log: str) -> str | None:
    """The line that says which attention the drafter has, and why."""
    found = re.search(r"HYPERDFLASH: (draft attention is .*)", log)
    return found[1] if found else None


def trace_events(folder: Path) -> list[dict]:
    """All events of the traces that SGLang's profiler left in a folder."""
    events = []
    for path in sorted(folder.rglob("*.json.gz")):
        with gzip.open(path, "rt") as file:
            events += json.load(file)["traceEvents"]
    return events


def waits(events: list[dict]) -> dict[str, int]:
    """How often a trace's host waited for the device, or read a value back, by its name."""
    names = Counter(event.get("name") for event in events)
    return {name: names[name] for name in (*WAITS, *READS) if names[name]}


def same_drafts(one: dict, other: dict) -> tuple[int, int]:
    """Blocks that two runs proposed for the same request, length and anchor; and the equal ones."""
    both = [key for key in one.keys() & other.keys() if one[key][0] == other[key][0]]
    return len(both), sum(one[key][1] == other[key][1] for key in both)


def used_bytes(process_id: int) -> int:
    """Memory in use: of the GPU, or of a server's processes where there is none."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return total - free
    parent = psutil.Process(process_id)
    return sum(p.memory_info().rss for p in (parent, *parent.children(recursive=True)))


def most_while(read: Callable[[], int], work: Callable[[], None]) -> tuple[int, int]:
    """What ``read`` says before ``work``, and the most while it runs; read every 20 ms."""
    before, done = read(), Event()
    most = [before]

    def watch() -> None:
        while not done.wait(0.02):
            most[0] = max(most[0], read())

    thread = Thread(target=watch)
    thread.start()
    try:
        work()
    finally:
        done.set()
        thread.join()
    return before, most[0]
