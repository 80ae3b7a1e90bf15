"""Where each server's time goes under load, line by line: milliseconds a generated token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from sglang_hyperdflash.serving.round_times import IDLE_SECONDS, Pass

PARTS = (
    "target, decoding",
    "target, prefills",
    "draft K/V, decoding",
    "draft K/V, prefills",
    "rest of decoding",
    "rest of prefills",
    "between passes",
)
OTHER_WIDTHS = "decoding at another width than the usual"


def account(passes: Sequence[Pass], tokens_per_s: float) -> dict[str, float]:
    """Milliseconds a generated token of each of ``PARTS``; they add up to ``1000 / tokens_per_s``.

    Decoding at another width than the most frequent one is counted once more, by itself.

    Args:
        passes: of one load, in order. tokens_per_s: of the same load.
    """
    seconds = dict.fromkeys(PARTS, 0.0)
    widths: dict[int | None, list[float]] = {}
    for one in passes:
        kind = "decoding" if one.decoding else "prefills"
        whole = one.end - one.start
        seconds[f"target, {kind}"] += one.target
        seconds[f"draft K/V, {kind}"] += one.draft_kv
        seconds[f"rest of {kind}"] += whole - one.target - one.draft_kv
        if one.decoding:
            widths.setdefault(one.width, []).append(whole)
    gaps = (after.start - before.end for before, after in pairwise(passes))
    seconds["between passes"] = sum(gap for gap in gaps if gap < IDLE_SECONDS)
    scale = 1000 / tokens_per_s / sum(seconds.values())
    usual = max(widths, key=lambda w: len(widths[w]))
    other = sum(sum(found) for width, found in widths.items() if width != usual)
    return {part: scale * found for part, found in seconds.items()} | {OTHER_WIDTHS: scale * other}


def _medians(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {part: median(one[part] for one in found) for part in found[0]}


def account_lines(accounts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown: a table a load, a line a part, medians of the passes.

    Args:
        accounts: ``{"concurrency", "methods": {name: [account, ...]}}``; the first method is what
            the others are compared with.
    """
    lines = []
    for load in accounts:
        methods = {name: _medians(found) for name, found in load["methods"].items()}
        base, *others = methods
        head = [base, *(cell for name in others for cell in (name, "more, of the whole"))]
        lines += ["", f"{load['concurrency']} requests at a time:", ""]
        lines += [f"| milliseconds a token | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
        whole = sum(methods[base][part] for part in PARTS)
        for part in (*PARTS, "all", OTHER_WIDTHS):
            values = {
                name: sum(found[p] for p in PARTS) if part == "all" else found[part]
                for name, found in methods.items()
            }
            cells = [f"{values[base]:.3f}"]
            for name in others:
                more = (values[name] - values[base]) / whole
                cells += [f"{values[name]:.3f}", f"{more:+.1%}"]
            lines.append(f"| {part} | {' | '.join(cells)} |")
    return lines
