"""Interleaved timing on CUDA; in a graph the host's launches cost nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

# A function of the call's number, by which inputs rotate.
Call = Callable[[int], Any]
# Leading rounds that are not counted.
WARM_UP = 2


def capture(call: Call, calls: int) -> torch.cuda.CUDAGraph:
    """Capture a CUDA graph of ``calls`` calls over rotating inputs, after a warm-up."""
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
    """Return the microseconds per call of one replay, by CUDA events."""
    return events_ms(graph.replay) * 1000 / calls


def events_ms(work: Callable[[], Any]) -> float:
    """Return the milliseconds of what ``work`` enqueues on the current stream."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def interleaved(
    contenders: Iterable[str], time_of: Callable[[str], float], rounds: int
) -> Mapping[str, list[float]]:
    """Return ``rounds`` times of each contender, timed in a different order every round.

    Disturbances of the machine thus affect all contenders alike.
    """
    order = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in order}
    for turn in range(rounds + WARM_UP):
        random.Random(turn).shuffle(order)
        for name in order:
            value = time_of(name)
            if turn >= WARM_UP:
                times[name].append(value)
    return times
