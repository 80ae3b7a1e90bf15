"""``results.json``, ``report.md`` and its chart from a run's rows."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.aggregate import SETTING, Row, collect, noise_range, pooled_positions, select, settings_of
from eval.charts import line_chart
from eval.errors import EvalError
from eval.identity import TIE_GAPS
from eval.methods import BASELINE, drafting, label
from eval.runner import RUN, UNITS
from eval.serving import read_study
from sglang_hyperdflash.tools.atomic import write_json, write_text

NOT_MEASURED = "not measured"
SHOWN_DIFFERENCES = 50
RESULTS, CHART = "results.json", "acceptance.svg"
INTRODUCTION = """\
# Speculative decoding methods compared

{rounds} interleaved rounds of every method, {prompts} prompts, at most {max_new_tokens} new tokens.

τ (accept length) is 1 + accepted drafts / verification rounds, over all rounds, so it counts the
bonus token; the baseline, decoding without speculation, has τ 1 by definition. Speedup is output
tokens a second of whole requests, prefill included, over the baseline's in the same round: the
median over rounds. Round cost is τ / speedup, in steps of the baseline. Intervals are 95 %
bootstrap intervals over prompts.
"""
COMPARED = """\
A verdict needs an interval that excludes "no difference", and for speedup a ratio outside the
noise floor. τ is over all rounds of all benchmarks, speedup the mean of the benchmarks."""
NOISE = """\
The baseline's speedup over itself, over all benchmarks and rounds: a smaller difference of speedup
means nothing."""
ACCEPTANCE = """\
The speedup is the mean of the benchmarks. The last columns are the share of the rounds with a draft
k that accept it."""
IDENTITY = (
    "Where an answer first differs, the target is asked how far apart the two candidates are, "
    "in logits. A gap of at most {bounds} is a tie: a pass of another shape rounds "
    "differently, and either token is a greedy choice up to rounding. In bfloat16, of 8 bits, "
    "ties are expected. A larger gap is a fault of the method or of the server: report it."
)


@dataclass(frozen=True)
class Table:
    """A Markdown table; its first column is the name of a line."""

    title: str
    heads: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]  # each as long as the heads
    note: str = ""

    def markdown(self) -> list[str]:
        """Lines of Markdown, a heading of level 3 first."""
        rows = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in self.lines)
        lines = [f"### {self.title}", "", f"| {' | '.join(self.heads)} |"]
        lines += ["|" + "---|" * len(self.heads), *(f"| {row} |" for row in rows), ""]
        return [*lines, self.note, ""] if self.note else lines


def number(value: float | None, form: str = ".2f") -> str:
    """A formatted number, or that it was not measured."""
    return NOT_MEASURED if value is None else format(value, form)


def spread(value: float | None, interval: Sequence[float] | None) -> str:
    """A number, with its interval in brackets where there is one."""
    if value is None or interval is None:
        return number(value)
    return f"{value:.2f} ({interval[0]:.2f} to {interval[1]:.2f})"


def setting_words(setting: Row) -> str:
    """``Thinking off, temperature 0, concurrency 1``."""
    thinking, temperature, concurrency = (setting[name] for name in SETTING)
    return f"Thinking {thinking}, temperature {temperature:g}, concurrency {concurrency}"


def result_tables(rows: Sequence[Row], summaries: Sequence[Row]) -> list[Table]:
    """Over all benchmarks of a setting: τ, speedup, and acceptance by drafted position.

    Acceptance is over the rounds that had the position: a round of a narrower width has no later
    drafts, so τ is not one more than their sum.
    """
    tables = []
    for setting in settings_of(rows):
        entries = [e for e in select(summaries, setting) if e["method"] != BASELINE]
        shares = [pooled_positions(select(rows, setting, e["method"])) for e in entries]
        positions = max(map(len, shares), default=0)
        lines = []
        for entry, values in zip(entries, shares, strict=True):
            tau = spread(entry["tau"], entry["tau_interval"])
            cells = [f"{v:.2f}" for v in values] + ["-"] * (positions - len(values))
            lines.append((label(entry["method"]), tau, number(entry["mean_speedup"]), *cells))
        heads = ("Method", "τ over all rounds (95 %)", "mean speedup")
        heads += tuple(f"draft {k}" for k in range(1, positions + 1))
        tables.append(Table(setting_words(setting), heads, tuple(lines)))
    return tables


def tau_verdict(interval: Sequence[float] | None) -> str:
    """Whether the interval of a difference excludes zero."""
    if interval is None:
        return "interval not measured"
    if interval[0] > 0:
        return "higher"
    return "lower" if interval[1] < 0 else "no difference shown"


def speedup_verdict(entry: Row) -> str:
    """Whether the ratio of two speedups is more than the baseline against itself gives."""
    ours, rival = entry["speedup"]
    direction = "higher" if ours > rival else "lower"
    if entry.get("noise") is None:
        return f"{direction}, noise floor not measured"
    low, high = entry["noise"]
    floor = max(high, 1 / low)
    return "within the noise floor" if 1 / floor <= ours / rival <= floor else direction


def rival_tables(comparisons: Sequence[Row]) -> list[Table]:
    """Each of our methods against the others, a table for each setting."""
    heads = ("Method", "against", "τ", "rival's τ", "difference (95 %)", "verdict")
    heads += ("speedup", "rival's speedup", "ratio", "verdict")
    tables = []
    for setting in settings_of(comparisons):
        lines = []
        for entry in select(comparisons, setting):
            tau_cells = speedup_cells = [NOT_MEASURED] * 4
            if entry.get("tau"):
                (ours, rival), bounds = entry["tau"], entry["tau_difference_interval"]
                interval = f" ({bounds[0]:+.2f} to {bounds[1]:+.2f})" if bounds else ""
                tau_cells = [f"{ours:.2f}", f"{rival:.2f}", f"{ours - rival:+.2f}{interval}"]
                tau_cells.append(tau_verdict(bounds))
            if entry.get("speedup"):
                ours, rival = entry["speedup"]
                speedup_cells = [f"{v:.2f}" for v in (ours, rival, ours / rival)]
                speedup_cells.append(speedup_verdict(entry))
            names = (label(entry["ours"]), label(entry["rival"]))
            lines.append((*names, *tau_cells, *speedup_cells))
        tables.append(Table(setting_words(setting), heads, tuple(lines)))
    return tables


def _differences(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """All first differences, each with its row."""
    return [(row, difference) for row in rows for difference in row.get("differences") or ()]


def identity_tables(rows: Sequence[Row]) -> list[Table]:
    """Greedy answers against the baseline's by method, and their first differences.

    Of the differences the faults come first, then the largest gaps. Empty tables are left out.
    """
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        method_rows = [r for r in rows if r["method"] == method and r.get("compared_answers")]
        if not method_rows:
            continue
        compared = sum(row["compared_answers"] for row in method_rows)
        identical = sum(row["identical_answers"] for row in method_rows)
        differences = [difference for _, difference in _differences(method_rows)]
        ties, faults = (sum(d["verdict"] == v for d in differences) for v in ("tie", "fault"))
        counts = (compared, identical, ties, faults, compared - identical - ties - faults)
        gap = max((d["gap"] for d in differences if d["gap"] is not None), default=None)
        largest = "-" if gap is None else f"{gap:.4g}"
        lines.append((label(method), *map(str, counts), largest))
    heads = ("Method", "compared", "identical", "ties", "faults", "gap not measured", "largest gap")
    summary = Table("Greedy answers compared with the baseline's", heads, tuple(lines))
    rank = {"fault": 0, "not measured": 1, "tie": 2}
    pairs = _differences(rows)
    pairs.sort(key=lambda pair: (rank[pair[1]["verdict"]], -(pair[1]["gap"] or 0)))
    lines = []
    for row, difference in pairs[:SHOWN_DIFFERENCES]:
        place = (str(difference[name] + 1) for name in ("prompt", "turn", "position"))
        ids = (difference[name] for name in ("expected", "found"))
        tokens = ("end" if token is None else str(token) for token in ids)
        judged = (number(difference["gap"], ".4g"), difference["verdict"])
        lines.append((label(row["method"]), row["benchmark"], *place, *tokens, *judged))
    heads = ("Method", "benchmark", "prompt", "turn", "token", "baseline's", "found")
    heads += ("gap", "verdict")
    hidden = len(pairs) - len(lines)
    note = f"{hidden} more are in results.json." if hidden else ""
    firsts = Table("First differences", heads, tuple(lines), note)
    return [table for table in (summary, firsts) if table.lines]


def cell_table(rows: Sequence[Row]) -> Table:
    """Every row with its spread."""
    heads = ("Method", "benchmark", "T", "thinking", "c", "τ (95 %)", "speedup (lowest to highest)")
    heads += ("round cost", "tokens/s", "identical")
    lines = []
    for row in rows:
        cells = (str(row.get("error", "not run"))[:80], *["-"] * 4)
        if row.get("tokens_per_s") is not None:
            compared = row.get("compared_answers")
            cells = (
                spread(row["tau"], row.get("tau_interval")),
                spread(row.get("speedup"), row.get("speedup_range")),
                number(row.get("round_cost")),
                f"{row['tokens_per_s']:.0f}",
                f"{row['identical_answers']}/{compared}" if compared else "-",
            )
        place = (row["benchmark"], f"{row['temperature']:g}", row["thinking"])
        lines.append((label(row["method"]), *place, str(row["concurrency"]), *cells))
    return Table("Every benchmark and setting", heads, tuple(lines))


def serving_tables(content: Row) -> list[Table]:
    """The tables of a serving study: throughput by concurrency, latency by arrival rate."""
    by_level, by_rate = content["concurrency"], content["poisson"]
    levels = sorted({entry["concurrency"] for entries in by_level.values() for entry in entries})
    lines = []
    for method, entries in by_level.items():
        speeds = {entry["concurrency"]: entry["tokens_per_s"] for entry in entries}
        lines.append((label(method), *(number(speeds.get(level), ".0f") for level in levels)))
    heads = ("Method", *(f"concurrency {level}" for level in levels))
    tables = [Table("Output tokens a second by concurrency", heads, tuple(lines))]
    heads = ("Method", "TTFT p50 / p99", "TPOT p50 / p99", "end to end p50 / p99")
    for rate in dict.fromkeys(entry["rate"] for entries in by_rate.values() for entry in entries):
        lines = []
        for method, entries in by_rate.items():
            for entry in (entry for entry in entries if entry["rate"] == rate):
                pairs = (entry[name] for name in ("ttft_ms", "tpot_ms", "e2e_ms"))
                lines.append((label(method), *(f"{p50:.0f} / {p99:.0f}" for p50, p99 in pairs)))
        tables.append(Table(f"Poisson arrivals, {rate:g} a second, in ms", heads, tuple(lines)))
    return tables


def acceptance_chart(rows: list[Row]) -> str | None:
    """Acceptance by drafted position, a panel for each setting; None without drafts."""
    methods, panels = drafting(row["method"] for row in rows), {}
    for setting in settings_of(rows):
        shares = {method: pooled_positions(select(rows, setting, method)) for method in methods}
        if lines := {method: list(enumerate(v, 1)) for method, v in shares.items() if v}:
            panels[setting_words(setting)] = lines
    ylabel = "share of rounds that accept it"
    return line_chart(panels, "drafted position", ylabel) if panels else None


def _section(title: str, content: list[Table], *paragraphs: str) -> list[str]:
    """Lines of a section of paragraphs and tables; none without a table."""
    if not content:
        return []
    lines = [line for paragraph in paragraphs for line in (paragraph, "")]
    return [f"## {title}", "", *lines, *(line for table in content for line in table.markdown())]


def markdown(content: Row, chart: bool) -> str:
    """The whole report; ``chart``: whether there is an ``acceptance.svg``."""
    rows, run = content["rows"], content["run"]
    introduction = INTRODUCTION.format_map({**run, "prompts": sum(run["prompts"].values())})
    image = [f"![Acceptance by drafted position]({CHART})"] if chart else []
    lines = [*introduction.splitlines(), ""]
    results = result_tables(rows, content["summaries"])
    lines += _section("Results over all benchmarks", results, ACCEPTANCE, *image)
    rivals = rival_tables(content["comparisons"])
    lines += _section("HyperDFlash compared with the others", rivals, COMPARED)
    ranges = ((setting, noise_range(rows, setting)) for setting in settings_of(rows))
    noise = [f"- {setting_words(s)}: {r[0]:.2f} to {r[1]:.2f}" for s, r in ranges if r is not None]
    if noise:
        lines += ["## Noise floor", "", NOISE, "", *noise, ""]
    dtypes = {difference.get("dtype") for _, difference in _differences(rows)} - {None}
    bounds = ", ".join(f"{TIE_GAPS[name]:g} in {name}" for name in sorted(dtypes) or TIE_GAPS)
    lines += _section("Identity", identity_tables(rows), IDENTITY.format(bounds=bounds))
    lines += _section("All rows", [cell_table(rows)])
    if content.get("serving"):
        lines += _section("Serving", serving_tables(content["serving"]))
    lines += ["## Provenance", "", "```", json.dumps(content["provenance"], indent=1), "```"]
    return "\n".join(lines) + "\n"


def read(out: Path) -> Row:
    """What to report of a folder: its units' numbers, or ``results.json`` where they are gone.

    Raises ``EvalError`` where the folder holds neither or a file is damaged.
    """
    if (out / RUN).is_file() and (out / UNITS).is_dir():
        return {**collect(out), "serving": read_study(out)}
    try:
        content = json.loads((out / RESULTS).read_text())
        _ = [content[name] for name in ("provenance", "run", "rows", "summaries", "comparisons")]
        return content
    except FileNotFoundError as error:
        raise EvalError(
            f"{out} holds no run: neither {RUN} with {UNITS}/ nor {RESULTS}. Give --out the folder "
            "of an `eval run`."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise EvalError(
            f"{out / RESULTS} is damaged ({error!r}). Repeat that run's command with its --out."
        ) from error


def write(out: Path) -> Row:
    """Write ``results.json``, ``report.md`` and ``acceptance.svg``; return the first's content.

    Raises ``EvalError`` without a run or a library, and ``WriteFailed`` for a full disk.
    """
    content = read(out)
    chart = acceptance_chart(content["rows"])
    write_json(out / RESULTS, content, indent=1)
    if chart is not None:
        write_text(out / CHART, chart)
    write_text(out / "report.md", markdown(content, chart is not None))
    return content
