"""Means over benchmarks and our method against its rivals, with bootstrap intervals over prompts.

All intervals are 95 % percentile intervals. Prompts are drawn with replacement inside each
benchmark; all rounds of a prompt go together, and every method gets the same draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np

from eval.methods import BASELINE, NOISE, drafting, is_hyperdflash
from eval.runner import Cell

RESAMPLES = 1000
SETTING = ("thinking", "temperature", "concurrency")
Row = dict[str, Any]
Interval = list[float]


def resampled(count: int, seed: int = 0) -> np.ndarray:
    """Indices of prompts drawn with replacement, ``[RESAMPLES, count]``."""
    return np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))


def interval(values: np.ndarray | None) -> Interval | None:
    """The middle 95 % of resampled values; None where there are none (one prompt, no data)."""
    if values is None or not np.isfinite(values).all():
        return None
    return [float(v) for v in np.percentile(values, (2.5, 97.5))]


@dataclass(frozen=True)
class Samples:
    """A row's counts by round and prompt, ``[rounds, prompts]``.

    drafts, verified: accepted drafts and verification rounds. rates: for each round that
    target-only ran too, (tokens, seconds) of this method and of target-only, ``[prompts]`` each.
    """

    drafts: np.ndarray
    verified: np.ndarray
    rates: tuple[tuple[np.ndarray, ...], ...]

    @classmethod
    def of(cls, units: Sequence[Row], pairs: Sequence[tuple[Row, Row]]) -> Samples:
        """From whole units, and those with target-only's of the same round."""

        def table(name: str) -> np.ndarray:
            return np.array([[a[name] for a in unit["answers"]] for unit in units])

        def tokens(unit: Row) -> np.ndarray:
            return np.array([sum(map(len, a["output_ids"])) for a in unit["answers"]], float)

        def seconds(unit: Row) -> np.ndarray:
            return np.array([a["seconds"] for a in unit["answers"]])

        rates = tuple((tokens(u), seconds(u), tokens(t), seconds(t)) for u, t in pairs)
        return cls(table("correct_drafts"), table("verify_rounds"), rates)

    def counts(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Accepted drafts and verification rounds of every draw, ``[RESAMPLES]`` each."""
        return tuple(table.sum(0)[draws].sum(1) for table in (self.drafts, self.verified))

    def taus(self, draws: np.ndarray) -> np.ndarray | None:
        """tau of every draw; None with fewer than two prompts."""
        if draws.shape[1] < 2:
            return None
        drafts, verified = self.counts(draws)
        with np.errstate(divide="ignore", invalid="ignore"):
            return 1 + drafts / verified

    def speedups(self, draws: np.ndarray) -> np.ndarray | None:
        """The median over rounds of the ratio of rates, for every draw; None without rates."""
        if draws.shape[1] < 2 or not self.rates:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = [
                (tokens[draws].sum(1) / seconds[draws].sum(1))
                / (their_tokens[draws].sum(1) / their_seconds[draws].sum(1))
                for tokens, seconds, their_tokens, their_seconds in self.rates
            ]
        return np.median(ratios, axis=0)


AllSamples = Mapping[tuple[Cell, str], Samples | None]


def settings_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The settings of a run in their order: thinking mode, temperature, concurrency."""
    keys = dict.fromkeys(tuple(row[name] for name in SETTING) for row in rows)
    return [dict(zip(SETTING, key, strict=True)) for key in keys]


def rows_in(rows: Sequence[Row], setting: Mapping[str, Any], method: str) -> list[Row]:
    """A method's rows of one setting, one a benchmark."""
    return [
        row
        for row in rows
        if row["method"] == method and all(row[name] == setting[name] for name in SETTING)
    ]


def pooled_tau(rows: Sequence[Row]) -> float | None:
    """tau over all verification rounds of several rows; None where nothing was verified."""
    rounds = sum(row["verify_rounds"] for row in rows)
    if not rounds:
        return None
    return 1 + sum((row["tau"] - 1) * row["verify_rounds"] for row in rows if row["tau"]) / rounds


def pooled_positions(rows: Sequence[Row]) -> list[float]:
    """Acceptance of draft k over all rounds of several rows that had one; 0 where none had.

    Rows of a release that did not store ``drafted_rounds`` count as of whole blocks.
    """
    drafted = [r for r in rows if r.get("position_acceptance")]
    if not drafted:
        return []
    shares = np.array([r["position_acceptance"] for r in drafted])
    whole = ([r["verify_rounds"]] * shares.shape[1] for r in drafted)
    rounds = np.array([r.get("drafted_rounds", w) for r, w in zip(drafted, whole, strict=True)])
    totals = rounds.sum(0)
    return [float(v) for v in (shares * rounds).sum(0) / np.maximum(totals, 1)]


def _whole(rows: Sequence[Row], column: str) -> bool:
    return bool(rows) and all(not r.get("error") and r.get(column) is not None for r in rows)


def _over_benchmarks(
    rows: Sequence[Row],
    samples: AllSamples,
    values: Callable[[Samples, np.ndarray], np.ndarray | None],
) -> list[np.ndarray] | None:
    """Resampled values of every row, or None when some cannot be had."""
    found = []
    for i, row in enumerate(rows):
        cell = Cell(row["benchmark"], *(row[n] for n in ("temperature", "thinking", "concurrency")))
        own = samples.get((cell, row["method"]))
        value = None if own is None else values(own, resampled(row["num_prompts"], seed=i))
        if value is None:
            return None
        found.append(value)
    return found


def _pooled(rows: Sequence[Row], samples: AllSamples) -> np.ndarray | None:
    counts = _over_benchmarks(
        rows,
        samples,
        lambda own, draws: np.stack(own.counts(draws)) if draws.shape[1] > 1 else None,
    )
    if counts is None:
        return None
    drafts, verified = np.sum(counts, axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return 1 + drafts / verified


def _mean(rows: Sequence[Row], samples: AllSamples, values) -> np.ndarray | None:
    found = _over_benchmarks(rows, samples, values)
    return None if found is None else np.mean(found, axis=0)


def summaries(rows: Sequence[Row], samples: AllSamples) -> list[Row]:
    """For each setting and method, over its benchmarks: means, tau over all rounds, intervals.

    A number is None where a benchmark failed or nothing was measured.
    """
    found = []
    for setting in settings_of(rows):
        for method in dict.fromkeys(r["method"] for r in rows):
            own = rows_in(rows, setting, method)
            entry: Row = {"method": method, **setting, "benchmarks": len(own)}
            drafted = _whole(own, "tau") and method not in (BASELINE, NOISE)
            entry["tau"] = pooled_tau(own) if drafted else None
            entry["tau_interval"] = interval(_pooled(own, samples)) if drafted else None
            for column, values in (("tau", Samples.taus), ("speedup", Samples.speedups)):
                whole = _whole(own, column)
                resampled_means = _mean(own, samples, values) if whole else None
                if column == "tau" and not drafted:
                    resampled_means = None
                entry[f"mean_{column}"] = mean(r[column] for r in own) if whole else None
                entry[f"mean_{column}_interval"] = interval(resampled_means)
            found.append(entry)
    return found


def noise_range(rows: Sequence[Row], setting: Mapping[str, Any]) -> Interval | None:
    """The lowest and highest speedup of target-only against itself in a setting's rounds."""
    spread = [r["speedup_range"] for r in rows_in(rows, setting, NOISE) if r.get("speedup_range")]
    return [min(low for low, _ in spread), max(high for _, high in spread)] if spread else None


def _difference(a: np.ndarray | None, b: np.ndarray | None) -> Interval | None:
    return None if a is None or b is None else interval(a - b)


def _compare(ours: Sequence[Row], theirs: Sequence[Row], samples: AllSamples) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    both = (ours, theirs)
    if _whole(ours, "tau") and _whole(theirs, "tau"):
        entry["tau"] = [pooled_tau(rows) for rows in both]
        entry["tau_difference_interval"] = _difference(*(_pooled(rows, samples) for rows in both))
        entry["mean_tau"] = [mean(r["tau"] for r in rows) for rows in both]
        means = (_mean(rows, samples, Samples.taus) for rows in both)
        entry["mean_tau_difference_interval"] = _difference(*means)
    if _whole(ours, "speedup") and _whole(theirs, "speedup"):
        entry["speedup"] = [mean(r["speedup"] for r in rows) for rows in both]
        a, b = (_mean(rows, samples, Samples.speedups) for rows in both)
        ratio = None if a is None or b is None else a / b
        entry["speedup_ratio_interval"] = interval(ratio)
    return entry


def comparisons(rows: Sequence[Row], samples: AllSamples) -> list[Row]:
    """Each of our methods against each rival in each setting, ``[ours, theirs]`` each.

    ``tau`` over all rounds, ``mean_tau`` and ``speedup`` as means of benchmarks; the intervals of
    the differences of tau and of the ratio of speedups are paired over prompts.
    """
    methods = drafting(r["method"] for r in rows)
    found = []
    for setting in settings_of(rows):
        for ours in filter(is_hyperdflash, methods):
            for rival in (m for m in methods if not is_hyperdflash(m)):
                entry = _compare(
                    rows_in(rows, setting, ours), rows_in(rows, setting, rival), samples
                )
                if entry:
                    names = {"ours": ours, "rival": rival, **setting}
                    found.append({**names, **entry, "noise": noise_range(rows, setting)})
    return found
