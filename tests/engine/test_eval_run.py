"""``python -m eval run`` and ``serving`` on real servers."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from eval.__main__ import main
from eval.client import Sampling, converse_all, messages_before
from eval.identity import Difference, data_type, logit_gap
from eval.methods import Method
from eval.runner import Plan, read_sealed
from eval.serving import Study, run
from sglang_hyperdflash.serving.width.settings import FULL, WIDTH
from tests.conftest import EXAMPLE
from tests.engine.conftest import FP32, chat_ids, first_difference_gaps

pytestmark = pytest.mark.xdist_group("pair")


@pytest.fixture
def data(tmp_path):
    lines = (EXAMPLE / "prompts.jsonl").read_text().splitlines()[:4]
    turns = [[json.loads(line)["messages"][-1]["content"]] for line in lines]
    text = "".join(json.dumps({"turns": entry}) + "\n" for entry in turns)
    (tmp_path / "own.jsonl").write_text(text)
    return tmp_path, turns


def test_rows_hold_what_the_servers_said(target_server, hyper_server, target_dir, data):
    folder, _ = data
    command = ["run", "--target", str(target_dir), "--out", str(folder / "out"), "--rounds", "2"]
    command += ["--methods", "baseline,hyperdflash6", "--server", f"baseline={target_server.url}"]
    command += ["--server", f"hyperdflash6={hyper_server.url}", "--data-dir", str(folder)]
    assert main([*command, "--benchmarks", "own", "--max-new-tokens", "48"]) == 0
    rows = json.loads((folder / "out" / "results.json").read_text())["rows"]
    ours = next(r for r in rows if r["method"] == "hyperdflash6")
    assert ours["identical_to_baseline"] is True and ours["compared_answers"] == 8
    assert 1.5 < ours["tau"] <= 7 and ours["verify_rounds"] > 0
    accepted = sum(ours["position_acceptance"])
    assert ours["tau"] == pytest.approx(1 + accepted)
    assert ours["round_cost"] == pytest.approx(ours["tau"] / ours["speedup"])


def test_a_logit_gap_is_the_target_s_own(target_server, target_dir, tokenizer, data):
    """What the server says of two tokens equals the logits of the target's plain torch form."""
    _, turns = data
    greedy = Sampling(0.0, 12)
    conversations = [[turns[0][0], turns[1][0]], turns[2]]
    answers, _ = converse_all(target_server.url, conversations, greedy, 2)
    assert data_type(target_server.url) == "float32"
    for (asked, turn), at in zip(((0, 1), (1, 0)), (5, 0), strict=True):
        answer = asdict(answers[asked])
        expected = answer["output_ids"][turn][at]
        difference = Difference(asked, turn, at, expected, (expected + 100) % 500)
        gap = logit_gap(target_server.url, conversations[asked], answer, difference, greedy)
        messages = messages_before(conversations[asked], answer["texts"], turn)
        prompt = chat_ids(tokenizer, messages)
        changed = [*answer["output_ids"][turn][:at], difference.found]
        (real,) = first_difference_gaps(
            target_dir, [prompt], [answer["output_ids"][turn][: at + 1]], [changed]
        )
        assert gap == pytest.approx(real, abs=2e-3) and gap > 0.05


@pytest.mark.slow
def test_the_serving_study_measures_throughput_and_latency(target_dir, drafter_dir, data):
    folder, turns = data
    draft = ("--speculative-draft-model-path", str(drafter_dir))
    options = ("--speculative-algorithm", "HYPERDFLASH", *draft)
    ours = Method("hyperdflash6", options, 6, environment=((WIDTH, FULL),))
    out = folder / "out"
    plan = Plan(str(target_dir), (ours,), {}, (), 1, 48, out, server_args=FP32, together=False)
    content = run(Study(plan, tuple(turn for (turn,) in turns), (1, 2), (2.0,), 4))
    assert [e["concurrency"] for e in content["concurrency"]["hyperdflash6"]] == [1, 2]
    (poisson,) = content["poisson"]["hyperdflash6"]
    assert poisson["requests"] == 4 and 0 < poisson["ttft_ms"][0] <= poisson["ttft_ms"][1]
    stored = read_sealed(out / "serving.json")
    assert {name: stored[name] for name in content} == content
