"""The commands that start servers, and what ``python -m eval`` measures on them."""

import json
from dataclasses import asdict, replace
from functools import partial

import pytest

from eval import demo
from eval.client import Sampling, converse_all, messages_before
from eval.identity import Difference, data_type, logit_gap
from eval.methods import Method
from eval.runner import Plan, read_sealed
from eval.serving import Study, run
from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands import command_server
from sglang_hyperdflash.commands.train import check_store
from sglang_hyperdflash.draft.config import load_config
from sglang_hyperdflash.serving.settings import FULL, WIDTH
from sglang_hyperdflash.targets.files import TargetFiles
from sglang_hyperdflash.tools.server_process import Server
from sglang_hyperdflash.training.local_target import BorrowedTarget, LocalTarget
from sglang_hyperdflash.training.samples import OnlineFeatures
from sglang_hyperdflash.training.store.reader import StoreReader
from tests.conftest import EXAMPLE
from tests.engine.conftest import FP32, chat_ids, first_difference_gaps, greedy
from tests.warm_start.client import start

pair = pytest.mark.xdist_group("pair")


def demo_questions() -> list[str]:
    lines = (EXAMPLE / "prompts.jsonl").read_text().splitlines()
    return [json.loads(line)["messages"][-1]["content"] for line in lines]


class Kept(Server):
    """A running server that a command takes for its own: leaving it does not end it."""

    def __init__(self, server: Server) -> None:
        vars(self).update(vars(server))

    def __exit__(self, *exception) -> None:
        pass


@pytest.mark.slow
def test_the_whole_demo(tmp_path, capsys):
    """The drafts of the page are those that the server verified, and random weights draft none."""
    out = tmp_path / "demo.json"
    assert demo.main(["--rounds", "1", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert (report["outputs_identical"], report["provenance"]["dtype"]) == (True, "float32")
    assert len({p["kind"] for p in report["prompts"]}) == len(report["prompts"]) == 13
    assert sum(p["right"] is True for p in report["prompts"]) > 6
    for prompt in report["prompts"]:
        ids = [s["answers"][0]["output_ids"] for s in prompt["servers"].values()]
        assert len(ids) == 4 and all(each == ids[0] != [] for each in ids)
    taus = [server["tau"] for server in report["servers"].values()]
    assert taus[:2] == [1.0, 1.0] and taus[2] > 3 and taus[3] < 1.1
    assert taus[2] > report["prompts"][-1]["servers"]["hyperdflash2"]["tau"] > 1
    first = report["prompts"][0]["servers"]["hyperdflash2"]["answers"][0]["texts"][0]
    drafted = "".join(each["accepted"] + each["bonus"] for each in report["rounds"])
    assert drafted.startswith(first)


@pair
def test_generate_goes_on_where_it_was_cut(
    tmp_path, capsys, monkeypatch, target_dir, drafter_dir, target_server, hyper_server, tokenizer
):
    monkeypatch.setattr(command_server, "Server", lambda *_, **__: Kept(hyper_server))
    lines = [json.loads(x) for x in (EXAMPLE / "prompts.jsonl").read_text().splitlines()]
    records = [{"messages": line["messages"]} for line in lines]
    records += [{"prompt": "Tom has 3 apples."}, {"turns": ["one tea please", "thanks"]}]
    data, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    command = ["generate", "--dtype", "float32", "--max-new-tokens", "64", "--concurrency", "2"]
    command += ["--model", str(target_dir), "--draft", str(drafter_dir)]
    command += ["--input", str(data), "--output", str(output)]
    assert main(command) == 0

    def check() -> None:
        answers = [json.loads(line) for line in output.read_text().splitlines()]
        assert sorted(a["index"] for a in answers) == list(range(len(records)))
        by_index = {a["index"]: a["outputs"] for a in answers}
        assert len(by_index[len(records) - 1]) == 2
        prompt = tokenizer.encode("Tom has 3 apples.", add_special_tokens=True)
        expected = greedy(target_server, prompt, 64, sampling={"ignore_eos": False})["text"]
        assert by_index[len(records) - 2] == [expected]

    check()
    before = output.read_bytes().splitlines(keepends=True)
    kept = b"".join(before[:5])
    output.write_bytes(kept + before[5][:9])  # a line cut in the middle, as a crash leaves it
    assert main(command) == 0
    assert output.read_bytes().startswith(kept)
    check()
    assert "Traceback" not in capsys.readouterr().err


ENGINE = {"chunked_prefill_size": 64, "max_total_tokens": 8192, "mem_fraction_static": 0.2}


@pytest.mark.slow
@pytest.mark.parametrize("shares", [1, 2])
def test_captured_states_are_the_targets_own(
    monkeypatch, target_dir, drafter_dir, tmp_path, shares
):
    """Conversations of one answer and of two, shorter and longer than a prefill chunk."""
    monkeypatch.setattr(command_server, "Server", partial(command_server.Server, start=start))
    data, out = tmp_path / "data.jsonl", tmp_path / "states"
    questions = demo_questions()[:6]
    answer = {"role": "assistant", "content": "It costs 3 + 4 = 7 dollars. " * 6}
    chats = [
        [{"role": "user", "content": q}, answer] * (1 + i % 2) for i, q in enumerate(questions)
    ]
    data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    command = ["capture", "--target", str(target_dir), "--data", str(data), "--out", str(out)]
    command += ["--dtype", "float32", "--shard-mib", "1", "--engine-args", json.dumps(ENGINE)]
    for i in range(shares):
        assert main([*command, "--share", f"{i + 1}/{shares}"]) == 0
    source, target = StoreReader(out), LocalTarget(target_dir)
    online = OnlineFeatures(target, source.samples)
    assert [len(s.spans) for s in source.samples] == [1, 2, 1, 2, 1, 2]
    assert max(len(s.tokens) for s in source.samples) > 2 * ENGINE["chunked_prefill_size"]

    def assert_the_targets() -> None:
        for i in range(len(source.samples)):
            found, wanted = StoreReader(out).states([i]).residual, online.states([i]).residual
            # Relative to their size: residuals reach the hundreds.
            assert found.shape == wanted.shape
            assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()

    assert_the_targets()
    shards = sorted((out / "shards").iterdir())
    assert len(shards) > 1
    if shares == 2:  # one more run writes the shard that is missing, and no other
        before, last = {p: p.stat().st_mtime_ns for p in shards}, shards[-1]
        last.unlink()
        assert main([*command, "--share", "2/2"]) == 0
        assert [p for p in shards if p.stat().st_mtime_ns != before[p]] == [last]
        assert_the_targets()
    config, norm = load_config(drafter_dir), BorrowedTarget(TargetFiles(str(target_dir))).final.norm
    check_store(source, config, norm)
    with pytest.raises(ValueError, match="norm_fingerprint"):
        check_store(source, config, norm + 1)
    other = replace(config, target=replace(config.target, hc_head_fingerprint="other"))
    with pytest.raises(ValueError, match="hc_head_fingerprint"):
        check_store(source, other, norm)


@pair
def test_a_logit_gap_is_the_target_s_own(target_server, target_dir, tokenizer):
    """What the server says of two tokens equals the logits of the target's plain torch form."""
    argmax, questions = Sampling(0.0, 12), demo_questions()
    conversations = [questions[:2], questions[2:3]]
    answers, _ = converse_all(target_server.url, conversations, argmax, 2)
    assert data_type(target_server.url) == "float32"
    for (asked, turn), at in zip(((0, 1), (1, 0)), (5, 0), strict=True):
        answer = asdict(answers[asked])
        expected = answer["output_ids"][turn][at]
        difference = Difference(asked, turn, at, expected, (expected + 100) % 500)
        gap = logit_gap(target_server.url, conversations[asked], answer, difference, argmax)
        messages = messages_before(conversations[asked], answer["texts"], turn)
        prompt = chat_ids(tokenizer, messages)
        changed = [*answer["output_ids"][turn][:at], difference.found]
        (real,) = first_difference_gaps(
            target_dir, [prompt], [answer["output_ids"][turn][: at + 1]], [changed]
        )
        assert gap == pytest.approx(real, abs=2e-3) and gap > 0.05


@pytest.mark.slow
@pair
def test_the_serving_study_measures_throughput_and_latency(target_dir, drafter_dir, tmp_path):
    draft = ("--speculative-draft-model-path", str(drafter_dir))
    options = ("--speculative-algorithm", "HYPERDFLASH", *draft)
    ours = Method("hyperdflash6", options, 6, environment=((WIDTH, FULL),))
    plan = Plan(str(target_dir), (ours,), {}, (), 1, 48, tmp_path, server_args=FP32, together=False)
    content = run(Study(plan, tuple(demo_questions()[:4]), (1, 2), (2.0,), 4))
    assert [e["concurrency"] for e in content["concurrency"]["hyperdflash6"]] == [1, 2]
    (poisson,) = content["poisson"]["hyperdflash6"]
    assert poisson["requests"] == 4 and 0 < poisson["ttft_ms"][0] <= poisson["ttft_ms"][1]
    stored = read_sealed(tmp_path / "serving.json")
    assert {name: stored[name] for name in content} == content
