"""The charts of reports: matplotlib figures as SVG text, the same bytes for the same numbers.

Text and axes are drawn in the page's own text colour, so that a chart is readable on light and
dark pages. Colours are of a palette that people with any colour blindness can tell apart (Okabe
and Ito), one fixed for each method, and each method has a marker of its own.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from eval.comparison import Row, pooled_positions, rows_in, settings_of
from eval.errors import EvalError
from eval.findings import mean_of
from eval.methods import BASELINE, drafting, label

# Colour and marker of each method.
STYLES = {
    "target": ("#8c8c8c", "o"),
    "mtp3": ("#e69f00", "^"),
    "mtp6": ("#d55e00", "v"),
    "dflash6": ("#009e73", "s"),
    "dspark6": ("#882255", "p"),
    "dflash2": ("#44aa99", "*"),
    "hyperdflash6": ("#0072b2", "D"),
    "hyperdflash2": ("#332288", "d"),
    "hyperdflash-adaptive": ("#ee3377", "H"),
    "dspark": ("#cc79a7", "P"),
    "ngram": ("#56b4e9", "X"),
}
OTHERS = (("#b8860b", "<"), ("#7b3294", ">"), ("#5aae61", "h"))
# A colour that nothing else has; the SVG says currentColor in its place.
_TEXT = "#010203"
_THEME = (
    "<style>svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}"
    "text{font-family:system-ui,sans-serif!important}</style>"
)


def style(method: str) -> tuple[str, str]:
    """A method's colour and marker; one that has none takes the same of a few every time."""
    if method in STYLES:
        return STYLES[method]
    return OTHERS[sum(method.encode()) % len(OTHERS)]


@contextmanager
def _matplotlib(salt: str):
    """Pyplot with our settings, none of which outlives the block."""
    try:
        import matplotlib
    except ImportError as error:
        raise EvalError(
            "charts need matplotlib: pip install 'sglang-hyperdflash[eval]'."
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings: dict[str, Any] = {
        "svg.hashsalt": salt,
        "svg.fonttype": "none",
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "legend.frameon": False,
        "grid.alpha": 0.25,
        **{f"{name}.color": _TEXT for name in ("text", "xtick", "ytick", "grid")},
        **{f"axes.{name}": _TEXT for name in ("edgecolor", "labelcolor", "titlecolor")},
    }
    with matplotlib.rc_context(settings):
        yield pyplot


def draw(name: str, title: str, paint: Callable[[Any], None], panels: int = 1) -> str:
    """An SVG of one figure.

    Args:
        name: makes the ids inside unique on a page. title: for those who cannot see it.
        paint: gets the list of ``panels`` axes.
    """
    with _matplotlib(name) as pyplot:
        size = (5.2 * panels, 3.6)
        figure, axes = pyplot.subplots(
            1, panels, figsize=size, squeeze=False, sharey=True, layout="constrained"
        )
        paint(list(axes[0]))
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :].replace(_TEXT, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(
        r' id="(?:figure|axes|patch|line2d|text|matplotlib|legend|xtick|ytick)[^"]*"', "", svg
    )
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s+", " ", svg).replace("> <", ">\n<").strip() + "\n"
    head, body = svg.split(">", 1)
    head = re.sub(r' (?:width|height)="[^"]*pt"', "", head)
    escaped = title.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    return f'{head} role="img" aria-label="{escaped}">{_THEME}{body}'


def _plot(axis, method: str, points: Sequence[tuple[float, float]], line: str = "-") -> None:
    colour, marker = style(method)
    xs, ys = zip(*points, strict=True)
    axis.plot(xs, ys, line, color=colour, marker=marker, markersize=6, label=label(method))


def _finish(axis, x: str, y: str | None) -> None:
    axis.set_xlabel(x)
    if y:
        axis.set_ylabel(y)
    axis.grid(True)


def acceptance_chart(rows: Sequence[Row]) -> str:
    """The paper's Figure 1, a panel for each setting; empty without drafts."""
    methods = drafting(r["method"] for r in rows)
    panels = []
    for setting in settings_of(rows):
        shares = {m: pooled_positions(rows_in(rows, setting, m)) for m in methods}
        shares = {m: values for m, values in shares.items() if values}
        if shares:
            panels.append((setting, shares))
    if not panels:
        return ""

    def paint(axes) -> None:
        for axis, (setting, shares) in zip(axes, panels, strict=True):
            for method, values in shares.items():
                _plot(axis, method, list(enumerate(values, 1)))
            axis.set(ylim=(0, 1), xticks=range(1, 1 + max(map(len, shares.values()))))
            words = f"temperature {setting['temperature']:g}, thinking {setting['thinking']}"
            axis.set_title(f"{words}, concurrency {setting['concurrency']}")
            _finish(axis, "drafted position", None)
        axes[0].set_ylabel("share of rounds that accept it")
        axes[0].legend(fontsize=9)

    return draw("acceptance", "Acceptance by drafted position", paint, len(panels))


def cost_chart(rows: Sequence[Row]) -> str:
    """tau against round cost at concurrency 1, a panel a temperature; empty without points."""
    panels = []
    for temperature in sorted({r["temperature"] for r in rows}):
        where = {"concurrency": 1, "temperature": temperature}
        points = {
            m: (mean_of(rows, m, "round_cost", **where), mean_of(rows, m, "tau", **where))
            for m in drafting(r["method"] for r in rows)
        }
        points = {m: p for m, p in points.items() if None not in p}
        if points:
            panels.append((temperature, points))
    if not panels:
        return ""

    def paint(axes) -> None:
        for axis, (temperature, points) in zip(axes, panels, strict=True):
            for method, point in points.items():
                _plot(axis, method, [point], "")
            low, high = axis.get_xlim()
            ends = (max(0.0, low), high)
            axis.plot(ends, ends, "--", color=_TEXT, linewidth=0.8, alpha=0.6)
            axis.annotate("speedup 1", (high, high), ha="right", va="bottom", fontsize=8)
            axis.set_title(f"temperature {temperature:g}")
            _finish(axis, "round cost, target-only steps", None)
        axes[0].set_ylabel("τ, mean of cells")
        axes[0].legend(fontsize=9)

    return draw("cost", "Accept length against round cost", paint, len(panels))


def throughput_chart(rows: Sequence[Row], serving: Mapping[str, Any] | None) -> str:
    """Output tokens a second by concurrency; empty with fewer than two levels."""
    if serving:
        series = {
            m: [(e["concurrency"], e["tokens_per_s"]) for e in entries]
            for m, entries in serving["concurrency"].items()
        }
    else:
        levels = sorted({r["concurrency"] for r in rows})
        series = {}
        for method in [BASELINE, *drafting(r["method"] for r in rows)]:
            found = [(c, mean_of(rows, method, "tokens_per_s", concurrency=c)) for c in levels]
            series[method] = [(c, v) for c, v in found if v is not None]
    series = {m: sorted(points) for m, points in series.items() if points}
    levels = sorted({x for points in series.values() for x, _ in points})
    if len(levels) < 2:
        return ""

    def paint(axes) -> None:
        for method, points in series.items():
            _plot(axes[0], method, points)
        axes[0].set_xscale("log", base=2)
        axes[0].set_xticks(levels, [f"{level:g}" for level in levels])
        axes[0].set_ylim(bottom=0)
        _finish(axes[0], "concurrency", "output tokens a second")
        axes[0].legend(fontsize=9)

    return draw("throughput", "Throughput against concurrency", paint)
