"""From units to rows: tau, acceptance, speed against target-only, identity, with their spread."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from eval.methods import BASELINE
from eval.runner import Cell
from sglang_hyperdflash.tools.acceptance import accept_length, add_histograms, position_acceptance

RESAMPLES = 1000
Entry = dict[str, Any]


def bootstrap(
    count: int, statistic: Callable[[list[int]], float], resamples: int = RESAMPLES
) -> tuple[float, float] | None:
    """The 95 % percentile interval of a statistic of indices drawn with replacement.

    Args:
        count: number of prompts; fewer than two give no interval.
    """
    if count < 2:
        return None
    draw = random.Random(0)
    values = sorted(
        statistic([draw.randrange(count) for _ in range(count)]) for _ in range(resamples)
    )
    return values[int(0.025 * resamples)], values[int(0.975 * resamples) - 1]


def _tau(answers: Sequence[Entry]) -> float:
    return accept_length(
        sum(a["correct_drafts"] for a in answers), sum(a["verify_rounds"] for a in answers)
    )


def _tokens(answer: Entry) -> int:
    return sum(map(len, answer["output_ids"]))


def _rate(answers: Sequence[Entry]) -> float:
    """Tokens a second of requests that ran one after another."""
    return sum(map(_tokens, answers)) / max(sum(a["seconds"] for a in answers), 1e-9)


def _throughput(unit: Entry) -> float:
    return sum(map(_tokens, unit["answers"])) / unit["seconds"]


def _speed(row: Entry, units: list[Entry], target: list[Entry], concurrency: int) -> None:
    """Throughput and its ratio to target-only's, round by round."""
    row["tokens_per_s"] = median(map(_throughput, units))
    pairs = [(u, t) for u, t in zip(units, target, strict=False) if t is not None]
    if not pairs:
        return
    ratios = sorted(_throughput(u) / _throughput(t) for u, t in pairs)
    row["speedup"] = median(ratios)
    row["speedup_range"] = [ratios[0], ratios[-1]]
    row["round_cost"] = row["tau"] / row["speedup"] if row["speedup"] else None
    if concurrency == 1:

        def ratio(chosen: list[int]) -> float:
            return median(
                _rate([u["answers"][i] for i in chosen]) / _rate([t["answers"][i] for i in chosen])
                for u, t in pairs
            )

        row["speedup_interval"] = bootstrap(len(units[0]["answers"]), ratio, 300)


def _identity(row: Entry, units: list[Entry], target: Entry | None, temperature: float) -> None:
    """Whether greedy answers are token for token target-only's."""
    if temperature != 0 or target is None:
        return
    expected = [a["output_ids"] for a in target["answers"]]
    same = [
        a["output_ids"] == ids for u in units for a, ids in zip(u["answers"], expected, strict=True)
    ]
    row["identical_answers"], row["compared_answers"] = sum(same), len(same)
    row["identical_to_target"] = all(same)


def row_of(cell: Entry, method: Entry, units: list[Entry | None], target: list) -> Entry:
    """One result object (DESIGN, section 6); a failed one holds ``error`` and no numbers.

    Args:
        units, target: this method's and target-only's units by round, None where missing.
    """
    row: Entry = {"method": method["name"], **cell}
    row |= dict.fromkeys(("tau", "tokens_per_s", "speedup", "round_cost", "identical_to_target"))
    errors = [u["error"] for u in units if u is not None and "error" in u]
    whole = [i for i, u in enumerate(units) if u is not None and "error" not in u]
    if errors:
        row["error"] = errors[0]
    elif not whole:
        row["error"] = "not run"
    if not whole:
        return row
    done = [units[i] for i in whole]
    beside = [t if t is not None and "error" not in t else None for t in (target[i] for i in whole)]
    answers = [a for u in done for a in u["answers"]]
    histogram = add_histograms(a["histogram"] for a in answers)
    row["num_prompts"] = len(done[0]["answers"])
    row["rounds"] = len(done)
    row["output_tokens"] = sum(map(_tokens, answers))
    row["verify_rounds"] = sum(a["verify_rounds"] for a in answers)
    row["empty_answers"] = sum(_tokens(a) == 0 for a in answers)
    row["tau"] = _tau(answers) or 1.0
    row["position_acceptance"] = (
        position_acceptance(histogram, method["num_drafts"]) if method["num_drafts"] else []
    )
    if method["num_drafts"]:
        first = done[0]["answers"]
        row["tau_interval"] = bootstrap(len(first), lambda at: _tau([first[i] for i in at]))
    _speed(row, done, beside, cell["concurrency"])
    reference = next((t for t in beside if t is not None), None)
    _identity(row, done, reference, cell["temperature"])
    return row


def collect(out: Path) -> Entry:
    """All rows of a run's folder, with its provenance.

    Raises:
        FileNotFoundError: the folder holds no run.
    """
    if not (out / "run.json").is_file():
        raise FileNotFoundError(f"{out} holds no run (run.json is missing): `eval run` first.")
    run = json.loads((out / "run.json").read_text())

    def units(cell: Entry, method: str) -> list[Entry | None]:
        folder = out / "units" / Cell(**cell).folder
        paths = [folder / f"{method}-r{i}.json" for i in range(run["rounds"])]
        return [json.loads(p.read_text()) if p.is_file() else None for p in paths]

    rows = []
    for cell in run["cells"]:
        target = units(cell, BASELINE)
        rows += [row_of(cell, m, units(cell, m["name"]), target) for m in run["methods"]]
    return {"provenance": run["provenance"], "run": run, "rows": rows}
