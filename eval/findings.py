"""What a run's rows say: means, goals met or not, identity, the noise floor."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from eval.methods import BASELINE, NOISE
from eval.tables import LABELS, Row


def mean_of(rows: Sequence[Row], method: str, column: str, **where: Any) -> float | None:
    """The mean of a column over a method's whole rows; None when there are none."""
    values = [
        r[column]
        for r in rows
        if r["method"] == method
        and not r.get("error")
        and r.get(column) is not None
        and all(r[k] == v for k, v in where.items())
    ]
    return mean(values) if values else None


def goals(rows: Sequence[Row], ours: str = "hyperdflash6") -> list[tuple[str, str]]:
    """How our mean tau and speedup stand against each rival's, in words, by temperature."""
    found = []
    rivals = [m for m in ("mtp3", "mtp6", "dflash6") if any(r["method"] == m for r in rows)]
    for temperature in sorted({r["temperature"] for r in rows}):
        for rival in rivals:
            parts = []
            for column, name in (("tau", "mean τ"), ("speedup", "mean speedup")):
                where = {"temperature": temperature, "concurrency": 1}
                a = mean_of(rows, ours, column, **where)
                b = mean_of(rows, rival, column, **where)
                if a is None or b is None:
                    continue
                verdict = "above" if a > b else "NOT above"
                parts.append(f"{name} {a:.2f} against {b:.2f} ({a / b:.2f}x, {verdict})")
            if parts:
                found.append((f"{LABELS[rival]}, temperature {temperature:g}", "; ".join(parts)))
    return found


def identity_line(rows: Sequence[Row]) -> str:
    """How many greedy answers equal target-only's, over every method."""
    checked = [r for r in rows if r.get("compared_answers") and r["method"] != BASELINE]
    same = sum(r["identical_answers"] for r in checked)
    total = sum(r["compared_answers"] for r in checked)
    return f"{same} of {total} greedy answers are token for token target-only's."


def noise_line(rows: Sequence[Row]) -> str | None:
    """What target-only against itself gives: differences below it mean nothing."""
    floor = [r["speedup_range"] for r in rows if r["method"] == NOISE and r.get("speedup_range")]
    if not floor:
        return None
    low, high = min(r[0] for r in floor), max(r[1] for r in floor)
    return (
        f"Noise floor: target-only against itself gave speedups from {low:.2f} to {high:.2f} over "
        "all cells and rounds."
    )


def positions(rows: Sequence[Row], method: str) -> list[float]:
    """Mean acceptance at each drafted position over a method's whole rows."""
    found = [
        r["position_acceptance"]
        for r in rows
        if r["method"] == method and not r.get("error") and r.get("position_acceptance")
    ]
    return [sum(values) / len(values) for values in zip(*found, strict=False)]


def cost_points(rows: Sequence[Row]) -> list[tuple[str, float, float]]:
    """(method, round cost, tau) at concurrency 1, means over cells: τ against round cost."""
    methods = [m for m in dict.fromkeys(r["method"] for r in rows) if m not in (BASELINE, NOISE)]
    points = []
    for method in methods:
        cost = mean_of(rows, method, "round_cost", concurrency=1)
        tau = mean_of(rows, method, "tau", concurrency=1)
        if cost is not None and tau is not None:
            points.append((method, cost, tau))
    return points
