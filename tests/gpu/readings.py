"""What logs, traces and files of a server say; no GPU is needed to read them."""

import gzip
import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path

import psutil
import torch

from tests.pool_log import logged_pools

# Calls of the host that wait for the device. A value that is read back is among them; torch's own
# names of a read, as aten::item, are recorded of tensors on the host too.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
CUDA_POOL = r"#tokens: (\d+), K size: ([\d.]+) GB, V size: ([\d.]+) GB"
# Of each capture of CUDA graphs: the target's, then the draft's.
GRAPH = r"[Cc]apture.*graph.*end.*mem usage=([\d.]+) GB"


def draft_pool(log: str) -> tuple[int, float]:
    """Slots and bytes of the last K/V pool of a log: the drafter's, made after the target's."""
    pools = re.findall(CUDA_POOL, log)
    if pools:
        slots, key, value = pools[-1]
        return int(slots), (float(key) + float(value)) * 2**30
    pool = logged_pools(log)[-1]
    return pool.slots, 2 * 2.0 * pool.layers * pool.heads * pool.head_dim * pool.slots


def fell_back(log: str) -> list[str]:
    """Lines that say that a fused path of DFLASH's or ours fell back; others' are none of ours."""
    return [line for line in log.splitlines() if re.search(r"DFLASH.*\bfalling back", line)]


def trace_events(folder: Path) -> list[dict]:
    """All events of the traces of decoding that SGLang's profiler left in a folder."""
    paths = sorted(folder.rglob("*decode*.json.gz"))
    traces = (json.loads(gzip.decompress(path.read_bytes())) for path in paths)
    return [event for trace in traces for event in trace["traceEvents"]]


def rounds_of(events: list[dict]) -> tuple[int, list[dict]]:
    """How many rounds a trace has, and what their thread did from the first to the last.

    The profiler itself waits for the device before it starts and when it stops.
    """
    # How SGLang's profiler names a target's pass over drafts: one a round.
    kind, name = "user_annotation", "step[VERIFY"
    passes = [e for e in events if e.get("cat") == kind and e["name"].startswith(name)]
    begin = min((e["ts"] for e in passes), default=0)
    end = max((e["ts"] + e["dur"] for e in passes), default=0)
    threads = {(e["pid"], e["tid"]) for e in passes}
    within = (e for e in events if begin <= e.get("ts", -1) <= end)
    return len(passes), [e for e in within if (e.get("pid"), e.get("tid")) in threads]


def rounds_by_width(answers: list[dict]) -> dict[int, int]:
    caps = [answer["meta_info"]["spec_cap_lens_histogram"] for answer in answers]
    total = map(sum, zip_longest(*caps, fillvalue=0))
    return {width: rounds for width, rounds in enumerate(total) if rounds}


def used_bytes(process_id: int) -> int:
    """Memory in use: of the GPU, or of a server's processes where there is none."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return total - free
    parent = psutil.Process(process_id)
    return sum(p.memory_info().rss for p in (parent, *parent.children(recursive=True)))


def used_while(process_id: int, work: Callable, *arguments, **options) -> tuple[int, int]:
    """Memory in use before ``work``, and the most while it runs; read every 20 ms."""
    before = most = used_bytes(process_id)
    pool = ThreadPoolExecutor(1)
    running = pool.submit(work, *arguments, **options)
    pool.shutdown(wait=False)  # a step that is ended does not wait for its answers
    while not running.done():
        most = max(most, used_bytes(process_id))
        time.sleep(0.02)
    running.result()
    return before, most
