"""τ over all rounds, its bootstrap intervals over prompts, and our methods against the others.

All intervals are 95 % percentile intervals of ``scipy.stats.bootstrap``: the prompts of all
benchmarks are drawn with replacement; all rounds of a prompt go together, and so do two methods
that are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

import numpy as np
from scipy.stats import bootstrap

from eval.methods import BASELINE, NOISE, drafting, is_hyperdflash
from eval.runner import Cell

RESAMPLES = 1000
SETTING = ("thinking", "temperature", "concurrency")
Row = dict[str, Any]
Interval = list[float]
# Of each cell and method: accepted drafts and verification rounds by prompt, ``[2, prompts]``.
Counts = Mapping[tuple[Cell, str], np.ndarray | None]


def _tau(*counts: np.ndarray, axis: int = -1) -> np.ndarray:
    """τ of (drafts, rounds), or the difference of two methods' (drafts, rounds, drafts, rounds)."""
    totals = [c.sum(axis) for c in counts]
    with np.errstate(divide="ignore", invalid="ignore"):
        taus = [1 + d / v for d, v in zip(totals[::2], totals[1::2], strict=True)]
    return taus[0] - taus[1] if len(taus) > 1 else taus[0]


def tau_interval(counts: np.ndarray | None, other: np.ndarray | None = None) -> Interval | None:
    """The 95 % interval of τ, or of its difference to another method's on the same prompts.

    Args:
        counts, other: accepted drafts and verification rounds, ``[2, prompts]``.

    Returns:
        None with fewer than two prompts, or where one of the resamples has no verification.
    """
    both = [counts] if other is None else [counts, other]
    if any(c is None or c.shape[1] < 2 or not c[1].any() for c in both):
        return None
    found = bootstrap(
        [row for c in both for row in c],
        _tau,
        paired=True,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return [float(v) for v in found] if np.isfinite(found).all() else None


def settings_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The settings of a run in their order: thinking mode, temperature, concurrency."""
    keys = dict.fromkeys(tuple(row[name] for name in SETTING) for row in rows)
    return [dict(zip(SETTING, key, strict=True)) for key in keys]


def rows_of(
    entries: Sequence[Row], setting: Mapping[str, Any], method: str | None = None
) -> list[Row]:
    """Entries (rows, summaries, comparisons) of one setting, and of one method."""
    where = setting if method is None else {**setting, "method": method}
    return [e for e in entries if where.items() <= e.items()]


def pooled_tau(rows: Sequence[Row]) -> float | None:
    """τ over all verification rounds of several rows; None where nothing was verified."""
    rounds = sum(row["verify_rounds"] for row in rows)
    if not rounds:
        return None
    return 1 + sum((row["tau"] - 1) * row["verify_rounds"] for row in rows if row["tau"]) / rounds


def pooled_positions(rows: Sequence[Row]) -> list[float]:
    """Acceptance of draft k over all rounds of several rows that had one; 0 where none had."""
    drafted = [r for r in rows if r.get("position_acceptance")]
    if not drafted:
        return []
    shares, rounds = (
        np.array([r[name] for r in drafted]) for name in ("position_acceptance", "drafted_rounds")
    )
    return [float(v) for v in (shares * rounds).sum(0) / np.maximum(rounds.sum(0), 1)]


def _complete(rows: Sequence[Row], column: str) -> bool:
    return bool(rows) and all(not r.get("error") and r.get(column) is not None for r in rows)


def _pooled_counts(rows: Sequence[Row], counts: Counts) -> np.ndarray | None:
    """The counts of all rows' prompts, one benchmark after another; None where some are gone."""
    found = []
    for row in rows:
        cell = Cell(row["benchmark"], row["temperature"], row["thinking"], row["concurrency"])
        found.append(counts.get((cell, row["method"])))
    return None if any(c is None for c in found) else np.concatenate(found, axis=1)


def summaries(rows: Sequence[Row], counts: Counts) -> list[Row]:
    """For each setting and method: τ over all rounds, and the mean of the benchmarks' speedups.

    A number is None where a benchmark failed or nothing was measured.
    """
    found = []
    for setting in settings_of(rows):
        for method in dict.fromkeys(r["method"] for r in rows):
            own = rows_of(rows, setting, method)
            drafted = _complete(own, "tau") and method not in (BASELINE, NOISE)
            entry = {"method": method, **setting, "benchmarks": len(own)}
            entry["tau"] = pooled_tau(own) if drafted else None
            entry["tau_interval"] = tau_interval(_pooled_counts(own, counts)) if drafted else None
            timed = _complete(own, "speedup")
            entry["mean_speedup"] = mean(r["speedup"] for r in own) if timed else None
            found.append(entry)
    return found


def noise_range(rows: Sequence[Row], setting: Mapping[str, Any]) -> Interval | None:
    """The lowest and highest speedup of the baseline over itself in a setting's rounds."""
    own = rows_of(rows, setting, NOISE)
    ranges = [r["speedup_range"] for r in own if r.get("speedup_range")]
    return [min(low for low, _ in ranges), max(high for _, high in ranges)] if ranges else None


def _compare(ours: Sequence[Row], theirs: Sequence[Row], counts: Counts) -> Row:
    entry: Row = {}
    both = (ours, theirs)
    if all(_complete(rows, "tau") for rows in both):
        entry["tau"] = [pooled_tau(rows) for rows in both]
        a, b = (_pooled_counts(rows, counts) for rows in both)
        known = a is not None and b is not None
        entry["tau_difference_interval"] = tau_interval(a, b) if known else None
    if all(_complete(rows, "speedup") for rows in both):
        entry["speedup"] = [mean(r["speedup"] for r in rows) for rows in both]
    return entry


def comparisons(rows: Sequence[Row], counts: Counts) -> list[Row]:
    """Each of our methods against each other one in each setting, ``[ours, theirs]`` each.

    ``tau`` is over all rounds, its interval paired over prompts; ``speedup`` is the mean of the
    benchmarks; ``noise`` is the baseline's speedup over itself.
    """
    methods = drafting(r["method"] for r in rows)
    found = []
    for setting in settings_of(rows):
        for ours in filter(is_hyperdflash, methods):
            for rival in (m for m in methods if not is_hyperdflash(m)):
                both = (rows_of(rows, setting, m) for m in (ours, rival))
                if entry := _compare(*both, counts):
                    noise = noise_range(rows, setting)
                    found.append({"ours": ours, "rival": rival, **setting, **entry, "noise": noise})
    return found


def tau_verdict(interval: Sequence[float] | None) -> str:
    """Whether the interval of a difference excludes zero."""
    if interval is None:
        return "interval not measured"
    if interval[0] > 0:
        return "higher"
    return "lower" if interval[1] < 0 else "no difference shown"


def speedup_verdict(entry: Row) -> str:
    """Whether the ratio of two speedups is more than the baseline against itself gives."""
    ours, theirs = entry["speedup"]
    verdict = "higher" if ours > theirs else "lower"
    if entry.get("noise") is None:
        return f"{verdict}, noise floor not measured"
    low, high = entry["noise"]
    floor = max(high, 1 / low)
    return "within the noise floor" if 1 / floor <= ours / theirs <= floor else verdict
