"""A run's numbers as tables: by benchmark, acceptance, identity, comparisons, serving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.comparison import (
    SETTING,
    Row,
    noise_range,
    pooled_positions,
    rows_of,
    settings_of,
    speedup_verdict,
    tau_verdict,
)
from eval.identity import TIE_GAPS
from eval.methods import BASELINE, label

NOT_MEASURED = "not measured"
SHOWN_DIFFERENCES = 50


@dataclass(frozen=True)
class Table:
    """``heads`` and every line are of one length; the first column is the name."""

    title: str
    heads: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    note: str = ""

    def markdown(self) -> list[str]:
        """Lines of Markdown, a heading of level 3 first."""
        rows = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in self.lines)
        found = [f"### {self.title}", "", f"| {' | '.join(self.heads)} |"]
        found += ["|" + "---|" * len(self.heads), *(f"| {row} |" for row in rows), ""]
        return [*found, self.note, ""] if self.note else found


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


def rival_tables(comparisons: Sequence[Row]) -> list[Table]:
    """Each of our methods against the others, a table for each setting."""
    heads = ("Method", "against", "τ", "rival's τ", "difference (95 %)", "verdict")
    heads += ("speedup", "rival's speedup", "ratio", "verdict")
    tables = []
    for setting in settings_of(comparisons):
        lines = []
        for entry in rows_of(comparisons, setting):
            cells = [label(entry["ours"]), label(entry["rival"])]
            if entry.get("tau"):
                (a, b), bounds = entry["tau"], entry["tau_difference_interval"]
                shown = f" ({bounds[0]:+.2f} to {bounds[1]:+.2f})" if bounds else ""
                cells += [f"{a:.2f}", f"{b:.2f}", f"{a - b:+.2f}{shown}", tau_verdict(bounds)]
            else:
                cells += [NOT_MEASURED] * 4
            if entry.get("speedup"):
                a, b = entry["speedup"]
                cells += [f"{a:.2f}", f"{b:.2f}", f"{a / b:.2f}", speedup_verdict(entry)]
            else:
                cells += [NOT_MEASURED] * 4
            lines.append(tuple(cells))
        tables.append(Table(setting_words(setting), heads, tuple(lines)))
    return tables


def noise_lines(rows: Sequence[Row]) -> list[str]:
    """The baseline's speedup over itself in each setting."""
    found = ((setting, noise_range(rows, setting)) for setting in settings_of(rows))
    return [f"- {setting_words(s)}: {r[0]:.2f} to {r[1]:.2f}" for s, r in found if r is not None]


def result_tables(rows: Sequence[Row], summaries: Sequence[Row]) -> list[Table]:
    """Over all benchmarks of a setting: τ, speedup, and acceptance by drafted position.

    Acceptance is over the rounds that had the position: a round of a narrower width has no later
    drafts, so τ is not one more than their sum.
    """
    tables = []
    for setting in settings_of(rows):
        own = [s for s in rows_of(summaries, setting) if s["method"] != BASELINE]
        shares = {s["method"]: pooled_positions(rows_of(rows, setting, s["method"])) for s in own}
        drafts = max(map(len, shares.values()), default=0)
        lines = []
        for summary in own:
            values = [f"{v:.2f}" for v in shares[summary["method"]]]
            values += ["-"] * (drafts - len(values))
            tau, speedup = spread(summary["tau"], summary["tau_interval"]), summary["mean_speedup"]
            lines.append((label(summary["method"]), tau, number(speedup), *values))
        positions = (f"draft {k}" for k in range(1, drafts + 1))
        heads = ("Method", "τ over all rounds (95 %)", "mean speedup", *positions)
        tables.append(Table(setting_words(setting), heads, tuple(lines)))
    return tables


def identity_table(rows: Sequence[Row]) -> Table | None:
    """Greedy answers against the baseline's by method; None where nothing was compared."""
    lines = []
    for method in dict.fromkeys(r["method"] for r in rows):
        own = [r for r in rows if r["method"] == method and r.get("compared_answers")]
        if not own or method == BASELINE:
            continue
        compared, same = (sum(r[k] for r in own) for k in ("compared_answers", "identical_answers"))
        found = [d for r in own for d in r.get("differences") or ()]
        ties, faults = (sum(d["verdict"] == w for d in found) for w in ("tie", "fault"))
        counts = (compared, same, ties, faults, compared - same - ties - faults)
        largest = max((d["gap"] for d in found if d["gap"] is not None), default=None)
        shown = "-" if largest is None else f"{largest:.4g}"
        lines.append((label(method), *map(str, counts), shown))
    heads = ("Method", "compared", "identical", "ties", "faults", "gap not measured", "largest gap")
    return (
        Table("Greedy answers compared with the baseline's", heads, tuple(lines)) if lines else None
    )


def identity_meaning(rows: Sequence[Row]) -> str:
    """What a tie and a fault are, for the data types that were seen."""
    found = {d.get("dtype") for r in rows for d in r.get("differences") or ()} - {None}
    bounds = ", ".join(f"{TIE_GAPS[name]:g} in {name}" for name in sorted(found) or TIE_GAPS)
    return (
        "Where an answer first differs, the target is asked how far apart the two candidates are, "
        f"in logits. A gap of at most {bounds} is a tie: a pass of another shape rounds "
        "differently, and either token is a greedy choice up to rounding. In bfloat16, of 8 bits, "
        "ties are expected. A larger gap is a fault of the method or of the server: report it."
    )


def difference_table(rows: Sequence[Row]) -> Table | None:
    """Where greedy answers first depart from the baseline's; faults first, then by gap."""
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
        lines.append((label(row["method"]), row["benchmark"], *place, *tokens, gap, d["verdict"]))
    heads = (
        "Method",
        "benchmark",
        "prompt",
        "turn",
        "token",
        "baseline's",
        "found",
        "gap",
        "verdict",
    )
    more = len(found) - len(lines)
    note = f"{more} more are in results.json." if more else ""
    return Table("First differences", heads, tuple(lines), note)


def cell_table(rows: Sequence[Row]) -> Table:
    """Every row with its spread."""
    heads = ("Method", "benchmark", "T", "thinking", "c", "τ (95 %)", "speedup (lowest to highest)")
    heads += ("round cost", "tokens/s", "identical")
    lines = []
    for r in rows:
        cells = (str(r.get("error", "not run"))[:80], *["-"] * 4)
        if r.get("tokens_per_s") is not None:
            compared = r.get("compared_answers")
            cells = (
                spread(r["tau"], r.get("tau_interval")),
                spread(r.get("speedup"), r.get("speedup_range")),
                number(r.get("round_cost")),
                f"{r['tokens_per_s']:.0f}",
                f"{r['identical_answers']}/{compared}" if compared else "-",
            )
        place = (r["benchmark"], f"{r['temperature']:g}", r["thinking"], str(r["concurrency"]))
        lines.append((label(r["method"]), *place, *cells))
    return Table("Every benchmark and setting", heads, tuple(lines))


def serving_tables(content: Mapping[str, Any]) -> list[Table]:
    """Of a serving study: throughput by concurrency, latency by arrival rate."""
    levels = sorted({e["concurrency"] for v in content["concurrency"].values() for e in v})
    lines = []
    for method, entries in content["concurrency"].items():
        own = {e["concurrency"]: e["tokens_per_s"] for e in entries}
        lines.append((label(method), *(number(own.get(level), ".0f") for level in levels)))
    heads = ("Method", *(f"concurrency {level}" for level in levels))
    tables = [Table("Output tokens a second by concurrency", heads, tuple(lines))]
    for rate in dict.fromkeys(e["rate"] for v in content["poisson"].values() for e in v):
        lines = []
        for method, entries in content["poisson"].items():
            for entry in (e for e in entries if e["rate"] == rate):
                pairs = (entry[name] for name in ("ttft_ms", "tpot_ms", "e2e_ms"))
                lines.append((label(method), *(f"{p50:.0f} / {p99:.0f}" for p50, p99 in pairs)))
        heads = ("Method", "TTFT p50 / p99", "TPOT p50 / p99", "end to end p50 / p99")
        tables.append(Table(f"Poisson arrivals, {rate:g} a second, in ms", heads, tuple(lines)))
    return tables
