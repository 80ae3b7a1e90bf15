"""The report's numbers: tau, intervals, identity and verdicts; its tables, charts and page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

from eval import findings, report, tables
from eval.aggregate import row_of
from eval.charts import STYLES, acceptance_chart, draw, style
from eval.comparison import (
    Samples,
    comparisons,
    interval,
    pooled_positions,
    pooled_tau,
    resampled,
    summaries,
)
from eval.runner import Cell
from tests.conftest import ROOT

CELL = {"benchmark": "b", "temperature": 0.0, "thinking": "off", "concurrency": 1}


def unit(seconds: float, ids: list[list[int]], drafts=0, rounds=0) -> dict:
    """A unit of one-turn answers; drafts and rounds of each, or of all alike."""
    count = len(ids)
    each = [drafts] * count if isinstance(drafts, int) else drafts
    verified = [rounds] * count if isinstance(rounds, int) else rounds
    answers = [
        {
            "output_ids": [tokens],
            "texts": [""],
            "seconds": seconds / count,
            "correct_drafts": d,
            "verify_rounds": r,
            "histogram": [],
        }
        for tokens, d, r in zip(ids, each, verified, strict=True)
    ]
    return {"seconds": seconds, "answers": answers}


def method(name: str, drafts: int) -> dict:
    return {"name": name, "num_drafts": drafts}


def result(name: str, benchmark: str, tau: float, speedup: float, **more) -> dict:
    row = {"method": name, "benchmark": benchmark, "tau": tau, "speedup": speedup}
    row |= {"verify_rounds": 10, "tokens_per_s": 100.0, "num_prompts": 2, "round_cost": 1.0}
    return row | {"temperature": 0.0, "thinking": "off", "concurrency": 1} | more


# --- rows


def test_speedup_is_against_target_of_the_same_round():
    ids = [[1, 2], [3, 4]]
    target = [unit(4.0, ids), unit(8.0, ids), {"error": "gone"}]
    ours = [unit(2.0, ids, 3, 2), unit(2.0, [[1, 2], [3, 9]], 3, 2), unit(1.0, ids, 3, 2)]
    row, _ = row_of(CELL, method("mtp3", 3), ours, target)
    assert row["speedup_range"] == [2.0, 4.0] and row["speedup"] == 3.0
    assert row["tau"] == 2.5 and row["rounds"] == 3
    assert (row["identical_answers"], row["compared_answers"]) == (5, 6)
    assert row["identical_to_target"] is False
    assert [d["verdict"] for d in row["differences"]] == ["not measured"]
    missing, samples = row_of(CELL, method("mtp3", 3), [None], [None])
    assert missing["error"] == "not run" and missing["tau"] is None and samples is None


def test_there_is_no_speedup_over_a_target_that_wrote_nothing():
    """Found as: a division by zero in place of a report."""
    nothing, some = unit(1.0, [[], []]), unit(1.0, [[1], [2]], 3, 2)
    row, _ = row_of(CELL, method("mtp3", 3), [some], [nothing])
    assert row["speedup"] is None and row["speedup_interval"] is None and row["tau"] == 2.5
    row, _ = row_of(CELL, method("mtp3", 3), [some, some], [nothing, unit(2.0, [[1], [2]])])
    assert row["speedup_range"] == [2.0, 2.0]


def test_target_is_not_compared_with_itself_and_has_tau_one():
    ids = [[1, 2], [3, 4]]
    row, _ = row_of(CELL, method("target", 0), [unit(1.0, ids)], [unit(1.0, ids)])
    assert row["tau"] == 1.0 and row["identical_to_target"] is None
    assert "compared_answers" not in row
    again, _ = row_of(CELL, method("target-again", 0), [unit(1.0, ids)], [unit(1.0, ids)])
    assert again["compared_answers"] == 2


def test_an_interval_is_of_all_rounds_and_holds_its_own_estimate():
    """At temperature 1 every round answers otherwise: one round's interval can miss their mean."""
    draw_of = np.random.default_rng(1)
    ids, units = [[1]] * 12, []
    for accepted in (10, 40, 70):
        units.append(unit(1.0, ids, list(map(int, draw_of.poisson(accepted, 12))), 20))
    cell = CELL | {"temperature": 1.0}
    row, _ = row_of(cell, method("mtp3", 3), units, [None] * 3)
    drafts = sum(a["correct_drafts"] for u in units for a in u["answers"])
    assert row["tau"] == pytest.approx(1 + drafts / (3 * 12 * 20))
    low, high = row["tau_interval"]
    assert low < row["tau"] < high < row["tau"] + 0.3


def test_the_bootstrap_covers_a_known_mean_as_often_as_it_says():
    draw_of, covered = np.random.default_rng(0), 0
    for _ in range(200):
        drafts = draw_of.poisson(30, (1, 40))
        own = Samples(drafts, np.full((1, 40), 10), ())
        low, high = interval(own.taus(resampled(40)))
        covered += low <= 1 + 3.0 <= high
    assert 180 <= covered <= 198
    one = Samples(np.array([[1]]), np.array([[1]]), ())
    assert interval(one.taus(resampled(1))) is None
    unverified = Samples(np.zeros((1, 3)), np.zeros((1, 3)), ())
    assert interval(unverified.taus(resampled(3))) is None


# --- means and comparisons


def test_tau_over_all_rounds_agrees_with_its_positions():
    rows = [
        result("mtp3", "a", 2.0, 1.0, verify_rounds=30, position_acceptance=[0.6, 0.3, 0.1]),
        result("mtp3", "b", 1.5, 1.0, verify_rounds=10, position_acceptance=[0.3, 0.2, 0.0]),
    ]
    assert pooled_tau(rows) == pytest.approx((30 * 2.0 + 10 * 1.5) / 40)
    assert 1 + sum(pooled_positions(rows)) == pytest.approx(pooled_tau(rows))
    assert pooled_tau([result("mtp3", "a", None, 1.0, verify_rounds=0)]) is None


def widened(accepted: dict[int, int]) -> dict:
    """A unit whose rounds, by width, accepted every draft that they had."""
    widths, histogram = [0] * 8, [0] * 7
    for width, rounds in accepted.items():
        widths[width] = histogram[width - 1] = rounds
    drafts = sum(k * n for k, n in enumerate(histogram))
    found = unit(1.0, [[1] * 8], drafts, sum(widths))
    found["answers"][0] |= {"histogram": histogram, "widths": widths}
    return found


def test_tau_of_changing_widths_is_over_all_rounds_and_positions_over_those_that_had_them():
    """Found as: tau 7.00 of five rounds of width 1 and five of width 7, which give four a round."""
    rows = []
    for benchmark, accepted in (("a", {1: 5, 7: 5}), ("b", {4: 10})):
        cell = CELL | {"benchmark": benchmark}
        row, _ = row_of(cell, method("hyperdflash-adaptive", 6), [widened(accepted)], [None])
        rows.append(row)
    assert rows[0]["position_acceptance"] == [1.0] * 6 and rows[0]["tau"] == 4.0
    assert rows[0]["drafted_rounds"] == [5] * 6 and rows[1]["drafted_rounds"] == [10] * 3 + [0] * 3
    (table,) = tables.acceptance_tables(rows[:1])
    assert table.lines[0].cells[1:] == ("1.00",) * 6 + ("4.00",)
    # The second benchmark never drafted past the third: it says nothing of the rounds that did.
    assert pooled_positions(rows) == [1.0] * 6
    (table,) = tables.acceptance_tables(rows)
    assert table.lines[0].cells[-1] == "4.00"
    assert pooled_positions(rows[1:]) == [1.0] * 3 + [0.0] * 3


def measured(better: int, seconds: float = 1.0):
    """Rows and samples of two benchmarks; ours accepts ``better`` drafts more on every prompt."""
    rows, samples = [], {}
    ids = [[1] * 8] * 20
    noisy = np.random.default_rng(2)
    for benchmark in ("a", "b"):
        cell = CELL | {"benchmark": benchmark}
        base = noisy.integers(5, 60, 20)
        target = [unit(2.0, ids), unit(2.0, ids)]
        units = {
            "target": target,
            "mtp3": [unit(1.0, ids, list(map(int, base)), 20)] * 2,
            "hyperdflash6": [unit(seconds, ids, [int(b) + better for b in base], 20)] * 2,
            "target-again": [unit(1.9, ids), unit(2.1, ids)],
        }
        for name, own in units.items():
            drafts = {"mtp3": 3, "hyperdflash6": 6}.get(name, 0)
            row, found = row_of(cell, method(name, drafts), own, target)
            rows.append(row)
            samples[Cell(**cell), name] = found
    return rows, samples


@pytest.mark.parametrize("better, says", [(4, "higher"), (-4, "lower"), (0, "no difference shown")])
def test_a_paired_interval_finds_a_difference_far_smaller_than_the_spread_of_prompts(better, says):
    rows, samples = measured(better)
    (entry,) = comparisons(rows, samples)
    ours, theirs = entry["tau"]
    assert ours - theirs == pytest.approx(better / 20)
    assert findings.tau_verdict(entry["tau_difference_interval"]) == says
    own = {s["method"]: s for s in summaries(rows, samples)}
    low, high = own["hyperdflash6"]["tau_interval"]
    assert high - low > 0.3 > abs(better / 20)  # unpaired, nothing could be said
    assert own["target-again"]["tau"] is None and own["target"]["mean_tau"] == 1.0


@pytest.mark.parametrize(
    "seconds, says",
    [(0.5, "higher"), (1.0, "within the noise floor"), (1.02, "within the noise floor")],
)
def test_a_speedup_counts_only_outside_of_the_noise_floor(seconds, says):
    rows, samples = measured(0, seconds)
    (entry,) = comparisons(rows, samples)
    assert entry["noise"] == pytest.approx([2.0 / 2.1, 2.0 / 1.9])
    assert findings.speedup_verdict(entry) == says
    if says == "higher":
        assert findings.speedup_verdict({**entry, "noise": None}).endswith("floor not measured")
        missing = {**entry, "speedup_ratio_interval": None}
        assert "interval not stored" in findings.speedup_verdict(missing)


def test_nothing_is_compared_with_a_failed_benchmark_or_without_rivals():
    rows = [
        result("mtp3", "gsm8k", 3.0, 2.0),
        result("hyperdflash6", "gsm8k", 4.0, 1.5),
        result("mtp3", "mt-bench", 2.0, 2.0),
        result("hyperdflash6", "mt-bench", 3.0, 1.5, error="died"),
    ]
    assert comparisons(rows, {}) == []
    alone = [r for r in rows if r["method"] == "mtp3"]
    content = {"rows": alone, "summaries": summaries(alone, {}), "comparisons": [], "run": {}}
    titles = [section.title for section in report.result_sections(content)]
    assert "HyperDFlash against the others" not in titles and "Noise floor" not in titles
    assert "Identity" not in titles and "Main results" in titles


def test_tables_are_the_paper_s():
    rows = [
        result("target", "gsm8k", 1.0, 1.0),
        result("mtp3", "gsm8k", 3.0, 2.0),
        result("hyperdflash6", "gsm8k", 4.0, 1.5),
        result("mtp3", "mt-bench", 2.0, 2.0),
        result("hyperdflash6", "mt-bench", 3.0, 1.5, error="died"),
    ]
    (table,) = tables.main_tables(rows, summaries(rows, {}))
    assert table.heads == (
        *("Method", "gsm8k speedup", "gsm8k τ", "mt-bench speedup", "mt-bench τ"),
        *("mean of benchmarks, speedup", "mean of benchmarks, τ"),
    )
    lines = {line.cells[0]: line.cells[1:] for line in table.lines}
    assert lines["MTP (3)"] == ("2.00", "3.00", "2.00", "2.00", "2.00", "2.50")
    failed = ("1.50", "4.00", "failed", "failed", "not whole", "not whole")
    assert lines["HyperDFlash (6)"] == failed
    (paper,) = tables.paper_tables(rows)
    lines = {line.cells[0]: line.cells[1:] for line in paper.lines}
    assert lines["HyperDFlash (6)"][:2] == ("3.80", "4.04")
    assert lines["MTP (3)"][-2:] == ("2.25", "2.93")


def test_a_round_that_was_not_timed_is_said_so():
    table = tables.round_table({"target": None, "mtp3": None})
    assert {cell for line in table.lines for cell in line.cells[1:]} == {"not measured"}
    times = {"target": 10.0, "draft": 4.0, "scheduler": 1.0}
    table = tables.round_table({"target": times, "mtp3": times})
    assert table.lines[1].cells[1:] == ("10.00", "4.00", "1.00", "1.50")


# --- charts


def test_a_chart_is_the_same_bytes_for_the_same_numbers_and_follows_the_page_s_colours():
    rows = [
        result("mtp3", "a", 2.0, 1.0, position_acceptance=[0.6, 0.3, 0.1]),
        result("hyperdflash6", "a", 2.0, 1.0, position_acceptance=[0.5, 0.4, 0.1]),
    ]
    svg = acceptance_chart(rows)
    assert svg == acceptance_chart(rows)
    ElementTree.fromstring(svg)
    for name in ("mtp3", "hyperdflash6"):
        assert STYLES[name][0] in svg
    assert "currentColor" in svg and "prefers-color-scheme" in svg and "#010203" not in svg
    assert "MTP (3)" in svg and not re.search(r"\d{4}-\d\d-\d\dT", svg)
    assert acceptance_chart([result("target", "a", 1.0, 1.0)]) == ""


def test_titles_with_markup_stay_text():
    svg = draw("x", 'T<1> & "2"', lambda axes: axes[0].set_title("a < b & c"))
    assert ElementTree.fromstring(svg).attrib["aria-label"] == 'T<1> & "2"'


def test_every_method_has_a_colour_and_marker_that_no_other_has():
    assert len({colour for colour, _ in STYLES.values()}) == len(STYLES)
    assert len({marker for _, marker in STYLES.values()}) == len(STYLES)
    assert style("hyperdflash2") == style("hyperdflash2")


# --- the page


class Page(HTMLParser):
    """What is open where: tables outside of boxes, ids twice, scripts and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.ids, self.faults, self.tables = [], [], [], 0
        self.feed(text)

    def handle_starttag(self, tag, attrs) -> None:
        attributes = dict(attrs)
        if tag == "table":
            self.tables += 1
            if not any("scroll" in (c or "") for _, c in self.open):
                self.faults.append("a table outside of a box that scrolls")
        if tag in ("script", "link", "img", "iframe"):
            self.faults.append(tag)
        for name in ("href", "src", "xlink:href"):
            if not (attributes.get(name) or "#").startswith("#"):
                self.faults.append(f"{tag} {name}={attributes[name]}")
        if "id" in attributes:
            self.ids.append(attributes["id"])
        if tag not in ("meta", "br"):
            self.open.append((tag, attributes.get("class")))

    def handle_endtag(self, tag) -> None:
        while self.open and self.open.pop()[0] != tag:
            pass


def test_the_page_stands_alone_and_its_tables_scroll_in_boxes(tmp_path, serving_study):
    committed = ROOT / "eval" / "results" / "tiny" / "results.json"
    content = json.loads(committed.read_text())
    content["rows"][1]["benchmark"] = "<b>&co"
    content["serving"] = serving_study
    (tmp_path / "results.json").write_text(json.dumps(content))
    report.write(tmp_path)
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert page.faults == [] and page.tables >= 10
    assert len(set(page.ids)) == len(page.ids)
    assert "width=device-width" in text and "color-scheme:light dark" in text
    assert "<b>&co" not in text and "&lt;b&gt;&amp;co" in text
    for title in ("Every cell", "Greedy answers against target-only", "Noise floor", "Serving"):
        assert title in text and title in (tmp_path / "report.md").read_text()
    for name in ("acceptance", "cost", "throughput"):
        assert f"]({name}.svg)" in (tmp_path / "report.md").read_text()
        ElementTree.parse(tmp_path / f"{name}.svg")


def test_the_committed_report_is_what_its_results_give(tmp_path):
    """Charts apart: another release of matplotlib may place a point otherwise."""
    committed = ROOT / "eval" / "results" / "tiny"
    (tmp_path / "results.json").write_text((committed / "results.json").read_text())
    report.write(tmp_path)
    assert (tmp_path / "report.md").read_text() == (committed / "report.md").read_text()
    assert (tmp_path / "results.json").read_text() == (committed / "results.json").read_text()


def test_a_markdown_table_is_one_line_a_row_with_one_width(tmp_path):
    text = (ROOT / "eval" / "results" / "tiny" / "report.md").read_text()
    blocks = [b for b in text.split("\n\n") if b.startswith("|")]
    assert len(blocks) >= 10
    for block in blocks:
        lines = block.split("\n")
        assert set(lines[1]) == {"|", "-"} and len({line.count("|") for line in lines}) == 1
    for section in text.split("\n## "):
        titles = re.findall(r"^### .*", section, re.M)
        assert len(set(titles)) == len(titles), titles
    assert "\n\n\n" not in text
