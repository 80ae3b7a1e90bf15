"""The seeded draw compared with SGLang's seeded sampler, torch's sort and a copy, on one GPU.

Part of ``make bench``. Rows are those of a verified round, seven a request.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from triton_ops.graph_timing import capture, interleaved, replay_us
from triton_ops.gumbel import gumbel_argmax_reference
from triton_ops.gumbel_kernel import launch

VOCABULARY = 129_280
REQUESTS = (1, 8, 64, 256)
BLOCK = 7


def contenders(rows: int) -> dict[str, Callable[[int], Any]]:
    """Calls on ``[rows, V]`` probabilities; the number passed to a call is unused."""
    probs = torch.randn(rows, VOCABULARY, device="cuda").mul_(3).softmax(-1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), device="cuda")
    positions = torch.randint(0, 1 << 20, (rows,), device="cuda")
    few = slice(0, 16)
    expected = gumbel_argmax_reference(probs[few], seeds[few], positions[few])
    different = int((launch(probs, seeds, positions, None)[few] != expected).sum())
    if different:
        raise RuntimeError(
            f"the kernel draws a different token than its reference in {different} rows"
        )
    # As many bytes moved as the draw must read.
    source = torch.empty(probs.numel() // 2, device="cuda")
    target = torch.empty_like(source)
    calls = {
        "triton": lambda i: launch(probs, seeds, positions, None),
        "sort": lambda i: probs.sort(dim=-1, descending=True),
        "copy": lambda i: target.copy_(source),
    }
    try:
        from sglang.srt.layers.sampler import multinomial_with_seed
    except ImportError:
        print("sglang is not installed: no column of its sampler")
    else:
        calls["sglang"] = lambda i: multinomial_with_seed(probs.log(), seeds, positions)
    return calls


@torch.inference_mode()
def run(rounds: int) -> list[dict[str, Any]]:
    """One row for each number of requests: medians in microseconds, rounds interleaved."""
    results = []
    for requests in REQUESTS:
        graphs = {name: capture(call, 2) for name, call in contenders(BLOCK * requests).items()}
        times = interleaved(graphs, lambda name, own=graphs: replay_us(own[name], 2), rounds)
        medians = {name: statistics.median(values) for name, values in times.items()}
        results.append({"requests": requests, "vocabulary": VOCABULARY, "median_us": medians})
        line = "  ".join(f"{name} {value:.0f}" for name, value in sorted(medians.items()))
        print(f"draw, {requests} requests x {BLOCK} rows, us: {line}", flush=True)
        del graphs
        torch.cuda.empty_cache()
    return results
