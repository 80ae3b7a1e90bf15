"""The report's numbers: tau, intervals, speedups and verdicts; its tables and chart."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from eval import aggregate, report
from eval.aggregate import row_of
from eval.charts import INK, STYLES
from eval.methods import KINDS
from eval.report import Table

CELL = {"benchmark": "b", "temperature": 0.0, "thinking": "off", "concurrency": 1}
MTP = {"name": "mtp3", "num_drafts": 3}
IDS = [[1, 2], [3, 4]]


def unit(seconds: float, ids: list[list[int]], drafts=0, rounds=0) -> dict:
    """A unit of one-turn answers; drafts and rounds of each, or of all alike."""
    drafts, rounds = np.broadcast_to(drafts, len(ids)), np.broadcast_to(rounds, len(ids))
    fixed = {"texts": [""], "seconds": seconds / len(ids), "histogram": []}
    answers = [
        {"output_ids": [tokens], "correct_drafts": int(d), "verify_rounds": int(r), **fixed}
        for tokens, d, r in zip(ids, drafts, rounds, strict=True)
    ]
    return {"seconds": seconds, "answers": answers}


def result(name: str, benchmark: str, tau: float | None, speedup: float, **more) -> dict:
    row = {**CELL, "method": name, "benchmark": benchmark, "tau": tau, "speedup": speedup}
    row |= {"verify_rounds": 10, "tokens_per_s": 100.0, "num_prompts": 2, "round_cost": 1.0}
    return row | more


def test_speedup_is_over_the_baseline_of_the_same_round():
    target = [unit(4.0, IDS), unit(8.0, IDS), {"error": "gone"}]
    ours = [unit(2.0, IDS, 3, 2), unit(2.0, [[1, 2], [3, 9]], 3, 2), unit(1.0, IDS, 3, 2)]
    row = row_of(CELL, MTP, ours, target)
    assert row["speedup_range"] == [2.0, 4.0] and row["speedup"] == 3.0
    assert row["tau"] == 2.5 and row["rounds"] == 3
    assert (row["identical_answers"], row["compared_answers"]) == (5, 6)
    assert row["identical_to_baseline"] is False
    assert [d["verdict"] for d in row["differences"]] == ["not measured"]
    missing = row_of(CELL, MTP, [None], [None])
    assert missing["error"] == "not run" and missing["tau"] is None and "counts" not in missing
    # What was not written is not compared.
    nothing, some = unit(1.0, [[], []]), unit(1.0, [[1], [2]], 3, 2)
    row = row_of(CELL, MTP, [some], [nothing])
    assert row["speedup"] is None and row["tau"] == 2.5
    row = row_of(CELL, MTP, [some, some], [nothing, unit(2.0, [[1], [2]])])
    assert row["speedup_range"] == [2.0, 2.0]


def test_an_interval_is_of_all_rounds_and_holds_its_estimate():
    """At temperature 1 every round answers otherwise: one round's interval can miss their mean."""
    rng = np.random.default_rng(1)
    units = [unit(1.0, [[1]] * 12, rng.poisson(accepted, 12), 20) for accepted in (10, 40, 70)]
    row = row_of(CELL | {"temperature": 1.0}, MTP, units, [None] * 3)
    drafts = sum(a["correct_drafts"] for u in units for a in u["answers"])
    assert row["tau"] == pytest.approx(1 + drafts / (3 * 12 * 20))
    low, high = row["tau_interval"]
    assert low < row["tau"] < high < row["tau"] + 0.3
    for counts in (None, np.ones((2, 1)), np.zeros((2, 3))):
        assert aggregate.tau_interval(counts) is None


def test_tau_of_changing_widths_is_over_all_rounds_and_positions_over_those_that_had_them():
    """Five rounds of width 1 and five of width 7 give four tokens a round, not seven."""
    rows = []
    # Width, accepted drafts, rounds.
    for benchmark, each in (("a", [(1, 0, 5), (7, 6, 5)]), ("b", [(4, 3, 20), (4, 0, 10)])):
        widths, histogram = [0] * 8, [0] * 7
        for width, accepted, rounds in each:
            widths[width] += rounds
            histogram[accepted] += rounds
        whole = unit(1.0, [[1] * 8], sum(k * n for k, n in enumerate(histogram)), sum(widths))
        whole["answers"][0] |= {"histogram": histogram, "widths": widths}
        adaptive = {"name": "hyperdflash-adaptive", "num_drafts": 6}
        rows.append(row_of(CELL | {"benchmark": benchmark}, adaptive, [whole], [None]))
    assert rows[0]["position_acceptance"] == [1.0] * 6 and rows[0]["tau"] == 4.0
    assert rows[0]["drafted_rounds"] == [5] * 6 and rows[1]["drafted_rounds"] == [30] * 3 + [0] * 3
    (table,) = report.result_tables(rows[:1], aggregate.summaries(rows[:1]))
    assert table.lines[0][1:] == ("4.00", "not measured", *("1.00",) * 6)
    # The second benchmark never drafted past the third: it says nothing of the rounds that did.
    assert aggregate.pooled_positions(rows) == pytest.approx([25 / 35] * 3 + [1.0] * 3)
    assert aggregate.pooled_tau(rows) == pytest.approx((10 * 4 + 30 * 3) / 40)
    assert aggregate.pooled_positions(rows[1:]) == pytest.approx([2 / 3] * 3 + [0.0] * 3)
    assert aggregate.pooled_tau([result("mtp3", "a", None, 1.0, verify_rounds=0)]) is None


def measured(better: int, seconds: float = 1.0):
    """Rows and summaries of two benchmarks; ours accepts ``better`` drafts more on every prompt."""
    rows, rng = [], np.random.default_rng(2)
    ids = [[1] * 8] * 20
    for benchmark in ("a", "b"):
        cell, base = CELL | {"benchmark": benchmark}, rng.integers(5, 60, 20)
        baseline = [unit(2.0, ids), unit(2.0, ids)]
        units = {
            "baseline": (0, baseline),
            "mtp3": (3, [unit(1.0, ids, base, 20)] * 2),
            "hyperdflash6": (6, [unit(seconds, ids, base + better, 20)] * 2),
            "baseline-again": (0, [unit(1.9, ids), unit(2.1, ids)]),
        }
        for name, (drafts, some) in units.items():
            rows.append(row_of(cell, {"name": name, "num_drafts": drafts}, some, baseline))
    return rows, aggregate.summaries(rows)


@pytest.mark.parametrize("better, says", [(4, "higher"), (-4, "lower"), (0, "no difference shown")])
def test_a_paired_interval_shows_a_difference_far_smaller_than_the_spread_of_prompts(better, says):
    rows, summaries = measured(better)
    (entry,) = aggregate.comparisons(rows, summaries)
    ours, theirs = entry["tau"]
    assert ours - theirs == pytest.approx(better / 20)
    assert report.tau_verdict(entry["tau_difference_interval"]) == says
    by_method = {s["method"]: s for s in summaries}
    low, high = by_method["hyperdflash6"]["tau_interval"]
    assert high - low > 0.3 > abs(better / 20)  # unpaired, nothing could be said
    assert by_method["baseline-again"]["tau"] is None
    assert by_method["baseline"]["mean_speedup"] == 1.0


def test_a_speedup_counts_only_outside_of_the_noise_floor():
    for seconds, says in ((0.5, "higher"), (2.0, "lower"), (1.02, "within the noise floor")):
        (entry,) = aggregate.comparisons(*measured(0, seconds))
        assert entry["noise"] == pytest.approx([2.0 / 2.1, 2.0 / 1.9])
        assert report.speedup_verdict(entry) == says
    assert report.speedup_verdict({"speedup": [2.0, 1.0], "noise": None}) != "higher"


def test_copies_are_compared_with_the_same_method_without_them():
    names = ("hyperdflash6", "hyperdflash-copies", "hyperdflash2")
    rows = [result(name, "gsm8k", 3.0, 2.0) for name in names]
    (entry,) = aggregate.comparisons(rows, aggregate.summaries(rows))
    assert (entry["ours"], entry["rival"]) == ("hyperdflash-copies", "hyperdflash6")


def test_nothing_is_compared_with_a_failed_benchmark():
    rows = [
        result("mtp3", "gsm8k", 3.0, 2.0),
        result("hyperdflash6", "gsm8k", 4.0, 1.5),
        result("mtp3", "mt-bench", 2.0, 2.0),
        result("hyperdflash6", "mt-bench", 3.0, 1.5, error="died"),
    ]
    summaries = aggregate.summaries(rows)
    assert aggregate.comparisons(rows, summaries) == []
    (table,) = report.result_tables(rows, summaries)
    assert [line[:3] for line in table.lines] == [
        ("MTP (3)", "2.50", "2.00"),
        ("HyperDFlash (6)", "not measured", "not measured"),
    ]
    failed = [{**row, "tokens_per_s": None} for row in rows[-1:]]
    assert report.cell_table(failed).lines[0][5:] == ("died", "-", "-", "-", "-")


def contrast(*colours: str) -> float:
    """WCAG's contrast ratio of two colours; 3 is its least for graphics."""
    light = []
    for colour in colours:
        shares = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in shares]
        light.append(sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True)))
    return (max(light) + 0.05) / (min(light) + 0.05)


def test_a_chart_is_the_same_bytes_for_the_same_numbers():
    rows = [
        result(name, "a", 2.0, 1.0, position_acceptance=shares, drafted_rounds=[9, 9])
        for name, shares in (("mtp3", [0.6, 0.3]), ("hyperdflash6", [0.5, 0.4]))
    ]
    svg = report.acceptance_chart(rows)
    assert svg == report.acceptance_chart(rows)
    ElementTree.fromstring(svg)
    assert all(STYLES[name][0] in svg for name in ("mtp3", "hyperdflash6")) and "MTP (3)" in svg
    assert not re.search(r"\d{4}-\d\d-\d\dT", svg)
    assert report.acceptance_chart([result("baseline", "a", 1.0, 1.0)]) is None
    assert "fill: #ffffff" not in svg
    # No two methods look alike, and each can be told from a white and from a black page.
    assert set(KINDS) <= set(STYLES)
    assert all(len(set(column)) == len(STYLES) for column in zip(*STYLES.values(), strict=True))
    for colour in (INK, *(colour for colour, _ in STYLES.values())):
        assert contrast(colour, "#ffffff") >= 3 and contrast(colour, "#0d1117") >= 3, colour


def test_a_markdown_table_is_one_line_a_row():
    lines = Table("Title", ("a", "b"), (("x|y", "1"), ("z", "2")), "Note.").markdown()
    assert lines[2:] == ["| a | b |", "|---|---|", "| x\\|y | 1 |", "| z | 2 |", "", "Note.", ""]
