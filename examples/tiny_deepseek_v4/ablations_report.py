"""The ablation's table, plot and raw numbers."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

from sglang_hyperdflash.tools.provenance import provenance

BASELINE = "baseline"
# Axis -> (variant, what it is on this axis).
AXES = {
    "Reducer of the pre-collapse residual": (
        (BASELINE, "gate inherited from hc_head"),
        ("random gate", "gate at random"),
        ("fc", "generic fc"),
    ),
    "KL teacher": (
        (BASELINE, "gated collapse"),
        ("mean teacher", "mean of the paths (the paper's)"),
        ("no KL", "no KL"),
    ),
    "Per-path norm": ((BASELINE, "on"), ("no path norm", "off")),
    "Source": (
        (BASELINE, "pre-collapse residual, inherited gate"),
        ("fc", "pre-collapse residual, fc"),
        ("layers 1, 3, 5, fc", "means after layers 1, 3 and 5, fc (DFlash's source)"),
    ),
}


def _taus(runs: list[dict], part: str = "served") -> dict[int, float]:
    return {run["seed"]: run[part]["tau"] for run in runs}


def _kind(runs: list[dict], kind: str) -> float:
    return mean(run["served"]["held_out"][kind]["tau"] for run in runs)


def _listed(values) -> str:
    return ", ".join(str(value) for value in sorted(set(values)))


def difference(runs: list[dict], baseline: list[dict]) -> str:
    """The paired difference from the baseline in words: mean, range, and whether seeds agree."""
    ours, theirs = _taus(runs), _taus(baseline)
    deltas = [ours[seed] - theirs[seed] for seed in sorted(set(ours) & set(theirs))]
    if not deltas:
        return "no common seed"
    text = f"{mean(deltas):+.2f} ({min(deltas):+.2f} to {max(deltas):+.2f})"
    if all(d > 0 for d in deltas):
        return text + ", higher with every seed"
    if all(d < 0 for d in deltas):
        return text + ", lower with every seed"
    return text + ", seeds disagree"


def _table(axis: str, results: dict[str, list[dict]]) -> list[str]:
    lines = [
        f"### {axis}",
        "",
        "| | tau, mean (seeds) | math | code | chat | against the baseline, per seed |",
        "|---|---|---|---|---|---|",
    ]
    for name, label in AXES[axis]:
        runs = results.get(name, [])
        if not runs:
            lines.append(f"| {label} | not run | | | | |")
            continue
        taus = _taus(runs)
        seeds = ", ".join(f"{taus[seed]:.2f}" for seed in sorted(taus))
        kinds = " | ".join(f"{_kind(runs, kind):.2f}" for kind in ("math", "code", "chat"))
        against = "-" if name == BASELINE else difference(runs, results[BASELINE])
        lines.append(f"| {label} | **{mean(taus.values()):.2f}** ({seeds}) | {kinds} | {against} |")
    return [*lines, ""]


def _plot(results: dict[str, list[dict]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name, runs in results.items() if runs][::-1]
    figure, axes = pyplot.subplots(figsize=(7, 0.45 * len(names) + 1.2), layout="constrained")
    for row, name in enumerate(names):
        taus = list(_taus(results[name]).values())
        colour = "tab:blue" if name == BASELINE else "tab:gray"
        axes.plot(taus, [row] * len(taus), "o", color=colour, alpha=0.6)
        axes.plot([mean(taus)], [row], "|", color=colour, markersize=18, markeredgewidth=2.5)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("served tau (accept length, bonus included); a dot a seed, a bar the mean")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def write_report(results: dict[str, list[dict]], out: Path) -> None:
    """Write ``report.md``, ``tau.svg`` and ``results.json`` to ``out``.

    Args:
        results: for each variant its runs, ``{"seed", "served", "trained"}``.
    """
    if not results.get(BASELINE):
        raise SystemExit("the baseline was not served yet: run train and serve first.")
    out.mkdir(parents=True, exist_ok=True)
    every = [run for runs in results.values() for run in runs]
    steps = _listed(run["trained"]["step"] for run in every)
    same = sum(run["served"]["identical"] for run in every)
    answers = sum(run["served"]["answers"] for run in every)
    seeds = _listed(run["seed"] for run in every)
    lines = [
        "# Ablations on the tiny DeepSeek-V4",
        "",
        f"{len(every)} drafters, {steps} steps of 8 samples each, seeds {seeds}; the same samples, "
        "order and layer sizes within a seed. Tau is measured through a real server (fp32, greedy) "
        f"on {every[0]['served']['answers']} held-out prompts, and averaged over the three kinds "
        f"of text. {same} of {answers} answers were token for token target-only's.",
        "",
        "![served tau of every drafter](tau.svg)",
        "",
    ]
    for axis in AXES:
        lines += _table(axis, results)
    (out / "report.md").write_text("\n".join(lines))
    _plot(results, out / "tau.svg")
    content = {"provenance": provenance(), "results": results}
    (out / "results.json").write_text(json.dumps(content, indent=1) + "\n")
    print(f"report: {out / 'report.md'}")
