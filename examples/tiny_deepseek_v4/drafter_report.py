"""The tables and the plot of ``drafter_study.py``: served tau at each temperature, by seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from sglang_hyperdflash.tools.atomic import write_json, write_text
from sglang_hyperdflash.tools.provenance import provenance

PAPERS, OURS, ARGMAX = "hyperdflash", "hyperdflash2", "argmax drafts"
# Title -> (what its rows are compared with, its rows).
AXES = {
    "The method and its rivals": (PAPERS, (OURS, PAPERS, "dspark", "dflash2", "dflash")),
    "Against the paper's drafter, drafting as SGLang's DFLASH does": (
        ARGMAX,
        (OURS, PAPERS, ARGMAX),
    ),
    "The rivals against HyperDFlash-2": (OURS, (OURS, "dspark", "dflash2", "dflash")),
    "Depth of the layers that DFlash captures": (
        PAPERS,
        (PAPERS, "dflash 0 1 2", "dflash", "dflash 2 4 6", "dflash 4 5 6", "dflash 5 6 7"),
    ),
    "Parts of the paper's drafter": (
        PAPERS,
        (PAPERS, "fc", "no KL"),
    ),
    "Parts of HyperDFlash-2": (
        OURS,
        (
            *(OURS, PAPERS, "acceptance", "half acceptance", "quarter acceptance"),
            *("acceptance no head",),
            *("KL of all drafts", "selector", "product", "product selector"),
            *(
                "no CE of candidates",
                "head at the drafter's rate",
                "fast head",
                "no gate of the head",
                "causal",
            ),
            *("layers 1 3 5", "late layers"),
            *("rank 64", "K = 16", "K = 256", "t = 0", "t = 0.5", "t = 1", "block 5", "block 9"),
        ),
    ),
}
NAMES = {
    "dflash": "dflash 1 3 5, SGLang's choice",
    ARGMAX: "hyperdflash, argmax drafts at every temperature",
    "t = 0": "t = 0, argmax drafts at every temperature",
}
# Resamples of an interval.
DRAWS = 1000
Runs = dict[str, dict[int, dict[str, Any]]]


def tau(run: dict[str, Any], temperature: str) -> float:
    """Mean over the kinds of text, each weighing the same."""
    return mean(kind["tau"] for kind in run["served"][temperature].values())


def repeats_of(seeds: dict[int, dict[str, Any]]) -> int:
    """How often a variant's sampled prompts were asked, with every seed."""
    found = {run.get("setting", {}).get("repeats", 1) for run in seeds.values()}
    if len(found) > 1:
        raise SystemExit(f"seeds of a variant were asked {sorted(found)} times: serve them alike.")
    return found.pop()


def of_all_rounds(run: dict[str, Any], temperature: str) -> float:
    """tau over all rounds: a kind of text weighs by how many it took."""
    rounds, drafts = np.sum([c.sum(0) for c in counts_of([run], temperature)], 0)
    return 1 + drafts / rounds


def counts_of(runs: Sequence[dict[str, Any]], temperature: str) -> list[np.ndarray]:
    """By kind of text, rounds and accepted drafts of each prompt, all seeds: ``[prompts, 2]``."""
    kinds = runs[0]["served"][temperature]
    return [
        np.sum([run["served"][temperature][kind]["prompts"] for run in runs], 0) for kind in kinds
    ]


def drawn(counts: Sequence[np.ndarray], pooled: bool) -> np.ndarray:
    """tau of prompts drawn with replacement inside each kind, alike for every drafter."""
    random = np.random.default_rng(0)
    sums = [c[random.integers(len(c), size=(DRAWS, len(c)))].sum(1) for c in counts]
    if pooled:
        rounds, drafts = np.sum(sums, 0).T
        return 1 + drafts / rounds
    return np.mean([1 + each[:, 1] / each[:, 0] for each in sums], 0)


def ratio(ours: dict[int, Any], theirs: dict[int, Any], temperature: str, pooled: bool) -> str:
    """tau over the baseline's with the same seeds: mean, interval over prompts, each."""
    seeds = sorted(set(ours) & set(theirs))
    if not seeds:
        return "no common seed"
    measure = of_all_rounds if pooled else tau
    each = [measure(ours[s], temperature) / measure(theirs[s], temperature) for s in seeds]
    both = [drawn(counts_of([x[s] for s in seeds], temperature), pooled) for x in (ours, theirs)]
    low, high = np.percentile(both[0] / both[1], (2.5, 97.5))
    spread = f"; {', '.join(f'{one:.2f}' for one in each)}" if len(each) > 1 else ""
    return f"{mean(each):.2f}x ({low:.2f} to {high:.2f}{spread})"


def table(title: str, runs: Runs, temperatures: list[str], pooled: bool) -> list[str]:
    """One axis: tau of every variant that was served, and its ratio to the axis' baseline.

    Nothing of an axis of which no two were served, or not its baseline.
    """
    baseline, names = AXES[title]
    names = tuple(name for name in names if runs.get(name))
    if baseline not in names or len(names) < 2:
        return []
    measure = of_all_rounds if pooled else tau
    titles = [f"tau T {t}" for t in temperatures]
    first, last = temperatures[0], temperatures[-1]
    titles.append(f"T {last} of T {first}")
    titles += [f"over {baseline}, T {t}" for t in temperatures]
    lines = [f"## {title}{', over all rounds' if pooled else ''}", ""]
    lines.append(f"| variant | seeds | {' | '.join(titles)} |")
    lines.append("|---" * (len(titles) + 2) + "|")
    for name in names:
        seeds = runs[name]
        cells = [f"{mean(measure(run, t) for run in seeds.values()):.2f}" for t in temperatures]
        kept = (measure(run, last) / measure(run, first) for run in seeds.values())
        cells.append(f"{mean(kept):.2f}")
        if name == baseline:
            cells += ["1"] * len(temperatures)
        else:
            cells += [ratio(seeds, runs.get(baseline, {}), t, pooled) for t in temperatures]
        lines.append(f"| {NAMES.get(name, name)} | {len(seeds)} | {' | '.join(cells)} |")
    return [*lines, ""]


def plot(runs: Runs, temperature: str, path: Path) -> None:
    """A dot for every drafter, a bar for the mean of each variant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name, seeds in runs.items() if seeds][::-1]
    figure, axes = pyplot.subplots(figsize=(7, 0.3 * len(names) + 1.2), layout="constrained")
    for row, name in enumerate(names):
        taus = [tau(run, temperature) for run in runs[name].values()]
        colour = "tab:blue" if name in (PAPERS, OURS) else "tab:gray"
        axes.plot(taus, [row] * len(taus), "o", color=colour, alpha=0.6)
        axes.plot([mean(taus)], [row], "|", color=colour, markersize=14, markeredgewidth=2.5)
    axes.set_yticks(range(len(names)), [NAMES.get(name, name) for name in names])
    axes.set_xlabel(f"served tau at temperature {temperature}; a dot a seed, a bar the mean")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def write_report(runs: Runs, nats: dict[str, dict[str, float]], out: Path) -> None:
    """``results.json``, ``report.md`` and ``tau.svg`` in the folder ``out``.

    Args:
        runs: variant -> seed -> ``{"served", "trained", "identical", "answers"}``.
        nats: temperature -> kind of text -> surprise of target-only's tokens.
    """
    if not any(runs.values()):
        raise SystemExit("no drafter was served yet: run train and serve first.")
    temperatures = list(nats)
    out.mkdir(parents=True, exist_ok=True)
    every = [run for seeds in runs.values() for run in seeds.values()]
    write_json(
        out / "results.json", {"runs": runs, "nats": nats, "provenance": provenance()}, indent=1
    )
    plot(runs, temperatures[0], out / "tau.svg")
    steps = sorted({run["trained"]["step"] for run in every})
    kinds = len(every[0]["served"][temperatures[0]])
    same, of = (sum(run[key] for run in every) for key in ("identical", "answers"))
    repeats = sorted({repeats_of(seeds) for seeds in runs.values() if seeds})
    asked = " or ".join("once" if n == 1 else f"{n} times" for n in repeats)
    text = ", ".join(
        f"T {t}: " + ", ".join(f"{kind} {value:.2f}" for kind, value in kinds.items())
        for t, kinds in nats.items()
    )
    lines = [
        "# Drafters that differ in one choice, served",
        "",
        f"{len(every)} servers of drafters, {', '.join(map(str, steps))} steps each on the same "
        f"samples; tau on {kinds} kinds of text. The first table of each question weighs the kinds "
        "alike, the second by their rounds; a ratio is the mean over seeds, in brackets a 95 % "
        f"interval over prompts and each seed's own. {same} of {of} greedy answers were "
        f"token for token target-only's. Sampled prompts were asked {asked}.",
        "",
        f"Mean surprise of target-only's tokens, nats: {text}.",
        "",
        "![served tau of every drafter](tau.svg)",
        "",
    ]
    for title in AXES:
        for pooled in (False, True):
            lines += table(title, runs, temperatures, pooled)
    write_text(out / "report.md", "\n".join(lines))
