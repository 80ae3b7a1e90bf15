"""Histograms of rounds by their accepted drafts, as ``tools.acceptance.counters`` gives them."""

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from sglang_hyperdflash.tools.acceptance import accept_length


def accept_length_of(histogram: Sequence[int]) -> float | None:
    """Return tau of rounds of which ``histogram[i]`` accepted i drafts each; None without any."""
    return accept_length(sum(i * n for i, n in enumerate(histogram)), sum(histogram))


def add_histograms(histograms: Iterable[Iterable[int]]) -> list[int]:
    """Return the entry-wise sum of histograms of different lengths."""
    return [sum(counts) for counts in zip_longest(*histograms, fillvalue=0)]
