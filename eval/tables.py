"""Rows arranged as the paper's Tables 2 and 3, for Markdown and HTML alike."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from eval.methods import BASELINE, NOISE

Row = dict[str, Any]

GROUPS = {
    "MATH": ("gsm8k", "math500", "aime25"),
    "CODE": ("humaneval", "mbpp", "livecodebench"),
    "CHAT": ("mt-bench",),
}
LABELS = {
    "target": "target only",
    NOISE: "target only, again (noise floor)",
    "mtp3": "MTP (3)",
    "mtp6": "MTP (6)",
    "dflash6": "Vanilla DFlash (6)",
    "hyperdflash6": "HyperDFlash (6)",
    "dspark": "DSpark",
    "ngram": "n-gram",
}
PAPER = Path(__file__).resolve().parent / "paper_v4_flash.json"


@dataclass(frozen=True)
class Table:
    """One method a line; ``heads`` are without the method's own column."""

    title: str
    heads: tuple[str, ...]
    lines: tuple[tuple[str, tuple[str, ...]], ...]
    note: str = ""


def benchmark_heads(benchmarks: Sequence[str]) -> tuple[str, ...]:
    """Two columns (speedup, tau) a benchmark and in the average, as in the paper."""
    names = (*benchmarks, "average")
    return tuple(f"{name} {column}" for name in names for column in ("speedup", "τ"))


def ordered(benchmarks: Iterable[str]) -> tuple[str, ...]:
    """The paper's order, then the others'."""
    known = [name for group in GROUPS.values() for name in group]
    names = set(benchmarks)
    return (*(n for n in known if n in names), *sorted(names - set(known)))


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _line(rows: Sequence[Row], benchmarks: Sequence[str]) -> tuple[str, ...]:
    by_name = {row["benchmark"]: row for row in rows}
    cells: list[str] = []
    for name in benchmarks:
        row = by_name.get(name, {})
        if row.get("error"):
            cells += ["failed", "failed"]
            continue
        cells += [_number(row.get("speedup"), ".2f"), _number(row.get("tau"), ".2f")]
    chosen = [by_name[n] for n in benchmarks if n in by_name and not by_name[n].get("error")]
    for column in ("speedup", "tau"):
        values = [row[column] for row in chosen if row.get(column) is not None]
        whole = len(values) == len(benchmarks)
        cells.append(_number(mean(values), ".2f") if values and whole else "-")
    return tuple(cells)


def main_tables(rows: Sequence[Row]) -> list[Table]:
    """One table for each thinking mode, temperature and concurrency."""
    tables = []
    settings = dict.fromkeys((r["thinking"], r["temperature"], r["concurrency"]) for r in rows)
    for thinking, temperature, concurrency in settings:
        part = [
            r
            for r in rows
            if (r["thinking"], r["temperature"], r["concurrency"])
            == (thinking, temperature, concurrency)
        ]
        benchmarks = ordered(r["benchmark"] for r in part)
        methods = [m for m in dict.fromkeys(r["method"] for r in part) if m != BASELINE]
        lines = tuple(
            (LABELS.get(m, m), _line([r for r in part if r["method"] == m], benchmarks))
            for m in methods
        )
        title = f"Thinking {thinking}, temperature {temperature:g}, concurrency {concurrency}"
        tables.append(Table(title, benchmark_heads(benchmarks), lines))
    return tables


def paper_tables(rows: Sequence[Row]) -> list[Table]:
    """The paper's own numbers for the settings that were measured; another model and machine."""
    paper = json.loads(PAPER.read_text())
    seen = {(r["thinking"], float(r["temperature"])) for r in rows}
    tables = []
    for thinking, temperature in sorted(seen):
        part = [
            r for r in paper["rows"] if (r["thinking"], r["temperature"]) == (thinking, temperature)
        ]
        if not part:
            continue
        benchmarks = ordered({r["benchmark"] for r in part} - {"average"})
        lines = []
        for method in dict.fromkeys(r["method"] for r in part):
            own = {r["benchmark"]: r for r in part if r["method"] == method}
            cells: list[str] = []
            for name in (*benchmarks, "average"):
                cells += [f"{own[name]['speedup']:.2f}", f"{own[name]['tau']:.2f}"]
            lines.append((LABELS[method], tuple(cells)))
        title = f"The paper's: DeepSeek-V4-Flash, thinking {thinking}, temperature {temperature:g}"
        tables.append(Table(title, benchmark_heads(benchmarks), tuple(lines), paper["source"]))
    return tables
