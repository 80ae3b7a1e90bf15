"""Line charts as SVG text, the same bytes for the same numbers.

Colours are of a palette that people with any colour blindness can tell apart (Okabe and Ito), one
fixed for each method, and each method has a marker of its own.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from eval.errors import EvalError
from eval.methods import label

# Colour and marker of each method.
STYLES = {
    "baseline": ("#8c8c8c", "o"),
    "mtp3": ("#e69f00", "^"),
    "mtp6": ("#d55e00", "v"),
    "dflash6": ("#009e73", "s"),
    "dspark-style": ("#882255", "p"),
    "dflash2-style": ("#44aa99", "*"),
    "hyperdflash6": ("#0072b2", "D"),
    "hyperdflash2": ("#332288", "d"),
    "hyperdflash-copies": ("#66a5d2", "8"),
    "hyperdflash2-copies": ("#8877cc", "1"),
    "hyperdflash-adaptive": ("#ee3377", "H"),
    "dspark": ("#cc79a7", "P"),
    "ngram": ("#56b4e9", "X"),
    "full width": ("#b8860b", "<"),
    "adaptive width": ("#7b3294", ">"),
    "untrained": ("#5aae61", "h"),
}
Points = Sequence[tuple[float, float]]


def line_chart(
    panels: Mapping[str, Mapping[str, Points]], across: str, up: str, log: bool = False
) -> str:
    """An SVG with a panel for each title and a line for each method.

    Args:
        panels: title -> method -> points. across, up: names of the axes. log: of base 2, across.

    Raises:
        EvalError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EvalError(
            "charts need matplotlib: pip install 'sglang-hyperdflash[eval]'."
        ) from error
    settings = {"svg.hashsalt": up, "svg.fonttype": "none", "font.family": "DejaVu Sans"}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(5.2 * len(panels), 3.6), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axis, (title, lines) in zip(axes, panels.items(), strict=True):
            for method, points in lines.items():
                colour, marker = STYLES[method]
                axis.plot(
                    *zip(*points, strict=True), color=colour, marker=marker, label=label(method)
                )
            xs = sorted({x for points in lines.values() for x, _ in points})
            if log:
                axis.set_xscale("log", base=2)
            axis.set_xticks(xs, [f"{x:g}" for x in xs])
            axis.set(title=title, xlabel=across, ylim=(0, None))
            axis.grid(alpha=0.25)
        axes[0].set_ylabel(up)
        axes[0].legend(fontsize=8, frameon=False)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
