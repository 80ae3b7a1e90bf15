"""The width study: throughput of an adaptive verify width by concurrency.

A run (:mod:`eval.runner`) with a cell for each load: so it is interleaved, resumes, and has a noise
floor. The first round warms the prefix caches and does not count. An untrained drafter shows what
an adaptive width costs where no draft is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from eval.aggregate import throughput
from eval.charts import line_chart
from eval.methods import BASELINE, NOISE, Method
from eval.runner import Cell, Plan, is_whole, read_sealed
from eval.tables import Table
from sglang_hyperdflash.serving.settings import ADAPTIVE, FULL, WIDTH
from sglang_hyperdflash.tools.acceptance import add_histograms
from sglang_hyperdflash.tools.atomic import write_json, write_text
from sglang_hyperdflash.tools.server_process import hyperdflash_arguments

KIND = "python -m eval width"
WHOLE, FOLLOWS, UNTRAINED = "full width", "adaptive width", "untrained"
# Requests of a load: many times the concurrency, so that few rounds see the batch fill or drain.
WAVES, FEWEST = 8, 24
Row = dict[str, Any]


def methods_of(draft: str, untrained: str | None) -> tuple[Method, ...]:
    """The baseline, whole blocks, an adaptive width, and that with an untrained drafter."""

    kinds = ((WHOLE, draft, FULL), (FOLLOWS, draft, ADAPTIVE), (UNTRAINED, untrained, ADAPTIVE))
    drafting = (
        Method(name, hyperdflash_arguments(folder), 6, None, ((WIDTH, width),))
        for name, folder, width in kinds
        if folder
    )
    return (Method(BASELINE, (), 0), *drafting)


def loads_of(
    prompts: Sequence[str], levels: Sequence[int], temperatures: Sequence[float]
) -> tuple[dict[str, list[list[str]]], tuple[Cell, ...]]:
    """First turns, repeated for each level, and a cell for each level and temperature."""
    loads = {
        f"load{c}": [[prompts[i % len(prompts)]] for i in range(max(FEWEST, WAVES * c))]
        for c in levels
    }
    cells = (Cell(f"load{c}", t, "off", c) for t in temperatures for c in levels)
    return loads, tuple(cells)


def rows_of(plan: Plan) -> list[Row]:
    """One row for each load and method whose rounds are whole, without the first round."""
    rows = []
    for cell in plan.cells:
        for method in plan.methods:
            found = [read_sealed(plan.unit(cell, method.name, i)) for i in range(plan.rounds)]
            units = found[1:] or found
            if not all(map(is_whole, units)):
                continue
            row = {"temperature": cell.temperature, "concurrency": cell.concurrency}
            row |= {"method": method.name, "tokens_per_s": list(map(throughput, units))}
            widths = add_histograms(a["widths"] for unit in units for a in unit["answers"])
            row["rounds_by_width"] = {str(w): n for w, n in enumerate(widths) if n}
            rows.append(row)
    return rows


def _ratios(found: Row | None, base: Row | None) -> list[float]:
    if not found or not base:
        return []
    pairs = zip(found["tokens_per_s"], base["tokens_per_s"], strict=True)
    return [a / b for a, b in pairs]


def over(found: Row | None, base: Row | None) -> str:
    """Tokens a second over those of ``base``: median of the rounds' ratios, and their range."""
    ratios = sorted(_ratios(found, base))
    return f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})" if ratios else "-"


def pooled(ratios: Sequence[float]) -> str:
    """Geometric mean of ratios, and its 95 % interval by their logarithms' spread."""
    logs = [log(ratio) for ratio in ratios]
    wide = 1.96 * stdev(logs) / sqrt(len(logs)) if len(logs) > 1 else 0.0
    low, middle, high = (exp(fmean(logs) + wide * side) for side in (-1, 0, 1))
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def _widths(row: Row | None) -> str:
    total = sum(row["rounds_by_width"].values()) if row else 0
    shares = (row or {}).get("rounds_by_width", {}).items()
    return ", ".join(f"{w}: {n / total:.0%}" for w, n in shares if n) or "-"


def table(rows: Sequence[Row], temperature: float) -> Table:
    """Tokens a second by concurrency, and adaptive over the better fixed choice."""
    by_level: dict[int, dict[str, Row]] = {}
    for row in (row for row in rows if row["temperature"] == temperature):
        by_level.setdefault(row["concurrency"], {})[row["method"]] = row
    lines, better, untrained, noise = [], [], [], []
    for level, own in sorted(by_level.items()):
        rates = {name: median(row["tokens_per_s"]) for name, row in own.items()}
        base, follows = own.get(BASELINE), own.get(FOLLOWS)
        best = own.get(max((BASELINE, WHOLE), key=lambda name: rates.get(name, 0)))
        numbers = [f"{rates.get(name, 0):.0f}" for name in (BASELINE, WHOLE, FOLLOWS)]
        cells = (over(follows, best), _widths(follows), over(own.get(UNTRAINED), base))
        lines.append((str(level), *numbers, *cells, over(own.get(NOISE), base)))
        better += _ratios(follows, best)
        untrained += _ratios(own.get(UNTRAINED), base)
        noise += _ratios(own.get(NOISE), base)
    heads = ("c", BASELINE, WHOLE, FOLLOWS, "adaptive over the better", "share of rounds by width")
    heads += ("untrained over baseline", "noise: baseline again")
    named = (("Adaptive over the better", better), ("Untrained over baseline", untrained))
    named += (("Baseline over itself", noise),)
    all_loads = "; ".join(f"{name} {pooled(ratios)}" for name, ratios in named if ratios)
    note = f"All loads, geometric mean of the rounds' ratios (95 %): {all_loads}."
    return Table(f"Temperature {temperature:g}", heads, tuple(lines), note)


def write_report(out: Path, content: dict[str, Any]) -> None:
    """``results.json``, ``report.md`` and ``throughput.svg``."""
    rows = content["rows"]
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in (row for row in rows if row["method"] != NOISE):
        lines = panels.setdefault(f"temperature {row['temperature']:g}", {})
        point = (row["concurrency"], median(row["tokens_per_s"]))
        lines.setdefault(row["method"], []).append(point)
    found = content["provenance"]
    lines = [
        "# A verify width that follows load",
        "",
        f"Written by `{KIND}`: output tokens a second, medians of interleaved rounds, by requests",
        "in flight (c). *The better* is the faster of the baseline and the full width. Ratios are",
        "medians of the rounds' ratios, with their range.",
        "",
        f"Device: {found['device']}; commit {found['commit']}.",
        "",
    ]
    for temperature in sorted({row["temperature"] for row in rows}):
        lines += table(rows, temperature).markdown()
    lines.append("![Throughput by concurrency](throughput.svg)")
    write_json(out / "results.json", content, indent=1)
    chart = line_chart(panels, "requests in flight", "output tokens a second", log=True)
    write_text(out / "throughput.svg", chart)
    write_text(out / "report.md", "\n".join(lines) + "\n")
