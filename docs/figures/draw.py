"""Draw the figures of README and docs, and write README's table of results.

    python docs/figures/draw.py

Every figure is drawn twice, for light and for dark pages: ``NAME-light.svg`` and
``NAME-dark.svg``. Numbers come from ``eval/results/tiny/results.json``; the speeds of the table
are those of the paired study. Each file carries a digest of this script and of those numbers, so
that a test can tell whether a figure is out of date.
"""

import argparse
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
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

# Every method's label, and its hue in a plot, which reads on white and on black.
METHODS = {
    "mtp6": ("MTP", "#a855f7"),
    "dflash6": ("DFlash", "#10a37f"),
    "dspark-style": ("DSpark-style", "#d97706"),
    "dflash2-style": ("DFlash 2-style", "#84a98c"),
    "hyperdflash6": ("HyperDFlash", "#7cb0ff"),
    "hyperdflash2": ("HyperDFlash-2", "#2563eb"),
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
COLOURS = ("ink", "soft", "line", "panel", "accent", "good", "bonus")
THEMES: Mapping[str, Theme] = {
    name: dict(zip(COLOURS, hues, strict=True))
    for name, hues in {
        "light": ("#1f2328", "#59636e", "#8c959f", "#f6f8fa", "#0969da", "#1a7f37", "#bc4c00"),
        "dark": ("#f0f6fc", "#9198a1", "#6e7681", "#151b23", "#4493f8", "#3fb950", "#f0883e"),
    }.items()
}
# One hue for each residual stream, which reads on white and on black, too.
STREAMS = ("#3b82f6", "#d97706", "#10a37f", "#a855f7")


# --- numbers -------------------------------------------------------------------------------------


def rows_of(
    content: Row, method: str, known: bool | None = None, temperature: float = 0.0
) -> list[Row]:
    """Return a method's rows, one per benchmark, with thinking off and one request at a time.

    ``known`` is True for in-distribution benchmarks, False for the others, None for both.
    """
    setting = {"method": method, "temperature": temperature, "thinking": "off", "concurrency": 1}
    rows = [row for row in content["rows"] if setting.items() <= row.items()]
    return [row for row in rows if known in (None, row["benchmark"] in IN_DISTRIBUTION)]


def tau(rows: Sequence[Row]) -> float:
    """Return the accept length, 1 + accepted drafts / verification rounds, over all rounds."""
    rounds = sum(row["verify_rounds"] for row in rows)
    return 1 + sum((row["tau"] - 1) * row["verify_rounds"] for row in rows) / rounds


def positions(rows: Sequence[Row]) -> list[float]:
    """Return the share of all rounds that accepted the draft at position k, for k = 1, 2, ..."""
    rounds = sum(row["verify_rounds"] for row in rows)
    accepted = ([p * row["verify_rounds"] for p in row["position_acceptance"]] for row in rows)
    return [sum(counts) / rounds for counts in zip(*accepted, strict=True)]


def table(content: Row) -> str:
    """Return README's table of results, one Markdown line per method."""
    head = ["method", *(f"τ {where}, T={t}" for where in ("in", "out") for t in (0, 1))]
    head += [f"speedup, T={t}" for t in (0, 1)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for method, (label, _) in METHODS.items():
        taus = [
            f"{tau(rows_of(content, method, known, temperature)):.2f}"
            for known in (True, False)
            for temperature in (0.0, 1.0)
        ]
        name = f"**{label}**" if method in OURS else label
        lines.append(f"| {' | '.join((name, *taus, *speed_cells(method)))} |")
    noise = ("baseline, second server", *["1"] * 4, *speed_cells(NOISE))
    lines.append(f"| {' | '.join(noise)} |")
    return "\n".join(lines) + "\n"


def speed_cells(method: str) -> list[str]:
    """Return the speedup of whole requests with its interval, at temperature 0 and 1."""
    if method not in MEASURED:
        return ["", ""]
    cells = rf"^\| [01] \| {MEASURED[method]} over baseline \| (\S+ \([^;]+);"
    return [f"{cell})" for cell in re.findall(cells, PAIRED.read_text(), re.MULTILINE)]


def with_table(readme: str, content: Row) -> str:
    """Return README's text with its table of results rewritten."""
    start, rest = readme.split(TABLE_BEGIN)
    _, end = rest.split(TABLE_END)
    return start + TABLE_BEGIN + table(content) + "\n" + TABLE_END + end


def digest(content: Row) -> str:
    """Return 16 hex digits of what a figure depends on: this script and the numbers in it."""
    shares = {name: positions(rows_of(content, name, known=True)) for name in METHODS}
    numbers = table(content) + json.dumps(shares)
    return hashlib.sha256(Path(__file__).read_bytes() + numbers.encode()).hexdigest()[:16]


# --- drawing -------------------------------------------------------------------------------------


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure in units of a tenth of an inch, without axes or background."""
    figure = Figure(figsize=(width / 10, height / 10))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(axes: Axes, theme: Theme, x: float, y: float, w: float, h: float, **style: Any) -> None:
    """Draw a rounded box with its lower left corner at (x, y)."""
    style = {"facecolor": theme["panel"], "edgecolor": theme["line"], "linewidth": 1.2} | style
    axes.add_patch(FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0,rounding_size=0.8", **style))


def arrow(axes: Axes, theme: Theme, start: tuple, end: tuple, **style: Any) -> None:
    """Draw an arrow between two points."""
    style = {"color": theme["soft"], "linewidth": 1.4, "mutation_scale": 11} | style
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", shrinkA=0, shrinkB=0, **style))


def note(axes: Axes, theme: Theme, x: float, y: float, text: str, **style: Any) -> None:
    """Write centred text."""
    style = {"ha": "center", "va": "center", "fontsize": 9, "color": theme["ink"]} | style
    axes.text(x, y, text, **style)


def draw_target(axes: Axes, theme: Theme) -> None:
    """Draw the target's layers and the four residual streams that leave the last one."""
    box(axes, theme, 1, 13, 17, 20)
    note(axes, theme, 9.5, 35, "target", fontweight="bold", fontsize=10.5)
    for i in range(3):
        style = {"facecolor": "none", "edgecolor": theme["line"]}
        axes.add_patch(Rectangle((2.4 + 5.1 * i, 14.4), 4, 17.2, **style))
    for i, hue in enumerate(STREAMS):
        axes.plot([1.6, 25.5], [17 + 4 * i] * 2, color=hue, linewidth=2.6, zorder=3)
    text = "hyper-connections: m = 4\nresidual streams per token"
    note(axes, theme, 9.5, 10.6, text, fontsize=8.5)


def draw_gate(axes: Axes, theme: Theme) -> None:
    """Draw the gate that weighs the streams, and the feature that it produces."""
    corners = [(26, 13.5), (26, 32.5), (34, 26.5), (34, 19.5)]
    style = {"facecolor": theme["panel"], "edgecolor": theme["accent"], "linewidth": 1.6}
    axes.add_patch(Polygon(corners, **style))
    for i, hue in enumerate(STREAMS):
        note(axes, theme, 28.2, 17 + 4 * i, f"$a_{i + 1}$", color=hue, fontsize=10)
    note(axes, theme, 32, 23, "$\\Sigma$", fontsize=12)
    note(axes, theme, 30, 35, "gate", fontweight="bold", fontsize=10.5, color=theme["accent"])
    note(axes, theme, 30, 10.6, "initialized from the\ntarget's own hc_head", fontsize=8.5)
    arrow(axes, theme, (34, 23), (38.4, 23))
    axes.add_patch(Rectangle((38.8, 19.4), 2, 7.2, facecolor=theme["accent"], edgecolor="none"))
    note(axes, theme, 40.2, 35, "feature", fontweight="bold", fontsize=10.5)
    note(axes, theme, 41.6, 15.6, "one per token", fontsize=8.5)
    arrow(axes, theme, (41.4, 23), (46.4, 23))


def cell(axes: Axes, theme: Theme, x: float, y: float, text: str, edge: str) -> None:
    """Draw one token of a block."""
    box(axes, theme, x, y, 5, 4.2, edgecolor=edge)
    note(axes, theme, x + 2.5, y + 2.1, text, fontsize=8)


def draw_block(axes: Axes, theme: Theme) -> None:
    """Draw the drafter's block and the part that the target accepts."""
    box(axes, theme, 46.8, 13, 44.2, 20, edgecolor=theme["accent"])
    note(axes, theme, 69, 35, "drafter: one pass", fontweight="bold", fontsize=10.5)
    xs = [49 + 5.8 * i for i in range(DRAFTS + 1)]
    for i, x in enumerate(xs):
        cell(axes, theme, x, 14.8, "mask" if i else "anchor", theme["line"])
        if i:
            arrow(axes, theme, (x + 2.5, 19.4), (x + 2.5, 26.4), linewidth=1)
            cell(axes, theme, x, 26.8, f"$d_{i}$", theme["accent"])
    text = "layers attend to the features\nof all tokens before the anchor"
    label = {"bbox": {"facecolor": theme["panel"], "edgecolor": "none", "pad": 1.5}, "zorder": 4}
    note(axes, theme, xs[3] + 5.4, 22.9, text, fontsize=8.5, color=theme["soft"], **label)
    for i, x in enumerate(xs[1:], 1):
        mark, hue = ("accept", theme["good"]) if i <= 3 else ("reject", theme["soft"])
        if i == 4:
            mark, hue = "bonus", theme["bonus"]
        cell(axes, theme, x, 3.6, mark, hue)
        if i <= 4:
            arrow(axes, theme, (x + 2.5, 12.6), (x + 2.5, 8.3), linewidth=1)
    text = "the target verifies all six in one pass, accepts the\n"
    text += "longest correct prefix and adds one bonus token"
    note(axes, theme, 28.5, 5.6, text, fontsize=9)


def method(theme: Theme, _content: Row) -> Figure:
    """Draw m residual streams, the inherited gate, one feature and a block of six."""
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
    """Draw the five commands from a target to a served drafter."""
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
    """Draw the title, spines and ticks of a plot in the theme's colours."""
    axes.set_facecolor("none")
    axes.set_title(title, color=theme["ink"], fontsize=10, loc="left")
    axes.tick_params(colors=theme["soft"], labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(theme["line"])


def results(theme: Theme, content: Row) -> Figure:
    """Plot the speedup of each method with the noise floor, and acceptance by drafted position.

    The noise floor is the range of the baseline's speedup over itself, over all benchmarks.
    """
    figure = Figure(figsize=(9.2, 3.6))
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    lows, highs = zip(*(row["speedup_range"] for row in rows_of(content, NOISE)), strict=True)
    left.axvspan(min(lows), max(highs), color=theme["line"], alpha=0.3, linewidth=0)
    left.axvline(1, color=theme["line"], linewidth=1)
    for y, (name, (_, hue)) in enumerate(reversed(METHODS.items())):
        rows = rows_of(content, name, known=True)
        speedups = [row["speedup"] for row in rows]
        left.barh(y, sum(speedups) / len(speedups), height=0.55, color=hue, alpha=0.85)
        left.plot(speedups, [y] * len(speedups), "o", markersize=3.5, color=theme["ink"])
        left.text(0.05, y, f"τ {tau(rows):.2f}", va="center", fontsize=9, color="white")
    left.set_yticks(range(len(METHODS)), [label for label, _ in reversed(METHODS.values())])
    left.set(xlim=(0, None), xticks=(0, 1, 2, 3))
    dress(left, theme, "Speedup over the baseline, in-distribution, T = 0")
    for name, (label, hue) in METHODS.items():
        shares = positions(rows_of(content, name, known=True))
        steps = range(1, len(shares) + 1)
        right.plot(steps, shares, "o-", color=hue, linewidth=2, markersize=4, label=label)
    right.set(xticks=range(1, DRAFTS + 1), ylim=(0, 1), xlim=(0.7, DRAFTS + 0.3))
    right.legend(frameon=False, fontsize=8.5, labelcolor=theme["ink"])
    dress(right, theme, "Acceptance by drafted position")
    figure.tight_layout(w_pad=2)
    return figure


FIGURES = {"method": method, "training": training, "results": results}


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
