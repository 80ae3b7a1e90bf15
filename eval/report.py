"""``report.md``, ``report.html`` and their charts from a run's rows."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval import findings, tables
from eval.aggregate import collect
from eval.charts import acceptance_chart, cost_chart, throughput_chart
from eval.comparison import comparisons, summaries
from eval.errors import EvalError
from eval.runner import RUN, UNITS
from eval.serving_study import read_study
from eval.tables import Table
from sglang_hyperdflash.tools.atomic import write_json, write_text

RESULTS = "results.json"
TITLE = "Speculative decoding methods side by side"


@dataclass(frozen=True)
class Chart:
    """A figure: the file's name without ``.svg``, its caption, its SVG text."""

    name: str
    caption: str
    svg: str

    @property
    def wide(self) -> bool:
        """Whether it has several panels: a small screen scrolls it instead of shrinking it."""
        size = re.search(r'viewBox="0 0 ([0-9.]+) ', self.svg)
        return size is not None and float(size[1]) > 500


@dataclass(frozen=True)
class Section:
    """A part of the report, alike in Markdown and HTML."""

    title: str
    paragraphs: tuple[str, ...] = ()
    bullets: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    quiet: bool = False
    code: str = field(default="")


def introduction(content: dict[str, Any]) -> list[str]:
    """What was measured and how the numbers are defined."""
    run = content["run"]
    prompts = sum((run.get("prompts") or {}).values())
    size = f" {prompts} prompts," if prompts else ""
    return [
        f"{run['rounds']} interleaved rounds of every method,{size} at most "
        f"{run['max_new_tokens']} new tokens a turn.",
        "τ (accept length) is 1 + accepted drafts / verification rounds, over all rounds, so it "
        "counts the bonus token; target-only has τ 1 by definition. Speedup is output tokens a "
        "second of whole requests, prefill included, against target-only in the same round: the "
        "median over rounds. Round cost is τ / speedup, in target-only steps. Intervals are 95 % "
        'bootstrap intervals over prompts; "mean of benchmarks" weighs every benchmark alike.',
    ]


def result_sections(content: dict[str, Any]) -> list[Section]:
    """The sections of a run's rows."""
    rows = content["rows"]
    sections = []
    if shown := tuple(findings.rival_tables(content["comparisons"])):
        text = 'A verdict needs an interval that leaves "no difference" out, and for speedup a '
        text += "ratio outside the noise floor. The two τ weigh benchmarks differently: by their "
        text += "verification rounds, and alike (the paper's way)."
        sections.append(Section("HyperDFlash against the others", (text,), tables=shown))
    if noise := findings.noise_lines(rows):
        text = "Target-only against itself, over all benchmarks and rounds: a difference of "
        text += "speedup inside this range means nothing."
        sections.append(Section("Noise floor", (text,), tuple(noise)))
    if lines := findings.identity_lines(rows):
        found = (tables.identity_table(rows), tables.difference_table(rows))
        meaning = (findings.identity_meaning(rows),)
        shown = tuple(t for t in found if t is not None)
        sections.append(Section("Identity", meaning, tuple(lines), tables=shown))
    charts = (
        Chart("acceptance", "Acceptance by drafted position", acceptance_chart(rows)),
        Chart("cost", "τ against round cost (up and left is better)", cost_chart(rows)),
        Chart(
            "throughput",
            "Throughput against concurrency",
            throughput_chart(rows, content.get("serving")),
        ),
    )
    if drawn := tuple(chart for chart in charts if chart.svg):
        sections.append(Section("Charts", charts=drawn))
    shown = tuple(tables.main_tables(rows, content["summaries"]))
    sections.append(Section("Main results", tables=shown))
    if shown := tuple(tables.acceptance_tables(rows)):
        sections.append(Section("Acceptance by drafted position", tables=shown))
    if shown := tuple(tables.paper_tables(rows)):
        text = "Another model, machine and training: for comparison only."
        sections.append(Section("The paper's own numbers", (text,), tables=shown, quiet=True))
    return [*sections, Section("All rows", tables=(tables.cell_table(rows),))]


def sections_of(content: dict[str, Any]) -> list[Section]:
    """The whole report."""
    sections = result_sections(content)
    if content.get("serving"):
        shown = tuple(tables.serving_tables(content["serving"]))
        sections.append(Section("Serving", tables=shown))
    return [*sections, Section("Provenance", code=json.dumps(content["provenance"], indent=1))]


def _templates():
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
    except ImportError as error:
        raise EvalError(
            "the report needs jinja2: pip install 'sglang-hyperdflash[eval]'."
        ) from error
    return Environment(
        loader=FileSystemLoader(Path(__file__).resolve().parent / "templates"),
        autoescape=select_autoescape(("html.j2",)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def read(out: Path) -> dict[str, Any]:
    """What to report of a folder: its units' numbers, or ``results.json`` where they are gone.

    Raises:
        EvalError: the folder holds neither.
    """
    if (out / RUN).is_file() and (out / UNITS).is_dir():
        return {**collect(out), "serving": read_study(out)}
    try:
        content = json.loads((out / RESULTS).read_text())
        # Results of a release that did not store them: means without intervals.
        content.setdefault("summaries", summaries(content["rows"], {}))
        content.setdefault("comparisons", comparisons(content["rows"], {}))
    except FileNotFoundError as error:
        raise EvalError(
            f"{out} holds no run: neither {RUN} with {UNITS}/ nor {RESULTS}. Give --out the folder "
            "of an `eval run`."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise EvalError(
            f"{out / RESULTS} is damaged ({error!r}). Repeat that run's command with its --out."
        ) from error
    return content


def write(out: Path) -> dict[str, Any]:
    """Write ``results.json``, ``report.md``, ``report.html`` and the charts into a run's folder.

    Raises:
        EvalError: the folder holds no run, or a library is missing. WriteFailed: a full disk.
    """
    content = read(out)
    sections = sections_of(content)
    context = {"title": TITLE, "introduction": introduction(content), "sections": sections}
    environment = _templates()
    write_json(out / RESULTS, content, indent=1)
    for chart in (chart for section in sections for chart in section.charts):
        write_text(out / f"{chart.name}.svg", chart.svg)
    for name in ("report.md", "report.html"):
        write_text(out / name, environment.get_template(f"{name}.j2").render(context))
    return content
