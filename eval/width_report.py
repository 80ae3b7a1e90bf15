"""Table and plots of the width study, from its ``results.json`` alone."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from eval.charts import draw
from eval.width_account import account_lines
from sglang_hyperdflash.tools.atomic import write_json, write_text

Row = dict[str, Any]
TARGET, AGAIN, FULL, ONE, ADAPTIVE, UNTRAINED = (
    "target",
    "target-again",
    "fixed 7",
    "fixed 1",
    "adaptive",
    "untrained drafter",
)
COLOURS = {
    TARGET: "#8c8c8c",
    FULL: "#d55e00",
    ADAPTIVE: "#0072b2",
    UNTRAINED: "#009e73",
}


def rate(rows: Sequence[Row], temperature: float, level: int, method: str) -> float | None:
    """Median tokens a second; None where it was not measured."""
    found = _found(rows, temperature, level, method)
    return median(found["tokens_per_s"]) if found else None


def _found(rows: Sequence[Row], temperature: float, level: int, method: str) -> Row | None:
    key = (temperature, level, method)
    rows = [r for r in rows if (r["temperature"], r["concurrency"], r["method"]) == key]
    return rows[0] if rows else None


def over(rows: Sequence[Row], temperature: float, level: int, method: str, base: str) -> str:
    """Tokens a second over those of ``base`` beside it: median of the passes' pairs, and range."""
    ratios = sorted(_ratios(rows, temperature, level, method, base))
    return f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})" if ratios else "-"


def _ratios(
    rows: Sequence[Row], temperature: float, level: int, method: str, base: str
) -> list[float]:
    found, other = (_found(rows, temperature, level, m) for m in (method, base))
    if not (found and other):
        return []
    pairs = zip(found["tokens_per_s"], other["tokens_per_s"], strict=True)
    return [a / b for a, b in pairs]


def pooled(ratios: Sequence[float]) -> str:
    """Geometric mean of ratios, and its 95 % interval by their logarithms' spread."""
    logs = [log(ratio) for ratio in ratios]
    wide = 1.96 * stdev(logs) / sqrt(len(logs)) if len(logs) > 1 else 0.0
    low, middle, high = (exp(fmean(logs) + wide * side) for side in (-1, 0, 1))
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def _better(rows: Sequence[Row], temperature: float, level: int) -> str:
    return max((TARGET, FULL), key=lambda m: rate(rows, temperature, level, m) or 0)


def _widths(rows: Sequence[Row], temperature: float, level: int, method: str) -> str:
    row = _found(rows, temperature, level, method)
    if row is None:
        return "-"
    total = sum(row["rounds_by_width"].values())
    found = {w: n / total for w, n in row["rounds_by_width"].items() if n}
    return ", ".join(f"{w}: {share:.0%}" for w, share in found.items())


def table(rows: Sequence[Row], temperature: float) -> list[str]:
    """Markdown lines: tokens a second, and adaptive over the better of both."""
    levels = sorted({r["concurrency"] for r in rows if r["temperature"] == temperature})
    lines = [
        f"| c | {TARGET} | {FULL} | {ADAPTIVE} | over the better | widths | {UNTRAINED} over "
        f"{TARGET} | noise: {TARGET} again |",
        "|---|---|---|---|---|---|---|---|",
    ]
    bases = {level: _better(rows, temperature, level) for level in levels}
    for level in levels:
        found = {m: rate(rows, temperature, level, m) for m in COLOURS}
        again = over(rows, temperature, level, AGAIN, TARGET)
        numbers = " | ".join(f"{found[m] or 0:.0f}" for m in (TARGET, FULL, ADAPTIVE))
        lines.append(
            f"| {level} | {numbers} | {over(rows, temperature, level, ADAPTIVE, bases[level])} | "
            f"{_widths(rows, temperature, level, ADAPTIVE)} | "
            f"{over(rows, temperature, level, UNTRAINED, TARGET)} | {again} |"
        )
    lines += ["", "All loads together, geometric mean of the pairs and its 95 % interval:", ""]
    for name, method, base in (
        ("adaptive over the better", ADAPTIVE, bases.get),
        ("untrained drafter over target", UNTRAINED, lambda _: TARGET),
        ("target again over target", AGAIN, lambda _: TARGET),
    ):
        pairs = [_ratios(rows, temperature, level, method, base(level)) for level in levels]
        ratios = [ratio for found in pairs for ratio in found]
        lines += [f"- {name}: {pooled(ratios)}"] if ratios else []
    return lines


def throughput_plot(rows: Sequence[Row]) -> str:
    """Tokens a second by concurrency, a panel a temperature."""
    temperatures = sorted({row["temperature"] for row in rows})

    def paint(axes) -> None:
        for axis, temperature in zip(axes, temperatures, strict=True):
            for method, colour in COLOURS.items():
                levels = sorted({row["concurrency"] for row in rows})
                found = [(c, rate(rows, temperature, c, method)) for c in levels]
                points = [(c, value) for c, value in found if value]
                if points:
                    axis.plot(*zip(*points, strict=True), "o-", color=colour, label=method)
            axis.set_xscale("log", base=2)
            axis.set_title(f"temperature {temperature:g}")
            axis.set_xlabel("concurrency")
            axis.grid(True)
        axes[0].set_ylabel("output tokens a second")
        axes[0].legend(fontsize=9)

    return draw("width", "Throughput by concurrency", paint, len(temperatures))


def steps_plot(steps: Sequence[Sequence[float]]) -> str:
    """Requests and width of every round of the stepped load."""

    def paint(axes) -> None:
        rounds = range(len(steps))
        axes[0].step(rounds, [s[1] for s in steps], color=COLOURS[TARGET], label="requests")
        axes[0].step(rounds, [s[2] for s in steps], color=COLOURS[ADAPTIVE], label="width")
        axes[0].set(yscale="log", xlabel="round")
        axes[0].legend(fontsize=9)

    return draw("steps", "A load that steps from 1 to 64 and back", paint)


def phases(steps: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """Rounds, from and to, of the high load and of one request again; empty without a high load."""
    high = [i for i, step in enumerate(steps) if step[1] > 32]
    if not high:
        return []
    # Between the two the load's own answers end, one by one.
    alone = (i for i, step in enumerate(steps) if i > high[-1] and step[1] == 1)
    return [(high[0], high[-1]), (next(alone, len(steps)), len(steps))]


def settled_after(steps: Sequence[Sequence[float]], start: int, stop: int) -> int:
    """Rounds from ``start`` until the width is the later rounds' usual one for eight of ten."""
    widths = [int(step[2]) for step in steps[start:stop]]
    late = widths[len(widths) // 2 :]
    usual = max(set(late), key=late.count)
    for at in range(len(widths) - 10):
        if sum(width == usual for width in widths[at : at + 10]) >= 8:
            return at
    return len(widths)


def write_report(out: Path, content: dict[str, Any]) -> None:
    """``results.json``, ``report.md``, ``throughput.svg``; with a stepped load ``steps.svg``."""
    write_json(out / "results.json", content, indent=1)
    rows, steps = content["rows"], content["steps"]
    lines = [
        "# A verify width that follows load",
        "",
        "Written by `python -m eval.width_study`; output tokens a second, medians of interleaved "
        "passes. Answers end by themselves. `over the better`: adaptive over the larger of both "
        "columns before it. Ratios are medians of pairs of passes in the same turn, with their "
        "range.",
        "",
        f"Device: {content['provenance']['device']}; commit {content['provenance']['commit']}.",
    ]
    for temperature in sorted({row["temperature"] for row in rows}):
        lines += ["", f"## Temperature {temperature:g}", "", *table(rows, temperature)]
    lines += ["", "![Throughput by concurrency](throughput.svg)"]
    write_text(out / "throughput.svg", throughput_plot(rows))
    if content["accounts"]:
        lines += ["", "## Where the time goes", ""]
        lines += ["Servers whose passes are timed, temperature 0, medians of the loads."]
        lines += account_lines(content["accounts"])
    if steps:
        said = [str(settled_after(steps, *phase)) for phase in phases(steps)]
        lines += ["", "## A load that steps 1 -> 64 -> 1", ""]
        lines += [f"Rounds until settled, up and down: {', '.join(said)}.", ""]
        lines += ["![Requests and width of every round](steps.svg)"]
        write_text(out / "steps.svg", steps_plot(steps))
    write_text(out / "report.md", "\n".join(lines) + "\n")
