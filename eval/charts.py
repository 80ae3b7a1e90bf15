"""Line charts as SVG text, the same bytes for the same numbers.

The background is transparent. The colours are near those of Okabe and Ito's palette, which people
with any colour blindness can tell apart, and read on white and on black. Every method has its own
colour and marker.
"""

import io
from collections.abc import Mapping, Sequence

from eval.errors import EvalError
from eval.methods import label

STYLES = {  # colour and marker
    "baseline": ("#8c8c8c", "o"),
    "mtp3": ("#b57d00", "^"),
    "mtp6": ("#d55e00", "v"),
    "dflash6": ("#009e73", "s"),
    "dspark-style": ("#b04a7e", "p"),
    "dflash2-style": ("#84961f", "*"),
    "hyperdflash6": ("#0072b2", "D"),
    "hyperdflash2": ("#6b5bd0", "d"),
    "hyperdflash-copies": ("#4a8ec2", "8"),
    "hyperdflash2-copies": ("#8877cc", "1"),
    "hyperdflash-adaptive": ("#ee3377", "H"),
    "dspark": ("#cc79a7", "P"),
    "ngram": ("#2f93cc", "X"),
    "full width": ("#b8860b", "<"),
    "adaptive width": ("#9b52b8", ">"),
    "untrained": ("#459a4d", "h"),
}
INK = "#767e87"  # of text and axes
Points = Sequence[tuple[float, float]]


def line_chart(
    panels: Mapping[str, Mapping[str, Points]], xlabel: str, ylabel: str, log: bool = False
) -> str:
    """An SVG with a panel for each title of ``panels`` and a line for each of its methods.

    ``log`` makes the x axis logarithmic, of base 2. Raises ``EvalError`` without matplotlib.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EvalError(
            "charts need matplotlib: pip install 'sglang-hyperdflash[eval]'."
        ) from error
    settings = {"svg.hashsalt": ylabel, "svg.fonttype": "none", "font.family": "sans-serif"}
    settings |= {"font.sans-serif": ["DejaVu Sans"], "text.color": INK, "axes.labelcolor": INK}
    settings |= {"axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(5.2 * len(panels), 3.6), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axis, (title, lines) in zip(axes, panels.items(), strict=True):
            for method, points in lines.items():
                colour, marker = STYLES.get(method, (None, "o"))
                xs, ys = zip(*points, strict=True)
                axis.plot(xs, ys, color=colour, marker=marker, label=label(method))
            ticks = sorted({x for points in lines.values() for x, _ in points})
            if log:
                axis.set_xscale("log", base=2)
            axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
            axis.set(title=title, xlabel=xlabel, ylim=(0, None))
            axis.grid(alpha=0.25)
        axes[0].set_ylabel(ylabel)
        axes[0].legend(fontsize=8, frameon=False)
        svg = io.StringIO()
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    return svg.getvalue()
