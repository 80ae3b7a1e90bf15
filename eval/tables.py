"""A run's numbers as tables: the paper's layout, every cell, identity, acceptance, serving."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.comparison import SETTING, Row, pooled_positions, pooled_tau, rows_in, settings_of
from eval.methods import BASELINE, drafting, is_hyperdflash, label

GROUPS = {
    "MATH": ("gsm8k", "math500", "aime25"),
    "CODE": ("humaneval", "mbpp", "livecodebench"),
    "CHAT": ("mt-bench",),
}
PAPER = Path(__file__).resolve().parent / "paper_v4_flash.json"
NOT_MEASURED = "not measured"
SHOWN_DIFFERENCES = 50


@dataclass(frozen=True)
class Line:
    """One line of a table; ``ours`` marks our own method's."""

    cells: tuple[str, ...]
    ours: bool = False


@dataclass(frozen=True)
class Table:
    """``heads`` and every line's cells are of one length; the first column is the name."""

    title: str
    heads: tuple[str, ...]
    lines: tuple[Line, ...]
    note: str = ""


def number(value: float | None, form: str = ".2f") -> str:
    """A number, or that there is none."""
    return NOT_MEASURED if value is None else format(value, form)


def spread(value: float | None, interval: Sequence[float] | None) -> str:
    """A number with its interval in brackets, where there is one."""
    if value is None or interval is None:
        return number(value)
    return f"{value:.2f} ({interval[0]:.2f} to {interval[1]:.2f})"


def setting_words(setting: Mapping[str, Any]) -> str:
    """``Thinking off, temperature 0, concurrency 1``."""
    thinking, temperature, concurrency = (setting[name] for name in SETTING)
    return f"Thinking {thinking}, temperature {temperature:g}, concurrency {concurrency}"


def ordered(benchmarks: Iterable[str]) -> tuple[str, ...]:
    """The paper's order, then the others'."""
    known = [name for group in GROUPS.values() for name in group]
    names = set(benchmarks)
    return (*(n for n in known if n in names), *sorted(names - set(known)))


def _heads(benchmarks: Sequence[str], last: str) -> tuple[str, ...]:
    names = (*benchmarks, last)
    return ("Method", *(f"{name} {column}" for name in names for column in ("speedup", "τ")))


def _main_line(
    method: str, rows: Sequence[Row], benchmarks: Sequence[str], summary: Row | None
) -> Line:
    by_name = {row["benchmark"]: row for row in rows}
    cells = [label(method)]
    for name in benchmarks:
        row = by_name.get(name, {"error": "not run"})
        failed = "not run" if row.get("error") == "not run" else "failed"
        for column in ("speedup", "tau"):
            cells.append(failed if row.get("error") else number(row.get(column)))
    for column in ("mean_speedup", "mean_tau"):
        value = summary and summary[column]
        text = spread(value, summary and summary[f"{column}_interval"])
        cells.append("not whole" if value is None else text)
    return Line(tuple(cells), is_hyperdflash(method))


def main_tables(rows: Sequence[Row], summaries: Sequence[Row]) -> list[Table]:
    """The paper's Tables 2 and 3: one table for each setting."""
    tables = []
    for setting in settings_of(rows):
        part = [r for r in rows if all(r[name] == setting[name] for name in SETTING)]
        benchmarks = ordered(r["benchmark"] for r in part)
        methods = [m for m in dict.fromkeys(r["method"] for r in part) if m != BASELINE]
        own = {s["method"]: s for s in rows_of_setting(summaries, setting)}
        lines = tuple(
            _main_line(m, rows_in(rows, setting, m), benchmarks, own.get(m)) for m in methods
        )
        heads = _heads(benchmarks, "mean of benchmarks,")
        tables.append(Table(setting_words(setting), heads, lines))
    return tables


def rows_of_setting(entries: Sequence[Row], setting: Mapping[str, Any]) -> list[Row]:
    """Entries (rows, summaries, comparisons) of one setting."""
    return [e for e in entries if all(e[name] == setting[name] for name in SETTING)]


def paper_tables(rows: Sequence[Row]) -> list[Table]:
    """The paper's own numbers for the settings that were measured; another model and machine."""
    paper = json.loads(PAPER.read_text())
    tables = []
    for thinking, temperature in sorted({(r["thinking"], float(r["temperature"])) for r in rows}):
        setting = {"thinking": thinking, "temperature": temperature}
        part = [r for r in paper["rows"] if all(r[k] == v for k, v in setting.items())]
        if not part:
            continue
        benchmarks = ordered({r["benchmark"] for r in part} - {"average"})
        lines = []
        for method in dict.fromkeys(r["method"] for r in part):
            own = {r["benchmark"]: r for r in part if r["method"] == method}
            chosen = [own[name] for name in (*benchmarks, "average")]
            cells = [f"{row[column]:.2f}" for row in chosen for column in ("speedup", "tau")]
            lines.append(Line((label(method), *cells), is_hyperdflash(method)))
        title = f"DeepSeek-V4-Flash, thinking {thinking}, temperature {temperature:g}"
        tables.append(Table(title, _heads(benchmarks, "average"), tuple(lines), paper["source"]))
    return tables


def acceptance_tables(rows: Sequence[Row]) -> list[Table]:
    """Figure 1 as numbers: for each setting, acceptance by position over the rounds that had it.

    tau is not one more than their sum: a round of a narrower width has no later drafts.
    """
    tables = []
    for setting in settings_of(rows):
        means = {
            m: pooled_positions(rows_in(rows, setting, m))
            for m in drafting(r["method"] for r in rows)
        }
        width = max(map(len, means.values()), default=0)
        if not width:
            continue
        lines = []
        for method, values in means.items():
            cells = [f"{v:.2f}" for v in values] or [NOT_MEASURED]
            cells += ["-"] * (width - len(cells))
            own = [r for r in rows_in(rows, setting, method) if r.get("position_acceptance")]
            cells.append(number(pooled_tau(own)))
            lines.append(Line((label(method), *cells), is_hyperdflash(method)))
        heads = ("Method", *map(str, range(1, width + 1)), "τ over all rounds")
        tables.append(Table(setting_words(setting), heads, tuple(lines)))
    return tables


def identity_table(rows: Sequence[Row]) -> Table | None:
    """Greedy answers against target-only's, each method apart; None where nothing was compared."""
    lines = []
    for method in dict.fromkeys(r["method"] for r in rows):
        own = [r for r in rows if r["method"] == method and r.get("compared_answers")]
        if not own or method == BASELINE:
            continue
        compared = sum(r["compared_answers"] for r in own)
        same = sum(r["identical_answers"] for r in own)
        found = [d for r in own for d in r.get("differences") or ()]
        count = {w: sum(d["verdict"] == w for d in found) for w in ("tie", "fault")}
        unknown = compared - same - sum(count.values())
        gaps = [d["gap"] for d in found if d["gap"] is not None]
        cells = (f"{compared}", f"{same}", f"{count['tie']}", f"{count['fault']}", f"{unknown}")
        largest = f"{max(gaps):.4g}" if gaps else "-"
        lines.append(Line((label(method), *cells, largest), is_hyperdflash(method)))
    heads = ("Method", "compared", "identical", "ties", "faults", "gap not measured", "largest gap")
    return Table("Greedy answers against target-only's", heads, tuple(lines)) if lines else None


def difference_table(rows: Sequence[Row]) -> Table | None:
    """Where greedy answers first leave target-only's; faults first, then by gap."""
    found = [(r, d) for r in rows for d in r.get("differences") or ()]
    if not found:
        return None
    rank = {"fault": 0, "not measured": 1, "tie": 2}
    found.sort(key=lambda e: (rank[e[1]["verdict"]], -(e[1]["gap"] or 0)))
    lines = []
    for row, d in found[:SHOWN_DIFFERENCES]:
        place = (str(d["prompt"] + 1), str(d["turn"] + 1), str(d["position"] + 1))
        tokens = ("end" if d[name] is None else str(d[name]) for name in ("expected", "found"))
        gap = number(d["gap"], ".4g")
        cells = (label(row["method"]), row["benchmark"], *place, *tokens, gap, d["verdict"])
        lines.append(Line(cells, is_hyperdflash(row["method"])))
    heads = ("Method", "benchmark", "prompt", "turn", "token", "target-only's", "found", "gap")
    more = len(found) - len(lines)
    note = f"{more} more are in results.json." if more else ""
    return Table("First differences", (*heads, "verdict"), tuple(lines), note)


def cell_table(rows: Sequence[Row]) -> Table:
    """Every row with its intervals."""
    heads = ("Method", "benchmark", "T", "thinking", "c", "τ (95 %)", "speedup (95 %)")
    heads += ("lowest to highest round", "round cost", "tokens/s", "identical")
    lines = []
    for r in rows:
        head = (label(r["method"]), r["benchmark"], f"{r['temperature']:g}", r["thinking"])
        head += (str(r["concurrency"]),)
        if r.get("tokens_per_s") is None:
            cells = (str(r.get("error", "not run"))[:80], *["-"] * 5)
        else:
            rounds = r.get("speedup_range")
            cells = (
                spread(r["tau"], r.get("tau_interval")),
                spread(r.get("speedup"), r.get("speedup_interval")),
                "-" if not rounds else f"{rounds[0]:.2f} to {rounds[1]:.2f}",
                number(r.get("round_cost")),
                f"{r['tokens_per_s']:.0f}",
                f"{r['identical_answers']}/{r['compared_answers']}"
                if r.get("compared_answers") and r["method"] != BASELINE
                else "-",
            )
        lines.append(Line((*head, *cells), is_hyperdflash(r["method"])))
    return Table("Every cell", heads, tuple(lines))


def _pair(values: Sequence[float]) -> str:
    return " / ".join(f"{v:.0f}" for v in values)


def round_table(round_ms: Mapping[str, Any]) -> Table:
    """Where a decoding round's time goes, in ms and in target-only's passes."""
    base = (round_ms.get(BASELINE) or {}).get("target")
    lines = []
    for method, times in round_ms.items():
        if times is None:
            cells = (NOT_MEASURED,) * 4
        else:
            parts = [times["target"], times["draft"], times["scheduler"]]
            step = NOT_MEASURED if not base else f"{sum(parts) / base:.2f}"
            cells = (*(f"{v:.2f}" for v in parts), step)
        lines.append(Line((label(method), *cells), is_hyperdflash(method)))
    heads = ("Method", "target pass, ms", "drafting and the rest, ms", "scheduling, ms")
    return Table(
        "A round at concurrency 1", (*heads, "whole round, target-only passes"), tuple(lines)
    )


def serving_tables(content: Mapping[str, Any]) -> list[Table]:
    """Of a serving study: round shares, throughput by concurrency, latency by rate."""
    tables = [round_table(content["round_ms"])]
    levels = sorted({e["concurrency"] for v in content["concurrency"].values() for e in v})
    lines = []
    for method, entries in content["concurrency"].items():
        own = {e["concurrency"]: e["tokens_per_s"] for e in entries}
        cells = tuple(number(own.get(level), ".0f") for level in levels)
        lines.append(Line((label(method), *cells), is_hyperdflash(method)))
    heads = ("Method", *(f"concurrency {level}" for level in levels))
    tables.append(Table("Output tokens a second by concurrency", heads, tuple(lines)))
    for rate in dict.fromkeys(e["rate"] for v in content["poisson"].values() for e in v):
        lines = []
        for method, entries in content["poisson"].items():
            for entry in (e for e in entries if e["rate"] == rate):
                cells = (_pair(entry[name]) for name in ("ttft_ms", "tpot_ms", "e2e_ms"))
                lines.append(Line((label(method), *cells), is_hyperdflash(method)))
        heads = ("Method", "TTFT p50 / p99", "TPOT p50 / p99", "end to end p50 / p99")
        tables.append(Table(f"Poisson arrivals, {rate:g} a second, in ms", heads, tuple(lines)))
    return tables
