"""The table and the plot of ``tests.gpu.bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CONTENDERS = ("triton", "eager", "compile", "fused_hc_head", "fused_hc_head+norms", "fc", "copy")


def table(rows: list[dict[str, Any]]) -> str:
    """Median microseconds of every contender, TB/s of reducer and copy, and the error."""
    names = [name for name in CONTENDERS if any(name in row for row in rows)]
    head = f"{'m x d':>9} {'tokens':>7}" + "".join(f"{n:>{max(10, len(n) + 2)}}" for n in names)
    lines = [f"{head}  | TB/s  copy TB/s  share  error"]
    for row in rows:
        cells = "".join(
            f"{row[n]['median_us']:>{max(10, len(n) + 2)}.1f}"
            if n in row
            else " " * max(10, len(n))
            for n in names
        )
        size = f"{row['m']} x {row['d']}"
        lines.append(
            f"{size:>9} {row['tokens']:>7}{cells}  | {row['triton']['tb_per_s']:>4.2f}"
            f" {row['copy']['tb_per_s']:>10.2f} {row['share_of_copy']:>6.0%}"
            f"  {row['relative_error']:.1e}"
        )
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Achieved TB/s against the number of tokens, one panel for each size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = sorted({(row["m"], row["d"]) for row in rows})
    figure, axes = pyplot.subplots(1, len(sizes), figsize=(6 * len(sizes), 4.5), squeeze=False)
    for axis, (m, d) in zip(axes[0], sizes, strict=True):
        shown = [row for row in rows if (row["m"], row["d"]) == (m, d)]
        for name in CONTENDERS:
            points = [(row["tokens"], row[name]["tb_per_s"]) for row in shown if name in row]
            if points:
                style = "--" if name == "copy" else "-"
                axis.plot(*zip(*points, strict=True), style, marker="o", label=name)
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=f"m = {m}, d = {d}, bf16")
        axis.set_ylabel("TB/s at minimum traffic")
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
