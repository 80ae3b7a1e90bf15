"""``results.json``, ``report.md`` and its chart from a run's rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eval import tables
from eval.aggregate import collect
from eval.charts import line_chart
from eval.comparison import Row, pooled_positions, rows_of, settings_of
from eval.errors import EvalError
from eval.methods import drafting
from eval.runner import RUN, UNITS
from eval.serving import read_study
from eval.tables import Table
from sglang_hyperdflash.tools.atomic import write_json, write_text

RESULTS = "results.json"
INTRODUCTION = """\
# Speculative decoding methods compared

{rounds} interleaved rounds of every method, {prompts} prompts, at most {max_new_tokens} new tokens.

τ (accept length) is 1 + accepted drafts / verification rounds, over all rounds, so it counts the
bonus token; the baseline, decoding without speculation, has τ 1 by definition. Speedup is output
tokens a second of whole requests, prefill included, over the baseline's in the same round: the
median over rounds. Round cost is τ / speedup, in steps of the baseline. Intervals are 95 %
bootstrap intervals over prompts.
"""
AGAINST = """\
A verdict needs an interval that excludes "no difference", and for speedup a ratio outside the
noise floor. τ is over all rounds of all benchmarks, speedup the mean of the benchmarks."""
NOISE = """\
The baseline's speedup over itself, over all benchmarks and rounds: a smaller difference of speedup
means nothing."""

ACCEPTANCE = """\
The speedup is the mean of the benchmarks. The last columns are the share of the rounds with a draft
k that accept it."""


def acceptance_chart(rows: list[Row]) -> str | None:
    """Acceptance by drafted position, a panel for each setting; None without drafts."""
    methods, panels = drafting(r["method"] for r in rows), {}
    for setting in settings_of(rows):
        shares = {m: pooled_positions(rows_of(rows, setting, m)) for m in methods}
        if lines := {m: list(enumerate(v, 1)) for m, v in shares.items() if v}:
            panels[tables.setting_words(setting)] = lines
    up = "share of rounds that accept it"
    return line_chart(panels, "drafted position", up) if panels else None


def _section(title: str, found: list[Table | None], *words: str) -> list[str]:
    """Markdown of a section; nothing where no table was found."""
    shown = [line for table in found if table is not None for line in table.markdown()]
    before = [line for text in words for line in (text, "")]
    return [f"## {title}", "", *before, *shown] if shown else []


def markdown(content: dict[str, Any], chart: bool) -> str:
    """The whole report; ``chart``: whether there is an ``acceptance.svg``."""
    rows, run = content["rows"], content["run"]
    prompts = sum(run["prompts"].values())
    words = INTRODUCTION.format_map({**run, "prompts": prompts})
    lines = [*words.splitlines(), ""]
    picture = ["![Acceptance by drafted position](acceptance.svg)"] if chart else []
    found = tables.result_tables(rows, content["summaries"])
    lines += _section("Results over all benchmarks", found, ACCEPTANCE, *picture)
    found = tables.rival_tables(content["comparisons"])
    lines += _section("HyperDFlash compared with the others", found, AGAINST)
    if noise := tables.noise_lines(rows):
        lines += ["## Noise floor", "", NOISE, "", *noise, ""]
    found = [tables.identity_table(rows), tables.difference_table(rows)]
    lines += _section("Identity", found, tables.identity_meaning(rows))
    lines += _section("All rows", [tables.cell_table(rows)])
    if content.get("serving"):
        lines += _section("Serving", tables.serving_tables(content["serving"]))
    lines += ["## Provenance", "", "```", json.dumps(content["provenance"], indent=1), "```"]
    return "\n".join(lines) + "\n"


def read(out: Path) -> dict[str, Any]:
    """What to report of a folder: its units' numbers, or ``results.json`` where they are gone.

    Raises:
        EvalError: the folder holds neither.
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


def write(out: Path) -> dict[str, Any]:
    """Write ``results.json``, ``report.md`` and ``acceptance.svg`` into a run's folder.

    Raises:
        EvalError: the folder holds no run, or a library is missing. WriteFailed: a full disk.
    """
    content = read(out)
    chart = acceptance_chart(content["rows"])
    write_json(out / RESULTS, content, indent=1)
    if chart is not None:
        write_text(out / "acceptance.svg", chart)
    write_text(out / "report.md", markdown(content, chart is not None))
    return content
