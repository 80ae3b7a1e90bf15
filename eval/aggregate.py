"""From units to rows: τ, acceptance, speedup over the baseline, identity, with their spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from eval.comparison import comparisons, summaries, tau_interval
from eval.identity import differences, question, read_gaps, verdict
from eval.methods import BASELINE
from eval.runner import Cell, is_whole, read_run, read_sealed, unit_path
from sglang_hyperdflash.tools.acceptance import (
    accept_length,
    add_histograms,
    drafted_positions,
    position_acceptance,
)

Entry = dict[str, Any]


def _positions(row: Entry, answers: Sequence[Entry], drafts: int) -> None:
    """Acceptance of draft k over the rounds that had one, and how many those are."""
    histogram = add_histograms(a["histogram"] for a in answers)
    widths = add_histograms(a.get("widths", []) for a in answers)
    rounds = sum(histogram)
    row["position_acceptance"] = position_acceptance(histogram, drafts, widths) if rounds else []
    drafted = drafted_positions(widths, drafts) if widths else [rounds] * drafts
    row["drafted_rounds"] = drafted if rounds else []


def _tokens(answer: Entry) -> int:
    return sum(map(len, answer["output_ids"]))


def throughput(unit: Entry) -> float:
    """Output tokens a second of a whole unit."""
    return sum(map(_tokens, unit["answers"])) / unit["seconds"]


def _speed(row: Entry, pairs: Sequence[tuple[Entry, Entry]]) -> None:
    """The ratio of throughputs to the baseline's in the same rounds, where that wrote anything."""
    ratios = sorted(throughput(u) / rate for u, b in pairs if (rate := throughput(b)))
    if not ratios:
        return
    row["speedup"] = median(ratios)
    row["speedup_range"] = [ratios[0], ratios[-1]]
    if row["tau"] and row["speedup"]:
        row["round_cost"] = row["tau"] / row["speedup"]


def _identity(row: Entry, units: Sequence[Entry], baseline: Entry, gaps: dict[str, Entry]) -> None:
    """Whether greedy answers equal the baseline's token for token, and what the differences are."""
    cell = Cell(*(row[k] for k in ("benchmark", "temperature", "thinking", "concurrency")))
    found = []
    for unit in units:
        for difference in differences(baseline, unit):
            asked = gaps.get(question(cell, difference), {})
            entry = {**asdict(difference), "gap": asked.get("gap"), "dtype": asked.get("dtype")}
            found.append({**entry, "verdict": verdict(asked.get("gap"), asked.get("tie_gap"))})
    row["compared_answers"] = sum(len(unit["answers"]) for unit in units)
    row["identical_answers"] = row["compared_answers"] - len(found)
    row["identical_to_baseline"] = not found
    row["differences"] = found


def row_of(
    cell: Entry,
    method: Entry,
    units: Sequence[Entry | None],
    baseline: Sequence[Entry | None],
    gaps: dict[str, Entry] | None = None,
) -> tuple[Entry, np.ndarray | None]:
    """One result object and the counts it is computed from.

    Args:
        cell, method: as in ``run.json``. units, baseline: this method's and the baseline's units
            by round, None where missing. gaps: measured logit gaps by their question.

    Returns:
        The row; where a unit failed it holds ``error``, where all did no numbers. Accepted drafts
        and verification rounds by prompt, ``[2, prompts]``; None without a whole unit.
    """
    row: Entry = {"method": method["name"], **cell}
    row |= dict.fromkeys(("tau", "tokens_per_s", "speedup", "round_cost", "identical_to_baseline"))
    errors = [u["error"] for u in units if u is not None and "error" in u]
    if errors or not any(map(is_whole, units)):
        row["error"] = errors[0] if errors else "not run"
    whole = [i for i, u in enumerate(units) if is_whole(u)]
    if not whole:
        return row, None
    done = [units[i] for i in whole]
    answers = [a for u in done for a in u["answers"]]
    drafts = method["num_drafts"]
    row["num_prompts"] = len(done[0]["answers"])
    row["rounds"] = len(done)
    row["output_tokens"] = sum(map(_tokens, answers))
    row["verify_rounds"] = sum(a["verify_rounds"] for a in answers)
    row["empty_answers"] = sum(_tokens(a) == 0 for a in answers)
    correct = sum(a["correct_drafts"] for a in answers)
    # 1 by definition where nothing is drafted.
    row["tau"] = accept_length(correct, row["verify_rounds"]) if drafts else 1.0
    _positions(row, answers, drafts)
    row["tokens_per_s"] = median(map(throughput, done))
    _speed(row, [(units[i], baseline[i]) for i in whole if is_whole(baseline[i])])
    names = ("correct_drafts", "verify_rounds")
    counts = np.array([[[a[n] for a in u["answers"]] for u in done] for n in names]).sum(1)
    row["tau_interval"] = tau_interval(counts) if drafts else None
    reference = next(filter(is_whole, baseline), None)
    if row["temperature"] == 0 and reference is not None and row["method"] != BASELINE:
        _identity(row, done, reference, gaps or {})
    return row, counts


def collect(out: Path) -> Entry:
    """All rows of a run's folder, their means and comparisons, with the run's provenance.

    Raises:
        EvalError: the folder holds no run.
    """
    run = read_run(out)
    gaps = read_gaps(out)

    def units(cell: Cell, method: str) -> list[Entry | None]:
        return [read_sealed(unit_path(out, cell, method, i)) for i in range(run["rounds"])]

    rows, counts = [], {}
    for entry in run["cells"]:
        cell = Cell(**entry)
        baseline = units(cell, BASELINE)
        for method in run["methods"]:
            row, found = row_of(entry, method, units(cell, method["name"]), baseline, gaps)
            rows.append(row)
            counts[cell, method["name"]] = found
    return {
        "provenance": run["provenance"],
        "run": {k: v for k, v in run.items() if k not in ("provenance", "checksum")},
        "rows": rows,
        "summaries": summaries(rows, counts),
        "comparisons": comparisons(rows, counts),
    }
