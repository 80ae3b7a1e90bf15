"""The table of ``dependency_study.py``: served tau at each temperature, paired by seed."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from sglang_hyperdflash.tools.atomic import write_json, write_text
from sglang_hyperdflash.tools.provenance import provenance

BASELINE = "hyperdflash"
Runs = dict[str, dict[int, dict[str, Any]]]


def tau(run: dict[str, Any], temperature: str) -> float:
    """Mean over the kinds of text, each weighing the same."""
    return mean(kind["tau"] for kind in run["served"][temperature].values())


def ratio(ours: dict[int, Any], theirs: dict[int, Any], temperature: str) -> str:
    """tau over the baseline's with the same seeds: mean and range."""
    found = [
        tau(ours[s], temperature) / tau(theirs[s], temperature)
        for s in sorted(set(ours) & set(theirs))
    ]
    if not found:
        return "no common seed"
    if len(found) == 1:
        return f"{found[0]:.2f}x"
    return f"{mean(found):.2f}x ({min(found):.2f} to {max(found):.2f})"


def write_report(runs: Runs, nats: dict[str, dict[str, float]], out: Path) -> None:
    """``results.json`` and ``report.md`` in the folder ``out``."""
    temperatures = list(nats)
    out.mkdir(parents=True, exist_ok=True)
    write_json(
        out / "results.json", {"runs": runs, "nats": nats, "provenance": provenance()}, indent=1
    )
    titles = [f"tau T {t}" for t in temperatures] + [
        f"over {BASELINE}, T {t}" for t in temperatures
    ]
    lines = ["| variant | seeds | " + " | ".join([*titles, "identical at T 0"]) + " |"]
    lines.append("|---" * (len(titles) + 3) + "|")
    for name, seeds in runs.items():
        taus = [f"{mean(tau(run, t) for run in seeds.values()):.2f}" for t in temperatures]
        ratios = [ratio(seeds, runs.get(BASELINE, {}), t) for t in temperatures]
        same = sum(run["identical"] for run in seeds.values())
        of = sum(run["answers"] for run in seeds.values())
        lines.append(f"| {name} | {len(seeds)} | {' | '.join(taus + ratios)} | {same} of {of} |")
    text = ", ".join(
        f"T {t}: " + ", ".join(f"{kind} {value:.2f}" for kind, value in kinds.items())
        for t, kinds in nats.items()
    )
    lines += ["", f"Mean surprise of target-only's tokens, nats: {text}.", ""]
    title = "# The dependency head and its parts, served\n\n"
    write_text(out / "report.md", title + "\n".join(lines))
