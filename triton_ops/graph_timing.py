"""Time calls on CUDA through graphs: launches from the host do not count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# The number of a call, to rotate inputs by.
Call = Callable[[int], Any]


def capture(call: Call, calls: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of ``calls`` calls over rotating inputs, warmed up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(3):
            call(i)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Microseconds per call of one replay, by CUDA events."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / calls
