"""What ``python -m eval`` measures on real servers."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

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
def turns() -> list[str]:
    lines = (EXAMPLE / "prompts.jsonl").read_text().splitlines()[:4]
    return [json.loads(line)["messages"][-1]["content"] for line in lines]


def test_a_logit_gap_is_the_target_s_own(target_server, target_dir, tokenizer, turns):
    """What the server says of two tokens equals the logits of the target's plain torch form."""
    greedy, conversations = Sampling(0.0, 12), [turns[:2], turns[2:3]]
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
def test_the_serving_study_measures_throughput_and_latency(
    target_dir, drafter_dir, turns, tmp_path
):
    draft = ("--speculative-draft-model-path", str(drafter_dir))
    options = ("--speculative-algorithm", "HYPERDFLASH", *draft)
    ours = Method("hyperdflash6", options, 6, environment=((WIDTH, FULL),))
    plan = Plan(str(target_dir), (ours,), {}, (), 1, 48, tmp_path, server_args=FP32, together=False)
    content = run(Study(plan, tuple(turns), (1, 2), (2.0,), 4))
    assert [e["concurrency"] for e in content["concurrency"]["hyperdflash6"]] == [1, 2]
    (poisson,) = content["poisson"]["hyperdflash6"]
    assert poisson["requests"] == 4 and 0 < poisson["ttft_ms"][0] <= poisson["ttft_ms"][1]
    stored = read_sealed(tmp_path / "serving.json")
    assert {name: stored[name] for name in content} == content
