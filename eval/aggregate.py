"""From units to rows, summaries and comparisons: τ, speedups and identity, with their spread.

All intervals are 95 % percentile intervals of ``scipy.stats.bootstrap`` over the prompts of all
benchmarks. All rounds of a prompt are drawn together, and so are the two methods of a comparison.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import filterfalse, product
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from scipy.stats import bootstrap

from eval.histograms import add_histograms
from eval.identity import differences, question, read_gaps, verdict
from eval.methods import BASELINE, COPYING, NOISE, drafting, is_hyperdflash
from eval.runner import Cell, Unit, is_whole, read_run, read_units
from sglang_hyperdflash.tools import acceptance

RESAMPLES = 1000
SETTING = ("thinking", "temperature", "concurrency")
Row = dict[str, Any]
Units = Sequence[Unit | None]  # by round; None where missing


def _tau(*columns: np.ndarray, axis: int = -1) -> np.ndarray:
    """τ of (drafts, rounds), or the difference of two methods' (drafts, rounds, drafts, rounds)."""
    totals = [column.sum(axis) for column in columns]
    with np.errstate(divide="ignore", invalid="ignore"):
        taus = [1 + d / n for d, n in zip(totals[::2], totals[1::2], strict=True)]
    return taus[0] - taus[1] if len(taus) > 1 else taus[0]


def tau_interval(*counts: np.ndarray | None) -> list[float] | None:
    """The 95 % interval of τ, or of the difference of two methods' τ on the same prompts.

    ``counts`` are accepted drafts and verification rounds, ``[2, prompts]``, of one or two methods.
    The interval is None where they are missing, where there are fewer than two prompts, or where
    one of the resamples has no verification round.
    """
    if any(c is None or c.shape[1] < 2 or not c[1].any() for c in counts):
        return None
    columns = [column for method_counts in counts for column in method_counts]
    options = {"n_resamples": RESAMPLES, "method": "percentile", "rng": np.random.default_rng(0)}
    interval = bootstrap(columns, _tau, paired=True, **options).confidence_interval
    return [float(bound) for bound in interval] if np.isfinite(interval).all() else None


def _tokens(answer: Row) -> int:
    return sum(map(len, answer["output_ids"]))


def throughput(unit: Unit) -> float:
    """Output tokens a second of a whole unit."""
    return sum(map(_tokens, unit["answers"])) / unit["seconds"]


def _speed(pairs: Sequence[tuple[Unit, Unit | None]]) -> Row:
    """The ratio of throughputs to the baseline's in the same rounds, where that wrote anything."""
    rates = [(throughput(unit), throughput(base)) for unit, base in pairs if is_whole(base)]
    ratios = sorted(rate / base_rate for rate, base_rate in rates if base_rate)
    return {"speedup": median(ratios), "speedup_range": [ratios[0], ratios[-1]]} if ratios else {}


def _identity(cell: Cell, units: Sequence[Unit], baseline: Unit, gaps: Mapping[str, Row]) -> Row:
    """Whether greedy answers equal the baseline's token for token, and what the differences are."""
    judged = []
    for difference in (d for unit in units for d in differences(baseline, unit)):
        measured = gaps.get(question(cell, difference), {})
        gap, dtype, tie_gap = (measured.get(name) for name in ("gap", "dtype", "tie_gap"))
        entry = {"gap": gap, "dtype": dtype, "verdict": verdict(gap, tie_gap)}
        judged.append(asdict(difference) | entry)
    compared = sum(len(unit["answers"]) for unit in units)
    return {
        "compared_answers": compared,
        "identical_answers": compared - len(judged),
        "identical_to_baseline": not judged,
        "differences": judged,
    }


def row_of(
    cell: Row, method: Row, units: Units, baseline: Units, gaps: Mapping[str, Row] | None = None
) -> Row:
    """One row: ``error`` where a unit failed, and the numbers of the whole units, if there are any.

    ``counts`` are accepted drafts and verification rounds by prompt, ``[2, prompts]``; they are for
    intervals and not in ``results.json``. ``cell`` and ``method`` are as in ``run.json``; ``gaps``
    are measured logit gaps by their question.
    """
    row: Row = {"method": method["name"], **cell}
    row |= dict.fromkeys(("tau", "tokens_per_s", "speedup", "round_cost", "identical_to_baseline"))
    errors = [unit["error"] for unit in units if unit is not None and "error" in unit]
    pairs = [pair for pair in zip(units, baseline, strict=True) if is_whole(pair[0])]
    if errors or not pairs:
        row["error"] = errors[0] if errors else "not run"
    if not pairs:
        return row
    whole, num_drafts = [unit for unit, _ in pairs], method["num_drafts"]
    answers = [answer for unit in whole for answer in unit["answers"]]
    names = ("correct_drafts", "verify_rounds")
    counts = np.array([[[a[name] for a in u["answers"]] for u in whole] for name in names]).sum(1)
    correct_drafts, verify_rounds = counts.sum(1).tolist()
    histogram = add_histograms(answer["histogram"] for answer in answers)
    widths = add_histograms(answer.get("widths", []) for answer in answers)
    if not widths:  # every round had every draft
        widths = [0] * (num_drafts + 1) + [sum(histogram)]
    positions = num_drafts if any(histogram) else 0
    row |= {
        # 1 by definition where nothing is drafted.
        "tau": acceptance.accept_length(correct_drafts, verify_rounds) if num_drafts else 1.0,
        "num_prompts": len(whole[0]["answers"]),
        "rounds": len(whole),
        "output_tokens": sum(map(_tokens, answers)),
        "verify_rounds": verify_rounds,
        "empty_answers": sum(_tokens(answer) == 0 for answer in answers),
        "position_acceptance": acceptance.position_acceptance(histogram, positions, widths),
        "drafted_rounds": acceptance.drafted_positions(widths, positions),
        "tokens_per_s": median(map(throughput, whole)),
        **_speed(pairs),
        "tau_interval": tau_interval(counts) if num_drafts else None,
        "counts": counts,
    }
    if row["tau"] and row["speedup"]:
        row["round_cost"] = row["tau"] / row["speedup"]
    reference = next(filter(is_whole, baseline), None)
    if row["temperature"] == 0 and reference is not None and row["method"] != BASELINE:
        row |= _identity(Cell(**cell), whole, reference, gaps or {})
    return row


def settings_of(rows: Sequence[Row]) -> list[Row]:
    """The settings of a run in their order: thinking mode, temperature, concurrency."""
    keys = dict.fromkeys(tuple(row[name] for name in SETTING) for row in rows)
    return [dict(zip(SETTING, key, strict=True)) for key in keys]


def select(rows: Sequence[Row], setting: Row, method: str | None = None) -> list[Row]:
    """The rows (or summaries, or comparisons) of one setting, and of one method."""
    columns = setting if method is None else {**setting, "method": method}
    return [row for row in rows if columns.items() <= row.items()]


def pooled_tau(rows: Sequence[Row]) -> float | None:
    """τ over all verification rounds of several rows; None where nothing was verified."""
    rounds = sum(row["verify_rounds"] for row in rows)
    if not rounds:
        return None
    return 1 + sum((row["tau"] - 1) * row["verify_rounds"] for row in rows if row["tau"]) / rounds


def pooled_positions(rows: Sequence[Row]) -> list[float]:
    """Acceptance of draft k over all rounds of several rows that had one; 0 where none had."""
    drafted = [row for row in rows if row.get("position_acceptance")]
    if not drafted:
        return []
    shares = np.array([row["position_acceptance"] for row in drafted])
    rounds = np.array([row["drafted_rounds"] for row in drafted])
    return ((shares * rounds).sum(0) / np.maximum(rounds.sum(0), 1)).tolist()


def _pooled_counts(rows: Sequence[Row]) -> np.ndarray | None:
    """The counts of all rows' prompts, one benchmark after another; None where some are missing."""
    parts = [row.get("counts") for row in rows]
    return None if any(part is None for part in parts) else np.concatenate(parts, axis=1)


def summaries(rows: Sequence[Row]) -> list[Row]:
    """For each setting and method: τ over all rounds, and the mean of the benchmarks' speedups.

    A number is None where a benchmark failed or nothing was measured.
    """
    methods, entries = dict.fromkeys(row["method"] for row in rows), []
    for setting, method in product(settings_of(rows), methods):
        method_rows = select(rows, setting, method)
        whole = not any(row.get("error") for row in method_rows)
        speedups, taus = ([row[name] for row in method_rows] for name in ("speedup", "tau"))
        drafted = whole and None not in taus and method not in (BASELINE, NOISE)
        counts = _pooled_counts(method_rows) if drafted else None
        entry = {"method": method, **setting, "benchmarks": len(method_rows)}
        entry["tau"] = pooled_tau(method_rows) if drafted else None
        entry["tau_interval"] = tau_interval(counts)
        entry["mean_speedup"] = mean(speedups) if whole and None not in speedups else None
        entries.append(entry)
    return entries


def noise_range(rows: Sequence[Row], setting: Row) -> list[float] | None:
    """The lowest and highest speedup of the baseline over itself in a setting's rounds."""
    noise_rows = select(rows, setting, NOISE)
    bounds = [bound for row in noise_rows for bound in row.get("speedup_range") or ()]
    return [min(bounds), max(bounds)] if bounds else None


def comparisons(rows: Sequence[Row], summaries: Sequence[Row]) -> list[Row]:
    """Each of our methods against each rival in each setting, ``[ours, rival's]`` each.

    A method with copies is compared with the one without as well. ``tau`` is over all rounds, its
    interval paired over prompts; ``speedup`` is the mean of the benchmarks; ``noise`` is the
    baseline's speedup over itself.
    """
    methods, entries = drafting(row["method"] for row in rows), []
    pairs = list(product(filter(is_hyperdflash, methods), filterfalse(is_hyperdflash, methods)))
    pairs += [pair for pair in COPYING.items() if {*pair} <= {*methods}]
    for setting, pair in product(settings_of(rows), pairs):
        overall = [select(summaries, setting, method)[0] for method in pair]
        taus, speedups = ([entry[name] for entry in overall] for name in ("tau", "mean_speedup"))
        entry: Row = {"ours": pair[0], "rival": pair[1], **setting}
        if None not in taus:
            counts = (_pooled_counts(select(rows, setting, method)) for method in pair)
            entry |= {"tau": taus, "tau_difference_interval": tau_interval(*counts)}
        if None not in speedups:
            entry["speedup"] = speedups
        if "tau" in entry or "speedup" in entry:
            entries.append(entry | {"noise": noise_range(rows, setting)})
    return entries


def collect(out: Path) -> Row:
    """The content of ``results.json`` from a run's folder; raises ``EvalError`` without a run."""
    run, gaps = read_run(out), read_gaps(out)
    rows = []
    for cell in run["cells"]:
        baseline = read_units(out, Cell(**cell), BASELINE, run["rounds"])
        for method in run["methods"]:
            units = read_units(out, Cell(**cell), method["name"], run["rounds"])
            rows.append(row_of(cell, method, units, baseline, gaps))
    overall = summaries(rows)
    return {
        "provenance": run["provenance"],
        "run": {k: v for k, v in run.items() if k != "provenance"},
        "rows": [{k: v for k, v in row.items() if k != "counts"} for row in rows],
        "summaries": overall,
        "comparisons": comparisons(rows, overall),
    }
