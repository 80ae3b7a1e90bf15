"""``report.md`` and ``report.html`` from a run's rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.aggregate import collect
from eval.findings import goals, identity_line, noise_line, positions
from eval.methods import BASELINE, NOISE
from eval.page import write_page
from eval.tables import LABELS, Row, Table, main_tables, paper_tables


def markdown(table: Table) -> list[str]:
    """A table's lines."""
    lines = [f"### {table.title}", ""]
    lines += ["| Method | " + " | ".join(table.heads) + " |"]
    lines += ["|---" * (len(table.heads) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(cells) + " |" for name, cells in table.lines]
    return [*lines, *(["", table.note] if table.note else []), ""]


def spread_table(rows: Sequence[Row]) -> list[str]:
    """Every row with its intervals."""
    lines = [
        "| method | benchmark | T | thinking | c | τ (95 %) | speedup (rounds) | round cost "
        "| tokens/s | identical |",
        "|---" * 10 + "|",
    ]
    for r in rows:
        head = f"| {LABELS.get(r['method'], r['method'])} | {r['benchmark']} "
        head += f"| {r['temperature']:g} | {r['thinking']} | {r['concurrency']} "
        if r.get("tokens_per_s") is None:
            lines.append(head + f"| {r.get('error', 'not run')[:80]} | | | | |")
            continue
        tau = f"{r['tau']:.2f}"
        if r.get("tau_interval"):
            tau += " ({:.2f} to {:.2f})".format(*r["tau_interval"])
        speed = "-" if r.get("speedup") is None else f"{r['speedup']:.2f}"
        if r.get("speedup_range"):
            speed += " ({:.2f} to {:.2f})".format(*r["speedup_range"])
        cost = "-" if r.get("round_cost") is None else f"{r['round_cost']:.2f}"
        same = "-"
        if r.get("compared_answers"):
            same = f"{r['identical_answers']}/{r['compared_answers']}"
        lines.append(head + f"| {tau} | {speed} | {cost} | {r['tokens_per_s']:.0f} | {same} |")
    return lines


def acceptance_table(rows: Sequence[Row]) -> list[str]:
    """Figure 1 as numbers: mean acceptance by drafted position, for each method."""
    methods = [m for m in dict.fromkeys(r["method"] for r in rows) if m not in (BASELINE, NOISE)]
    lines = ["| method | " + " | ".join(map(str, range(1, 7))) + " |", "|---" * 7 + "|"]
    for method in methods:
        means = positions(rows, method)
        cells = [f"{v:.2f}" for v in means] + ["-"] * (6 - len(means))
        lines.append(f"| {LABELS.get(method, method)} | " + " | ".join(cells) + " |")
    return lines


def write(out: Path) -> dict[str, Any]:
    """Collect a run and write ``results.json``, ``report.md`` and ``report.html`` beside it."""
    content = collect(out)
    study = out / "serving.json"
    content["serving"] = json.loads(study.read_text()) if study.is_file() else None
    rows = content["rows"]
    (out / "results.json").write_text(json.dumps(content, indent=1) + "\n")
    (out / "report.md").write_text("\n".join(text(content)) + "\n")
    write_page(content, out / "report.html")
    failed = [r for r in rows if r.get("error")]
    for row in failed:
        print(f"incomplete: {row['method']} on {row['benchmark']}: {row['error'][:200]}")
    return content


def text(content: dict[str, Any]) -> list[str]:
    """The whole of ``report.md``."""
    rows, run = content["rows"], content["run"]
    lines = ["# Speculative decoding methods side by side", ""]
    lines += [
        f"Medians over {run['rounds']} interleaved rounds; speedup is output tokens a second of "
        "whole requests, prefill included, against target-only in the same round. τ counts the "
        "bonus token. Round cost is τ / speedup, in target-only steps.",
        "",
        identity_line(rows),
        "",
    ]
    if noise := noise_line(rows):
        lines += [noise, ""]
    lines += ["## The goal", ""]
    lines += [f"- HyperDFlash against {rival}: {words}." for rival, words in goals(rows)]
    lines += ["", "## Main results", ""]
    for table in main_tables(rows):
        lines += markdown(table)
    lines += ["## The paper's own numbers, for comparison only", ""]
    for table in paper_tables(rows):
        lines += markdown(table)
    lines += ["## Acceptance by drafted position (the paper's Figure 1)", ""]
    lines += [*acceptance_table(rows), "", "## Every cell", "", *spread_table(rows), ""]
    if content.get("serving"):
        from eval.serving_study import study_lines

        lines += study_lines(content["serving"])
    lines += ["## Provenance", "", "```", json.dumps(content["provenance"], indent=1), "```"]
    return lines
