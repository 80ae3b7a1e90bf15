"""Acceptance metrics from SGLang's per-request counters."""

from collections.abc import Iterable, Mapping
from typing import Any


def accept_length(correct_drafts: int, rounds: int) -> float | None:
    """Return tau, bonus token included: ``1 + accepted drafts / rounds``; None without a round."""
    return 1.0 + correct_drafts / rounds if rounds else None


def drafted_positions(widths: Iterable[int], num_drafts: int) -> list[int]:
    """Return the number of rounds that had a draft k, for k = 1..num_drafts.

    Args:
        widths: entry w counts the rounds of width w: SGLang's ``spec_cap_lens_histogram``.
    """
    counts = list(widths)
    return [sum(counts[k + 1 :]) for k in range(1, num_drafts + 1)]


def position_acceptance(
    histogram: Iterable[int], num_drafts: int, widths: Iterable[int] = ()
) -> list[float]:
    """Return the share of the rounds with a draft k that accepted it, for k = 1..num_drafts.

    Args:
        histogram: entry i counts the rounds with i accepted drafts; may be shorter than B.
        widths: see :func:`drafted_positions`; empty where every round had every draft.
    """
    counts, widths = list(histogram), list(widths)
    drafted = drafted_positions(widths, num_drafts) if widths else [sum(counts)] * num_drafts
    return [sum(counts[k:]) / n if n else 0.0 for k, n in enumerate(drafted, start=1)]


def counters(meta_info: Mapping[str, Any]) -> tuple[int, int, list[int]]:
    """Return ``(accepted drafts, rounds, histogram)`` of a finished request's ``meta_info``."""
    return (
        int(meta_info.get("spec_num_correct_drafts") or 0),
        int(meta_info.get("spec_verify_ct") or 0),
        list(meta_info.get("spec_correct_drafts_histogram") or []),
    )
