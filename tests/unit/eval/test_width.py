"""The width study: its loads on a fake server, its table and chart."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from eval import width
from eval.__main__ import main
from eval.methods import Method
from eval.width import over, pooled, table, write_report

RATES = {"baseline": (80, 1000), "baseline-again": (81, 990), "full width": (140, 650)}
RATES |= {"adaptive width": (138, 980), "untrained": (79, 985)}


def rows() -> list[dict]:
    return [
        {
            "temperature": 0.0,
            "concurrency": level,
            "method": method,
            "tokens_per_s": [0.9 * rate[i], rate[i], 1.2 * rate[i]],
            "rounds_by_width": {"1": 25, "7": 75} if method == "adaptive width" else {},
        }
        for i, level in enumerate((1, 64))
        for method, rate in RATES.items()
    ]


def test_the_table_compares_with_the_better_of_both():
    found = table(rows(), 0.0)
    assert "Adaptive over the better 0.983 (0.980 to 0.985);" in found.note
    assert "Baseline over itself 1.001 (0.991 to 1.011)." in found.note
    ratios = ("0.99 (0.99 to 0.99)", "1: 25%, 7: 75%", "0.99 (0.99 to 0.99)", "1.01 (1.01 to 1.01)")
    assert found.lines[0] == ("1", "80", "140", "138", *ratios)
    assert found.lines[1][:5] == ("64", "1000", "650", "980", "0.98 (0.98 to 0.98)")


def test_a_ratio_is_of_the_same_rounds():
    """A machine that is slow for one round is slow for both servers."""
    base, found = {"tokens_per_s": [100.0, 50.0, 80.0]}, {"tokens_per_s": [120.0, 62.0, 84.0]}
    assert over(found, base) == "1.20 (1.05 to 1.24)"
    assert over(None, base) == "-"


def test_ratios_of_all_loads_are_pooled_by_their_logarithms():
    assert pooled([0.5, 2.0]).startswith("1.000 (")
    assert pooled([0.9] * 8) == "0.900 (0.900 to 0.900)" and pooled([0.9]).startswith("0.900")
    wide, narrow = pooled([0.8, 1.25] * 2), pooled([0.8, 1.25] * 50)
    assert (wide, narrow) == ("1.000 (0.777 to 1.287)", "1.000 (0.957 to 1.045)")


def test_the_report_holds_the_table_and_the_plot(tmp_path):
    write_report(tmp_path, {"rows": rows(), "provenance": {"device": "d", "commit": "c"}})
    text = (tmp_path / "report.md").read_text()
    assert "| 64 | 1000 | 650 | 980 |" in text and "](throughput.svg)" in text
    ElementTree.parse(tmp_path / "throughput.svg")


@pytest.fixture
def command(data, tmp_path, fake, monkeypatch):
    """A study of two loads on two fake servers, one of which drafts; and the servers."""
    baseline, drafts = fake(4, []), fake(4, [1, 0, 1], widths=[0, 1, 0, 0, 0, 0, 0, 1])

    def methods_of(draft, untrained):
        assert draft == "d" and untrained is None
        fixed = Method("full width", (), 6, drafts.url)
        adaptive = Method("adaptive width", (), 6, drafts.url)
        return Method("baseline", (), 0, baseline.url), fixed, adaptive

    monkeypatch.setattr(width, "methods_of", methods_of)
    options = ["width", "--target", "any", "--draft", "d", "--data-dir", str(data)]
    options += ["--benchmarks", "gsm8k", "--levels", "1", "4", "--temperature", "0"]
    return [*options, "--rounds", "3", "--out", str(tmp_path / "out")], baseline, drafts


def test_a_study_repeats_prompts_and_does_not_count_the_first_round(command, tmp_path):
    options, baseline, drafts = command
    assert main(options) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert len(found) == 2 * 4 and all(len(row["tokens_per_s"]) == 2 for row in found)
    of = {(row["concurrency"], row["method"]): row["rounds_by_width"] for row in found}
    # 24 requests at 1 in flight, 32 at 4; each of its two rounds had the widths 1 and 7.
    assert of[1, "adaptive width"] == {"1": 48, "7": 48} and of[4, "full width"]["7"] == 64
    assert of[1, "baseline"] == {}
    assert len(baseline.requests) == 2 * 3 * (24 + 32)
    # Six prompts, first turns alone.
    assert len({request["messages"][-1]["content"] for request in baseline.requests}) == 6
    assert all(len(request["messages"]) == 1 for request in baseline.requests)
    asked = len(drafts.requests)
    assert main(options) == 0 and len(drafts.requests) == asked
    assert main([*options, "--rounds", "4"]) == 2


def test_the_methods_differ_in_width_and_drafter():
    found = width.methods_of("trained", "random")
    assert [m.name for m in found] == ["baseline", "full width", "adaptive width", "untrained"]
    assert [dict(m.environment).get("HYPERDFLASH_WIDTH") for m in found[1:]] == [
        *("full", "adaptive", "adaptive")
    ]
    assert [m.arguments[-1] for m in found[1:]] == ["trained", "trained", "random"]
