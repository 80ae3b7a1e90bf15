"""The width study: throughput of an adaptive verify width by concurrency.

It is a run (:mod:`eval.runner`) with one cell for each load, so it is interleaved, resumes, and has
a noise floor. The first round warms the prefix caches and does not count. An untrained drafter
shows what an adaptive width costs where no draft is accepted.
"""

from collections.abc import Sequence
from itertools import product
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, median, stdev

from eval.aggregate import Row, throughput
from eval.charts import line_chart
from eval.histograms import add_histograms
from eval.methods import BASELINE, NOISE, Method
from eval.report import Table
from eval.runner import Cell, Plan, is_whole, read_units
from sglang_hyperdflash.serving.settings import ADAPTIVE, FULL, WIDTH
from sglang_hyperdflash.tools.atomic import write_json, write_text
from sglang_hyperdflash.tools.server_process import hyperdflash_arguments

KIND = "python -m eval width"
WHOLE, FOLLOWS, UNTRAINED = "full width", "adaptive width", "untrained"
# Requests of a load: many times the concurrency, so that few rounds see the batch fill or drain.
WAVES, FEWEST = 8, 24
REPORT = f"""\
# A verify width that follows load

Written by `{KIND}`: output tokens a second, medians of interleaved rounds, by requests
in flight (c). *The better* is the faster of the baseline and the full width. Ratios are
medians of the rounds' ratios, with their range.

Device: {{device}}; commit {{commit}}.
"""


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
    for cell, method in product(plan.cells, plan.methods):
        units = read_units(plan.out, cell, method.name, plan.rounds)
        units = units[1:] or units
        if all(map(is_whole, units)):
            widths = add_histograms(a["widths"] for unit in units for a in unit["answers"])
            row = {"temperature": cell.temperature, "concurrency": cell.concurrency}
            row |= {"method": method.name, "tokens_per_s": list(map(throughput, units))}
            row["rounds_by_width"] = {str(w): n for w, n in enumerate(widths) if n}
            rows.append(row)
    return rows


def _ratios(row: Row | None, base: Row | None) -> list[float]:
    """Throughput over that of ``base`` in every round; empty where one of them is missing."""
    if not row or not base:
        return []
    pairs = zip(row["tokens_per_s"], base["tokens_per_s"], strict=True)
    return [rate / base_rate for rate, base_rate in pairs]


def over(row: Row | None, base: Row | None) -> str:
    """Throughput over that of ``base``: the median of the rounds' ratios, and their range."""
    ratios = sorted(_ratios(row, base))
    return f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})" if ratios else "-"


def pooled(ratios: Sequence[float]) -> str:
    """Geometric mean of ratios, and its 95 % interval from the spread of their logarithms."""
    logs = [log(ratio) for ratio in ratios]
    margin = 1.96 * stdev(logs) / sqrt(len(logs)) if len(logs) > 1 else 0.0
    low, middle, high = (exp(fmean(logs) + margin * side) for side in (-1, 0, 1))
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def table(rows: Sequence[Row], temperature: float) -> Table:
    """Throughput by concurrency, and the adaptive width over the better fixed choice."""
    by_level: dict[int, dict[str, Row]] = {}
    for row in (row for row in rows if row["temperature"] == temperature):
        by_level.setdefault(row["concurrency"], {})[row["method"]] = row
    names = ("Adaptive over the better", "Untrained over baseline", "Baseline over itself")
    lines, ratios = [], {name: [] for name in names}
    for level, by_method in sorted(by_level.items()):
        rates = {method: median(row["tokens_per_s"]) for method, row in by_method.items()}
        base, adaptive = by_method.get(BASELINE), by_method.get(FOLLOWS)
        better = by_method.get(max((BASELINE, WHOLE), key=lambda method: rates.get(method, 0)))
        pairs = ((adaptive, better), (by_method.get(UNTRAINED), base), (by_method.get(NOISE), base))
        for name, pair in zip(names, pairs, strict=True):
            ratios[name] += _ratios(*pair)
        numbers = (f"{rates.get(method, 0):.0f}" for method in (BASELINE, WHOLE, FOLLOWS))
        rounds = adaptive["rounds_by_width"] if adaptive else {}
        total = sum(rounds.values())
        shares = ", ".join(f"{width}: {n / total:.0%}" for width, n in rounds.items()) or "-"
        over_better, *others = (over(*pair) for pair in pairs)
        lines.append((str(level), *numbers, over_better, shares, *others))
    heads = ("c", BASELINE, WHOLE, FOLLOWS, "adaptive over the better", "share of rounds by width")
    heads += ("untrained over baseline", "noise: baseline again")
    all_loads = "; ".join(f"{name} {pooled(values)}" for name, values in ratios.items() if values)
    note = f"All loads, geometric mean of the rounds' ratios (95 %): {all_loads}."
    return Table(f"Temperature {temperature:g}", heads, tuple(lines), note)


def write_report(out: Path, content: Row) -> None:
    """``results.json``, ``report.md`` and ``throughput.svg``."""
    rows = content["rows"]
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in (row for row in rows if row["method"] != NOISE):
        points = panels.setdefault(f"temperature {row['temperature']:g}", {})
        point = (row["concurrency"], median(row["tokens_per_s"]))
        points.setdefault(row["method"], []).append(point)
    lines = [*REPORT.format_map(content["provenance"]).splitlines(), ""]
    for temperature in sorted({row["temperature"] for row in rows}):
        lines += table(rows, temperature).markdown()
    lines.append("![Throughput by concurrency](throughput.svg)")
    write_json(out / "results.json", content, indent=1)
    chart = line_chart(panels, "requests in flight", "output tokens a second", log=True)
    write_text(out / "throughput.svg", chart)
    write_text(out / "report.md", "\n".join(lines) + "\n")
