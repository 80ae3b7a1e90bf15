"""Dealing a step's samples to processes: little padding, and little waiting for the slowest."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

# Micro batches that each of several processes gets for each one that it needs: smaller ones can be
# dealt so that all have the same work.
SPLIT = 2


def check_batch(batch: int, size: int) -> None:
    """Raise ``HyperDFlashConfigError`` unless ``size`` processes can share ``batch`` samples."""
    if batch % size:
        raise HyperDFlashConfigError(
            f"batch: expected a multiple of the {size} processes, found {batch}: the others would "
            f"wait. Set it to {-(-batch // size) * size}, or start another number of processes."
        )


def sample_rows(tokens: int, answers: int, anchors: int, block: int) -> int:
    """What a sample costs in a micro batch of its own: rows of the drafter's layers, at least 1.

    Args:
        tokens, answers: of the sample, and those that are answers. anchors: the most blocks drawn.
    """
    return max(1, tokens + block * min(anchors, answers))


def deal(rows: Sequence[int], size: int, most: int) -> list[list[list[int]]]:
    """The micro batches of every process, as indices into ``rows``; all get equally many.

    Micro batches are cut from the sorted samples so that the costliest one is as cheap as possible.
    The costliest go first, each to the process with the least work so far.

    Args:
        rows: of every sample (:func:`sample_rows`); a micro batch costs its largest sample's rows
            times the number of its samples.
        size: processes; it divides the number of samples.
        most: samples of a micro batch.
    """
    order = sorted(range(len(rows)), key=rows.__getitem__, reverse=True)
    needed = size * -(-len(rows) // (size * most))
    count = min(len(rows), (SPLIT if size > 1 else 1) * needed) // size * size

    def cost(part: list[int]) -> int:
        return len(part) * rows[part[0]]

    def cut(limit: int) -> list[list[int]]:
        parts, start = [], 0
        while start < len(order):
            stop = start + max(1, min(most, limit // rows[order[start]]))
            parts.append(order[start:stop])
            start = stop
        return parts

    low, high = 1, most * rows[order[0]]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(cut(middle)) <= count else (middle + 1, high)
    parts = cut(low)
    while len(parts) < count:
        largest = max((part for part in parts if len(part) > 1), key=cost)
        parts.remove(largest)
        half = len(largest) // 2
        parts += [largest[:half], largest[half:]]
    shares: list[list[list[int]]] = [[] for _ in range(size)]
    loads = [0] * size
    for part in sorted(parts, key=cost, reverse=True):
        free = [rank for rank in range(size) if len(shares[rank]) < count // size]
        rank = min(free, key=loads.__getitem__)
        shares[rank].append(part)
        loads[rank] += cost(part)
    return shares
