"""From units to rows: tau, acceptance, speed against target-only, identity, with their spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from eval.comparison import Samples, comparisons, interval, resampled, summaries
from eval.identity import differences, key_of, verdict
from eval.methods import BASELINE
from eval.runner import DIFFERENCES, Cell, read_run, read_sealed, unit_path
from sglang_hyperdflash.tools.acceptance import (
    accept_length,
    add_histograms,
    drafted_positions,
    position_acceptance,
)
from sglang_hyperdflash.tools.jsonl import JsonlError, read_lines

Entry = dict[str, Any]


def _tau(answers: Sequence[Entry], drafts: int) -> float | None:
    """tau over all rounds; 1 for target-only by definition, None where nothing was verified."""
    if not drafts:
        return 1.0
    rounds = sum(a["verify_rounds"] for a in answers)
    return accept_length(sum(a["correct_drafts"] for a in answers), rounds)


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


def _throughput(unit: Entry) -> float:
    return sum(map(_tokens, unit["answers"])) / unit["seconds"]


def _speed(row: Entry, pairs: Sequence[tuple[Entry, Entry]]) -> None:
    """The ratio of throughputs to target-only's in the same rounds, where that wrote anything."""
    ratios = sorted(_throughput(u) / rate for u, t in pairs if (rate := _throughput(t)))
    if not ratios:
        return
    row["speedup"] = median(ratios)
    row["speedup_range"] = [ratios[0], ratios[-1]]
    if row["tau"] and row["speedup"]:
        row["round_cost"] = row["tau"] / row["speedup"]


def _identity(
    row: Entry, units: Sequence[Entry], target: Entry | None, gaps: dict[str, Entry]
) -> None:
    """Whether greedy answers are target-only's token for token, and what their differences are."""
    if row["temperature"] != 0 or target is None or row["method"] == BASELINE:
        return
    cell = Cell(*(row[k] for k in ("benchmark", "temperature", "thinking", "concurrency")))
    found = []
    for unit in units:
        for difference in differences(target, unit):
            asked = gaps.get(repr(key_of(cell, difference)), {})
            gap = asked.get("gap")
            entry = {**asdict(difference), "gap": gap, "dtype": asked.get("dtype")}
            found.append({**entry, "verdict": verdict(gap, asked.get("tie_gap"))})
    row["compared_answers"] = sum(len(unit["answers"]) for unit in units)
    row["identical_answers"] = row["compared_answers"] - len(found)
    row["identical_to_target"] = not found
    row["differences"] = found


def _new_row(cell: Entry, method: Entry, units: Sequence[Entry | None]) -> Entry:
    """A row without numbers; with ``error`` where a unit failed or none ran."""
    row: Entry = {"method": method["name"], **cell}
    row |= dict.fromkeys(("tau", "tokens_per_s", "speedup", "round_cost", "identical_to_target"))
    errors = [u["error"] for u in units if u is not None and "error" in u]
    if errors:
        row["error"] = errors[0]
    elif not any(u is not None for u in units):
        row["error"] = "not run"
    return row


def row_of(
    cell: Entry,
    method: Entry,
    units: Sequence[Entry | None],
    target: Sequence[Entry | None],
    gaps: dict[str, Entry] | None = None,
) -> tuple[Entry, Samples | None]:
    """One result object and the per-prompt counts behind it.

    Args:
        cell, method: as in ``run.json``. units, target: this method's and target-only's units by
            round, None where missing. gaps: measured logit gaps by their key.

    Returns:
        The row; where a unit failed it holds ``error``, where all did no numbers. The samples
        behind its intervals; None without a whole unit.
    """
    row = _new_row(cell, method, units)
    whole = [i for i, u in enumerate(units) if u is not None and "error" not in u]
    if not whole:
        return row, None
    done = [units[i] for i in whole]
    pairs = [(units[i], t) for i in whole if (t := target[i]) is not None and "error" not in t]
    answers = [a for u in done for a in u["answers"]]
    row["num_prompts"] = len(done[0]["answers"])
    row["rounds"] = len(done)
    row["output_tokens"] = sum(map(_tokens, answers))
    row["verify_rounds"] = sum(a["verify_rounds"] for a in answers)
    row["empty_answers"] = sum(_tokens(a) == 0 for a in answers)
    row["tau"] = _tau(answers, method["num_drafts"])
    _positions(row, answers, method["num_drafts"])
    row["tokens_per_s"] = median(map(_throughput, done))
    _speed(row, pairs)
    samples = Samples.of(done, pairs if cell["concurrency"] == 1 else [])
    draws = resampled(row["num_prompts"])
    row["tau_interval"] = interval(samples.taus(draws)) if method["num_drafts"] else None
    row["speedup_interval"] = interval(samples.speedups(draws))
    whole_target = (t for t in target if t is not None and "error" not in t)
    _identity(row, done, next(whole_target, None), gaps or {})
    return row, samples


def read_gaps(out: Path) -> dict[str, Entry]:
    """What the target said of first differences, by the question's key."""
    path = out / DIFFERENCES
    if not path.is_file():
        return {}
    try:
        records = [record for _, record in read_lines(path)]
    except JsonlError:  # a line that a kill cut; the next run drops it
        return {}
    return {repr(record["key"]): record for record in records}


def collect(out: Path) -> Entry:
    """All rows of a run's folder, their means and comparisons, with the run's provenance.

    Raises:
        EvalError: the folder holds no run.
    """
    run = read_run(out)
    gaps = read_gaps(out)

    def units(cell: Cell, method: str) -> list[Entry | None]:
        return [read_sealed(unit_path(out, cell, method, i)) for i in range(run["rounds"])]

    rows, samples = [], {}
    for entry in run["cells"]:
        cell = Cell(**entry)
        target = units(cell, BASELINE)
        for method in run["methods"]:
            row, found = row_of(entry, method, units(cell, method["name"]), target, gaps)
            rows.append(row)
            samples[cell, method["name"]] = found
    return {
        "provenance": run["provenance"],
        "run": {k: v for k, v in run.items() if k not in ("provenance", "checksum")},
        "rows": rows,
        "summaries": summaries(rows, samples),
        "comparisons": comparisons(rows, samples),
    }
