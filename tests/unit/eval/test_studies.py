"""The studies next to a run: widths by load, operations of a step."""

import json
from xml.etree import ElementTree

import pytest
import torch

from eval import step_flops, width
from eval.__main__ import main
from eval.methods import Method
from eval.width import over, pooled, table, write_report
from sglang_hyperdflash.training.objective import Objective
from tests.conftest import ROOT

DRAFTER = ROOT / "examples/deepseek_v4_flash_config/drafter"
RATES = {"baseline": (80, 1000), "baseline-again": (81, 990), "full width": (140, 650)}
RATES |= {"adaptive width": (138, 980), "untrained": (79, 985)}


def test_adaptive_widths_are_compared_with_the_better_of_both_in_the_same_rounds(tmp_path):
    rows = [
        {
            **{"temperature": 0.0, "concurrency": level, "method": method},
            "tokens_per_s": [0.9 * rate[i], rate[i], 1.2 * rate[i]],
            "rounds_by_width": {"1": 25, "7": 75} if method == "adaptive width" else {},
        }
        for i, level in enumerate((1, 64))
        for method, rate in RATES.items()
    ]
    note = table(rows, 0.0).note
    assert "0.983 (0.980 to 0.985)" in note and "1.001 (0.991 to 1.011)" in note
    ratios = ("0.99 (0.99 to 0.99)", "1: 25%, 7: 75%", "0.99 (0.99 to 0.99)", "1.01 (1.01 to 1.01)")
    first, last = table(rows, 0.0).lines
    assert first == ("1", "80", "140", "138", *ratios)
    assert last[:5] == ("64", "1000", "650", "980", "0.98 (0.98 to 0.98)")
    # A machine that is slow for one round is slow for both servers.
    base, ours = {"tokens_per_s": [100.0, 50.0, 80.0]}, {"tokens_per_s": [120.0, 62.0, 84.0]}
    assert over(ours, base) == "1.20 (1.05 to 1.24)" and over(None, base) == "-"
    assert pooled([0.9] * 8) == "0.900 (0.900 to 0.900)" and pooled([0.9]).startswith("0.900")
    assert pooled([0.8, 1.25] * 2) == "1.000 (0.777 to 1.287)"
    write_report(tmp_path, {"rows": rows, "provenance": {"device": "d", "commit": "c"}})
    assert "| 64 | 1000 | 650 | 980 |" in (tmp_path / "report.md").read_text()
    ElementTree.parse(tmp_path / "throughput.svg")


def test_a_study_of_widths_repeats_prompts_and_does_not_count_the_first_round(
    data, tmp_path, fake, monkeypatch
):
    settings = [dict(m.environment).get("HYPERDFLASH_WIDTH") for m in width.methods_of("a", "b")]
    assert settings == [None, "full", "adaptive", "adaptive"]
    baseline, drafts = fake(4, []), fake(4, [1, 0, 1], widths=[0, 1, 0, 0, 0, 0, 0, 1])
    methods = (
        Method("baseline", (), 0, baseline.url),
        Method("full width", (), 6, drafts.url),
        Method("adaptive width", (), 6, drafts.url),
    )
    monkeypatch.setattr(width, "methods_of", lambda draft, untrained: methods)
    monkeypatch.setattr(width, "WAVES", 2)
    monkeypatch.setattr(width, "FEWEST", 7)
    options = ["width", "--target", "any", "--draft", "d", "--data-dir", str(data)]
    options += ["--benchmarks", "gsm8k", "--levels", "1", "4", "--temperature", "0"]
    options += ["--rounds", "3", "--out", str(tmp_path / "out")]
    for _ in range(2):  # the second time nothing is left to do
        assert main(options) == 0
        # 7 requests at 1 in flight, 8 at 4, in three rounds, of the baseline twice.
        assert len(baseline.requests) == 2 * 3 * (7 + 8)
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert len(rows) == 2 * 4 and all(len(row["tokens_per_s"]) == 2 for row in rows)
    widths = {(row["concurrency"], row["method"]): row["rounds_by_width"] for row in rows}
    # Each request had a round of width 1 and one of width 7, in two rounds that count.
    assert widths[1, "adaptive width"] == {"1": 14, "7": 14} and widths[4, "full width"]["7"] == 16
    assert widths[1, "baseline"] == {}
    asked = [tuple(m["content"] for m in request["messages"]) for request in baseline.requests]
    assert len(set(asked)) == 6 and {len(turns) for turns in asked} == {1}
    assert main([*options, "--rounds", "4"]) == 2


def test_a_steps_products_are_bf16_but_where_the_file_says_fp32():
    raw = json.loads((DRAFTER / "config.json").read_bytes())
    step, loss = step_flops.Step(samples=1, tokens=300, anchors=8), Objective(loss="acceptance")
    by_type = step_flops.count(raw, step, loss).by_dtype
    assert by_type["float32"] < 0.05 * by_type["bfloat16"]
    exact = step_flops.count(raw, step, loss, bf16=False).by_dtype
    assert exact == {"float32": by_type.total()}


def test_an_lm_head_is_not_cast_in_the_checkpoints_type():
    raw = json.loads((DRAFTER / "config.json").read_bytes())
    step = step_flops.Step(samples=1, tokens=300, anchors=8)
    kept, cast = (step_flops.count(raw, step, ends=t) for t in (torch.bfloat16, torch.float32))
    assert kept.casts == kept.cast == 0 < cast.casts
    size = raw["vocab_size"] * raw["hidden_size"]
    assert cast.cast == cast.casts * size * (4 + 2)
    assert (kept.resident, cast.resident) == (2 * size * 2, 2 * size * 4)
    assert kept.moved == pytest.approx(cast.moved - cast.cast, rel=1e-3)
