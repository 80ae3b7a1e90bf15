"""The report's numbers: tau, intervals, identity and verdicts; its tables and chart."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from eval import report, tables
from eval.aggregate import row_of
from eval.charts import STYLES
from eval.comparison import (
    comparisons,
    pooled_positions,
    pooled_tau,
    speedup_verdict,
    summaries,
    tau_interval,
    tau_verdict,
)
from eval.methods import KINDS
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


def test_speedup_is_over_the_baseline_of_the_same_round():
    ids = [[1, 2], [3, 4]]
    target = [unit(4.0, ids), unit(8.0, ids), {"error": "gone"}]
    ours = [unit(2.0, ids, 3, 2), unit(2.0, [[1, 2], [3, 9]], 3, 2), unit(1.0, ids, 3, 2)]
    row, _ = row_of(CELL, method("mtp3", 3), ours, target)
    assert row["speedup_range"] == [2.0, 4.0] and row["speedup"] == 3.0
    assert row["tau"] == 2.5 and row["rounds"] == 3
    assert (row["identical_answers"], row["compared_answers"]) == (5, 6)
    assert row["identical_to_baseline"] is False
    assert [d["verdict"] for d in row["differences"]] == ["not measured"]
    missing, counts = row_of(CELL, method("mtp3", 3), [None], [None])
    assert missing["error"] == "not run" and missing["tau"] is None and counts is None


def test_there_is_no_speedup_over_a_baseline_that_wrote_nothing():
    """Found as: a division by zero in place of a report."""
    nothing, some = unit(1.0, [[], []]), unit(1.0, [[1], [2]], 3, 2)
    row, _ = row_of(CELL, method("mtp3", 3), [some], [nothing])
    assert row["speedup"] is None and row["tau"] == 2.5
    row, _ = row_of(CELL, method("mtp3", 3), [some, some], [nothing, unit(2.0, [[1], [2]])])
    assert row["speedup_range"] == [2.0, 2.0]


def test_the_baseline_is_not_compared_with_itself_and_has_tau_one():
    ids = [[1, 2], [3, 4]]
    row, _ = row_of(CELL, method("baseline", 0), [unit(1.0, ids)], [unit(1.0, ids)])
    assert row["tau"] == 1.0 and row["identical_to_baseline"] is None
    assert "compared_answers" not in row
    again, _ = row_of(CELL, method("baseline-again", 0), [unit(1.0, ids)], [unit(1.0, ids)])
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
    for _ in range(100):
        counts = np.stack([draw_of.poisson(30, 40), np.full(40, 10)])
        low, high = tau_interval(counts)
        covered += low <= 1 + 3.0 <= high
    assert 88 <= covered <= 99
    assert tau_interval(np.ones((2, 1))) is None
    assert tau_interval(np.zeros((2, 3))) is None and tau_interval(None) is None


# --- means and comparisons


def test_tau_over_all_rounds_agrees_with_its_positions():
    rows = [
        result("mtp3", name, 1 + sum(shares), 1.0, verify_rounds=rounds)
        | {"position_acceptance": shares, "drafted_rounds": [rounds] * 3}
        for name, rounds, shares in (("a", 30, [0.6, 0.3, 0.1]), ("b", 10, [0.3, 0.2, 0.0]))
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
    (table,) = tables.result_tables(rows[:1], summaries(rows[:1], {}))
    assert table.lines[0][1:] == ("4.00", "not measured", *("1.00",) * 6)
    # The second benchmark never drafted past the third: it says nothing of the rounds that did.
    assert pooled_positions(rows) == [1.0] * 6 and pooled_tau(rows) == 4.0
    assert pooled_positions(rows[1:]) == [1.0] * 3 + [0.0] * 3


def measured(better: int, seconds: float = 1.0):
    """Rows and counts of two benchmarks; ours accepts ``better`` drafts more on every prompt."""
    rows, counts = [], {}
    ids = [[1] * 8] * 20
    noisy = np.random.default_rng(2)
    for benchmark in ("a", "b"):
        cell = CELL | {"benchmark": benchmark}
        base = noisy.integers(5, 60, 20)
        baseline = [unit(2.0, ids), unit(2.0, ids)]
        units = {
            "baseline": baseline,
            "mtp3": [unit(1.0, ids, list(map(int, base)), 20)] * 2,
            "hyperdflash6": [unit(seconds, ids, [int(b) + better for b in base], 20)] * 2,
            "baseline-again": [unit(1.9, ids), unit(2.1, ids)],
        }
        for name, own in units.items():
            drafts = {"mtp3": 3, "hyperdflash6": 6}.get(name, 0)
            row, found = row_of(cell, method(name, drafts), own, baseline)
            rows.append(row)
            counts[Cell(**cell), name] = found
    return rows, counts


@pytest.mark.parametrize("better, says", [(4, "higher"), (-4, "lower"), (0, "no difference shown")])
def test_a_paired_interval_finds_a_difference_far_smaller_than_the_spread_of_prompts(better, says):
    rows, counts = measured(better)
    (entry,) = comparisons(rows, counts)
    ours, theirs = entry["tau"]
    assert ours - theirs == pytest.approx(better / 20)
    assert tau_verdict(entry["tau_difference_interval"]) == says
    own = {s["method"]: s for s in summaries(rows, counts)}
    low, high = own["hyperdflash6"]["tau_interval"]
    assert high - low > 0.3 > abs(better / 20)  # unpaired, nothing could be said
    assert own["baseline-again"]["tau"] is None and own["baseline"]["mean_speedup"] == 1.0


@pytest.mark.parametrize(
    "seconds, says",
    [(0.5, "higher"), (1.0, "within the noise floor"), (1.02, "within the noise floor")],
)
def test_a_speedup_counts_only_outside_of_the_noise_floor(seconds, says):
    rows, counts = measured(0, seconds)
    (entry,) = comparisons(rows, counts)
    assert entry["noise"] == pytest.approx([2.0 / 2.1, 2.0 / 1.9])
    assert speedup_verdict(entry) == says
    if says == "higher":
        assert speedup_verdict({**entry, "noise": None}).endswith("floor not measured")


def test_nothing_is_compared_with_a_failed_benchmark():
    rows = [
        result("mtp3", "gsm8k", 3.0, 2.0),
        result("hyperdflash6", "gsm8k", 4.0, 1.5),
        result("mtp3", "mt-bench", 2.0, 2.0),
        result("hyperdflash6", "mt-bench", 3.0, 1.5, error="died"),
    ]
    assert comparisons(rows, {}) == []
    (table,) = tables.result_tables(rows, summaries(rows, {}))
    assert [line[:3] for line in table.lines] == [
        ("MTP (3)", "2.50", "2.00"),
        ("HyperDFlash (6)", "not measured", "not measured"),
    ]
    failed = [{**row, "tokens_per_s": None} for row in rows[-1:]]
    assert tables.cell_table(failed).lines[0][5:] == ("died", "-", "-", "-", "-")


def test_the_tables_of_a_serving_study(serving_study):
    loads, poisson = tables.serving_tables(serving_study)
    assert ("HyperDFlash (6)", "180", "not measured") in loads.lines
    assert "2 a second" in poisson.title
    assert poisson.lines == (("baseline", "1 / 2", "3 / 4", "5 / 6"),)


# --- the chart and the page


def test_a_chart_is_the_same_bytes_for_the_same_numbers():
    rows = [
        result("mtp3", "a", 2.0, 1.0, position_acceptance=[0.6, 0.3], drafted_rounds=[9, 9]),
        result(
            "hyperdflash6", "a", 2.0, 1.0, position_acceptance=[0.5, 0.4], drafted_rounds=[9, 9]
        ),
    ]
    svg = report.acceptance_chart(rows)
    assert svg == report.acceptance_chart(rows)
    ElementTree.fromstring(svg)
    for name in ("mtp3", "hyperdflash6"):
        assert STYLES[name][0] in svg
    assert "MTP (3)" in svg and not re.search(r"\d{4}-\d\d-\d\dT", svg)
    assert report.acceptance_chart([result("baseline", "a", 1.0, 1.0)]) is None


def test_every_method_has_a_colour_and_marker_that_no_other_has():
    assert set(KINDS) <= set(STYLES)
    assert len({colour for colour, _ in STYLES.values()}) == len(STYLES)
    assert len({marker for _, marker in STYLES.values()}) == len(STYLES)


COMMITTED = ROOT / "eval" / "results" / "tiny"


def test_the_committed_report_is_what_its_results_give(tmp_path):
    """Charts apart: another release of matplotlib may place a point otherwise."""
    (tmp_path / "results.json").write_text((COMMITTED / "results.json").read_text())
    report.write(tmp_path)
    for name in ("report.md", "results.json"):
        assert (tmp_path / name).read_text() == (COMMITTED / name).read_text()
    assert (tmp_path / "acceptance.svg").is_file()


def test_a_markdown_table_is_one_line_a_row_with_one_width(serving_study):
    content = json.loads((COMMITTED / "results.json").read_text())
    content["rows"][1]["benchmark"] = "a|b"
    text = report.markdown({**content, "serving": serving_study}, chart=True)
    blocks = [b for b in text.split("\n\n") if b.startswith("|")]
    assert len(blocks) >= 8
    for block in blocks:
        lines = block.split("\n")
        assert set(lines[1]) == {"|", "-"}
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    titles = re.findall(r"^## .*", text, re.M)
    assert len(set(titles)) == len(titles) >= 6
    assert "\n\n\n" not in text
