"""Draw the figures of README and docs, and write README's table of results.

    python docs/figures/draw.py

Every figure is drawn twice, for light and for dark pages: ``NAME-light.svg`` and
``NAME-dark.svg``. Numbers come from ``eval/results/tiny/results.json``, but for the speeds of the
table: they are those of the paired study. Each file carries a digest of this script and of those
numbers, so a test can tell a figure that is out of date.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Polygon, Rectangle

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RESULTS = ROOT / "eval" / "results" / "tiny" / "results.json"
PAIRED = ROOT / "eval" / "results" / "paired_speed" / "report.md"
README = ROOT / "README.md"
TABLE_BEGIN = "<!-- table of docs/figures/draw.py: begin -->\n"
TABLE_END = "<!-- table of docs/figures/draw.py: end -->\n"

METHODS = {
    "mtp6": "MTP",
    "dflash6": "DFlash",
    "dspark-style": "DSpark-style",
    "dflash2-style": "DFlash 2-style",
    "hyperdflash6": "HyperDFlash",
    "hyperdflash2": "HyperDFlash-2",
}
OURS = ("hyperdflash6", "hyperdflash2")
# In-distribution benchmarks: text of the kinds that the tiny target was trained on.
IN_DISTRIBUTION = ("math", "code", "chat")
NOISE = "baseline-again"
# The paired study's names of what it has measured.
MEASURED = {"hyperdflash6": "hyperdflash", "hyperdflash2": "hyperdflash2", NOISE: "baseline again"}
DRAFTS = 6

Row = Mapping[str, Any]
Theme = Mapping[str, str]
THEMES: Mapping[str, Theme] = {
    "light": {
        "ink": "#1f2328",
        "soft": "#59636e",
        "line": "#8c959f",
        "panel": "#f6f8fa",
        "accent": "#0969da",
        "good": "#1a7f37",
        "bonus": "#bc4c00",
    },
    "dark": {
        "ink": "#f0f6fc",
        "soft": "#9198a1",
        "line": "#6e7681",
        "panel": "#151b23",
        "accent": "#4493f8",
        "good": "#3fb950",
        "bonus": "#f0883e",
    },
}
# One hue for each residual stream and each method; they read on white and on black.
STREAMS = ("#3b82f6", "#d97706", "#10a37f", "#a855f7")
HUES = {
    "mtp6": "#a855f7",
    "dflash6": "#10a37f",
    "dspark-style": "#d97706",
    "dflash2-style": "#84a98c",
    "hyperdflash6": "#7cb0ff",
    "hyperdflash2": "#2563eb",
}


# --- numbers -------------------------------------------------------------------------------------


def rows_of(
    content: Row, method: str, known: bool | None = None, temperature: float = 0.0
) -> list[Row]:
    """A method's rows, thinking off, one request at a time: one row per benchmark.

    known: True for in-distribution benchmarks, False for the others, None for both.
    """
    chosen = {"method": method, "temperature": temperature, "thinking": "off", "concurrency": 1}
    rows = [row for row in content["rows"] if chosen.items() <= row.items()]
    return [row for row in rows if known in (None, row["benchmark"] in IN_DISTRIBUTION)]


def tau(rows: Sequence[Row]) -> float:
    """Accept length: 1 + accepted drafts / verification rounds, over all rounds of all rows."""
    rounds = sum(row["verify_rounds"] for row in rows)
    return 1 + sum((row["tau"] - 1) * row["verify_rounds"] for row in rows) / rounds


def positions(rows: Sequence[Row]) -> list[float]:
    """Share of all rounds that accepted the draft at position k, for k = 1, 2, ..."""
    rounds = sum(row["verify_rounds"] for row in rows)
    kept = zip(
        *([p * row["verify_rounds"] for p in row["position_acceptance"]] for row in rows),
        strict=True,
    )
    return [sum(values) / rounds for values in kept]


def speedups(rows: Sequence[Row]) -> list[float]:
    """Speedup over the baseline, one per benchmark."""
    return [row["speedup"] for row in rows]


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)


def noise_floor(content: Row) -> tuple[float, float]:
    """Range of the baseline's speedup over itself, over all benchmarks and rounds."""
    ranges = [row["speedup_range"] for row in rows_of(content, NOISE)]
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def table(content: Row) -> str:
    """README's table of results, one Markdown line per method."""
    heads = ["method", *(f"τ {where}, T={t}" for where in ("in", "out") for t in (0, 1))]
    heads += [f"speedup, T={t}" for t in (0, 1)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for method, label in METHODS.items():
        taus = [
            f"{tau(rows_of(content, method, known, temperature)):.2f}"
            for known in (True, False)
            for temperature in (0.0, 1.0)
        ]
        name = f"**{label}**" if method in OURS else label
        lines.append(f"| {' | '.join((name, *taus, *speed_cells(method)))} |")
    again = ("baseline, second server", *["1"] * 4, *speed_cells(NOISE))
    lines.append(f"| {' | '.join(again)} |")
    return "\n".join(lines) + "\n"


def speed_cells(method: str) -> list[str]:
    """Speed of whole requests over the baseline's with its interval, at temperature 0 and 1."""
    if method not in MEASURED:
        return ["", ""]
    cells = rf"^\| [01] \| {MEASURED[method]} over baseline \| (\S+ \([^;]+);"
    return [f"{cell})" for cell in re.findall(cells, PAIRED.read_text(), re.MULTILINE)]


def with_table(readme: str, content: Row) -> str:
    """README's text with its table of results rewritten."""
    before, rest = readme.split(TABLE_BEGIN)
    _, after = rest.split(TABLE_END)
    return before + TABLE_BEGIN + table(content) + "\n" + TABLE_END + after


def digest(content: Row) -> str:
    """What a figure depends on: this script and the numbers in it, as 16 hex digits."""
    shares = {name: positions(rows_of(content, name, known=True)) for name in METHODS}
    numbers = table(content) + json.dumps(shares)
    return hashlib.sha256(Path(__file__).read_bytes() + numbers.encode()).hexdigest()[:16]


# --- drawing -------------------------------------------------------------------------------------


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure in units of a tenth of an inch, without axes or background."""
    figure = Figure(figsize=(width / 10, height / 10))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(axes: Axes, theme: Theme, x: float, y: float, w: float, h: float, **style: Any) -> None:
    """A rounded box, its lower left corner at (x, y)."""
    style = {"facecolor": theme["panel"], "edgecolor": theme["line"], "linewidth": 1.2} | style
    axes.add_patch(FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0,rounding_size=0.8", **style))


def arrow(axes: Axes, theme: Theme, start: tuple, end: tuple, **style: Any) -> None:
    """An arrow between two points."""
    style = {"color": theme["soft"], "linewidth": 1.4, "mutation_scale": 11} | style
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", shrinkA=0, shrinkB=0, **style))


def note(axes: Axes, theme: Theme, x: float, y: float, text: str, **style: Any) -> None:
    """Centred text."""
    style = {"ha": "center", "va": "center", "fontsize": 9, "color": theme["ink"]} | style
    axes.text(x, y, text, **style)


def draw_target(axes: Axes, theme: Theme) -> None:
    """The target's layers and the four residual streams that leave the last one."""
    box(axes, theme, 1, 13, 17, 20)
    note(axes, theme, 9.5, 35, "target", fontweight="bold", fontsize=10.5)
    for i in range(3):
        axes.add_patch(
            Rectangle((2.4 + 5.1 * i, 14.4), 4, 17.2, facecolor="none", edgecolor=theme["line"])
        )
    for i, hue in enumerate(STREAMS):
        axes.plot([1.6, 25.5], [17 + 4 * i] * 2, color=hue, linewidth=2.6, zorder=3)
    text = "hyper-connections: m = 4\nresidual streams per token"
    note(axes, theme, 9.5, 10.6, text, fontsize=8.5)


def draw_gate(axes: Axes, theme: Theme) -> None:
    """The gate that weighs the streams, and the feature that it produces."""
    corners = [(26, 13.5), (26, 32.5), (34, 26.5), (34, 19.5)]
    axes.add_patch(
        Polygon(corners, facecolor=theme["panel"], edgecolor=theme["accent"], linewidth=1.6)
    )
    for i, hue in enumerate(STREAMS):
        note(axes, theme, 28.2, 17 + 4 * i, f"$a_{i + 1}$", color=hue, fontsize=10)
    note(axes, theme, 32, 23, "$\\Sigma$", fontsize=12)
    note(axes, theme, 30, 35, "gate", fontweight="bold", fontsize=10.5, color=theme["accent"])
    text = "initialized from the\ntarget's own hc_head"
    note(axes, theme, 30, 10.6, text, fontsize=8.5)
    arrow(axes, theme, (34, 23), (38.4, 23))
    axes.add_patch(Rectangle((38.8, 19.4), 2, 7.2, facecolor=theme["accent"], edgecolor="none"))
    note(axes, theme, 40.2, 35, "feature", fontweight="bold", fontsize=10.5)
    note(axes, theme, 41.6, 15.6, "one per token", fontsize=8.5)
    arrow(axes, theme, (41.4, 23), (46.4, 23))


def cell(axes: Axes, theme: Theme, x: float, y: float, text: str, edge: str) -> None:
    """One token of a block."""
    box(axes, theme, x, y, 5, 4.2, edgecolor=edge)
    note(axes, theme, x + 2.5, y + 2.1, text, fontsize=8)


def draw_block(axes: Axes, theme: Theme) -> None:
    """The drafter's block and the part that the target accepts."""
    box(axes, theme, 46.8, 13, 44.2, 20, edgecolor=theme["accent"])
    note(axes, theme, 69, 35, "drafter: one pass", fontweight="bold", fontsize=10.5)
    xs = [49 + 5.8 * i for i in range(DRAFTS + 1)]
    for i, x in enumerate(xs):
        cell(axes, theme, x, 14.8, "mask" if i else "anchor", theme["line"])
        if i:
            arrow(axes, theme, (x + 2.5, 19.4), (x + 2.5, 26.4), linewidth=1)
            cell(axes, theme, x, 26.8, f"$d_{i}$", theme["accent"])
    text = "layers attend to the features\nof all tokens before the anchor"
    axes.text(
        xs[3] + 5.4,
        22.9,
        text,
        ha="center",
        va="center",
        fontsize=8.5,
        color=theme["soft"],
        bbox={"facecolor": theme["panel"], "edgecolor": "none", "pad": 1.5},
        zorder=4,
    )
    for i, x in enumerate(xs[1:], 1):
        accepted = i <= 3
        mark, hue = ("accept", theme["good"]) if accepted else ("reject", theme["soft"])
        if i == 4:
            mark, hue = "bonus", theme["bonus"]
        cell(axes, theme, x, 3.6, mark, hue)
        if i <= 4:
            arrow(axes, theme, (x + 2.5, 12.6), (x + 2.5, 8.3), linewidth=1)
    text = "the target verifies all six in one pass, accepts the\n"
    text += "longest correct prefix and adds one bonus token"
    note(axes, theme, 28.5, 5.6, text, fontsize=9)


def method(theme: Theme, _content: Row) -> Figure:
    """m residual streams, the inherited gate, one feature, a block of six."""
    figure, axes = canvas(92, 38)
    draw_target(axes, theme)
    draw_gate(axes, theme)
    draw_block(axes, theme)
    return figure


STEPS = (
    ("init", "reads the target's\nconfig and hc_head", "untrained\ndrafter"),
    ("regenerate", "the target answers\nyour prompts", "answers\n(JSONL)"),
    ("capture", "SGLang prefills\neach answer once", "target states\n(shards)"),
    ("train", "CE + alpha KL,\nexact resume", "trained\ndrafter"),
    ("serve", "SGLang with\nHYPERDFLASH", "lossless\nspeedup"),
)


def training(theme: Theme, _content: Row) -> Figure:
    """The five commands from a target to a served drafter."""
    figure, axes = canvas(92, 20)
    for i, (name, does, gives) in enumerate(STEPS):
        x = 1 + 18.4 * i
        edge = theme["good"] if name == "serve" else theme["accent"]
        style = {"linestyle": (0, (4, 2))} if name == "capture" else {}
        box(axes, theme, x, 9, 15, 10, edgecolor=edge, **style)
        note(axes, theme, x + 7.5, 16.6, name, fontweight="bold", fontsize=10.5)
        note(axes, theme, x + 7.5, 12.2, does, fontsize=8.5)
        note(axes, theme, x + 7.5, 4.6, gives, fontsize=8.5, color=theme["soft"])
        arrow(axes, theme, (x + 7.5, 8.9), (x + 7.5, 6.9), linewidth=1)
        if i + 1 < len(STEPS):
            arrow(axes, theme, (x + 15.2, 14), (x + 18.2, 14))
    text = "the tiny target needs no capture: train runs it itself"
    note(axes, theme, 46, 1, text, fontsize=8.5, color=theme["soft"])
    return figure


def dress(axes: Axes, theme: Theme, title: str) -> None:
    """Title, spines and ticks of a plot in the theme's colours."""
    axes.set_facecolor("none")
    axes.set_title(title, color=theme["ink"], fontsize=10, loc="left")
    axes.tick_params(colors=theme["soft"], labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(theme["line"])


def results(theme: Theme, content: Row) -> Figure:
    """Speedup of each method with the noise floor, and acceptance by drafted position."""
    figure = Figure(figsize=(9.2, 3.6))
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    plot_speedups(left, theme, content)
    plot_positions(right, theme, content)
    figure.tight_layout(w_pad=2)
    return figure


def plot_speedups(axes: Axes, theme: Theme, content: Row) -> None:
    """A bar per method, a dot per benchmark, a band for the noise floor."""
    low, high = noise_floor(content)
    axes.axvspan(low, high, color=theme["line"], alpha=0.3, linewidth=0)
    axes.axvline(1, color=theme["line"], linewidth=1)
    for y, name in enumerate(reversed(METHODS)):
        rows = rows_of(content, name, known=True)
        times = speedups(rows)
        axes.barh(y, mean(times), height=0.55, color=HUES[name], alpha=0.85)
        axes.plot(times, [y] * len(times), "o", markersize=3.5, color=theme["ink"])
        axes.text(0.05, y, f"τ {tau(rows):.2f}", va="center", fontsize=9, color="white")
    axes.set_yticks(range(len(METHODS)), list(reversed(METHODS.values())))
    axes.set(xlim=(0, None), xticks=(0, 1, 2, 3))
    dress(axes, theme, "Speedup over the baseline, in-distribution, T = 0")


def plot_positions(axes: Axes, theme: Theme, content: Row) -> None:
    """Acceptance of every drafted position."""
    for name, label in METHODS.items():
        shares = positions(rows_of(content, name, known=True))
        steps = range(1, len(shares) + 1)
        axes.plot(steps, shares, "o-", color=HUES[name], linewidth=2, markersize=4, label=label)
    axes.set(xticks=range(1, DRAFTS + 1), ylim=(0, 1), xlim=(0.7, DRAFTS + 0.3))
    axes.legend(frameon=False, fontsize=8.5, labelcolor=theme["ink"])
    dress(axes, theme, "Acceptance by drafted position")


FIGURES: Mapping[str, Callable[[Theme, Row], Figure]] = {
    "method": method,
    "training": training,
    "results": results,
}


def main() -> None:
    """Draw everything into ``--out``; with the default folder, write README's table too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the figures")
    out = parser.parse_args().out
    content = json.loads(RESULTS.read_text())
    matplotlib.rcParams.update({"svg.hashsalt": "hyperdflash", "font.family": "DejaVu Sans"})
    for name, draw in FIGURES.items():
        for theme, colours in THEMES.items():
            path = out / f"{name}-{theme}.svg"
            metadata = {"Date": None, "Description": f"drawn from {digest(content)}"}
            draw(colours, content).savefig(path, transparent=True, metadata=metadata)
            print(path)
    if out == HERE:
        README.write_text(with_table(README.read_text(), content))


if __name__ == "__main__":
    main()
