"""``hyperdflash demo`` without servers: what it refuses, and its summary."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from eval.client import Answer
from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands import demo
from sglang_hyperdflash.tools.ownership import lock
from tests.conftest import EXAMPLE, ROOT
from tests.unit.eval.fake_server import FakeServer

PROMPT = {
    "kind": "addition",
    "messages": [{"role": "user", "content": "Add 1 and 1."}],
    "answer": "2",
}


@pytest.fixture
def said(tmp_path, monkeypatch, capsys):
    """Runs the demo without any server; gives what it said on standard error."""

    def no_server(*_, **__):
        raise AssertionError("a server was started")

    monkeypatch.setattr(demo, "Server", no_server)

    def run(*options: str) -> str:
        command = ["demo", "--out", str(tmp_path / "demo.json"), *options]
        assert main(command) == 2
        return capsys.readouterr().err

    return run


def test_only_a_demo_s_own_report_is_written_over(tmp_path, said, monkeypatch):
    """Found as: any file that --out named was replaced."""
    mine = tmp_path / "demo.json"
    for content in ("notes", '{"mine": 1}', "[]"):
        mine.write_text(content)
        assert "expected no file, or the report of an earlier demo" in said()
        assert mine.read_text() == content
    assert "expected no file" in said("--out", str(EXAMPLE / "prompts.jsonl"))
    mine.write_text(json.dumps({"outputs_identical": True}))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="a server was started"):
        main(["demo", "--out", "demo.json"])


def test_a_second_demo_is_refused(tmp_path, said):
    """Found as: two demos wrote into one folder of logs and one report."""
    with lock(tmp_path / "demo-logs", demo.KIND):
        assert f"{tmp_path / 'demo-logs'} is in use by process {os.getpid()}" in said()


def test_an_installed_package_asks_for_a_checkout(tmp_path, said, monkeypatch):
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    message = said()
    assert str(tmp_path / "examples") in message and "make demo" in message


def test_the_command_finds_eval_from_any_folder(tmp_path):
    """As the console script starts it: neither the checkout nor ``eval`` is on the path."""
    source = "from sglang_hyperdflash.commands import demo; demo.find_example(); import eval.client"
    path = f"import sys; sys.path = [p for p in sys.path if p]; sys.path.append({str(ROOT)!r}); "
    path += "import sglang_hyperdflash; sys.path.pop(); sys.modules.pop('eval', None); "
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    code = [sys.executable, "-c", path + source]
    ended = subprocess.run(code, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("rounds, tau, said", [(0, None, "not measured"), (3, 2.0, "2.00")])
def test_without_a_verification_round_nothing_is_measured(capsys, tmp_path, rounds, tau, said):
    """Found as: one token an answer, and a tau of 0.00."""
    demo.find_example()
    answer = Answer([[1]], ["1 + 1 = 2"], 1.0, rounds, rounds, [0, rounds])
    entry = demo.compare(PROMPT, {"baseline": [answer], "hyperdflash2": [answer]}, "identical")
    result = demo.summarise([entry], [answer.histogram], 1, "float32")
    demo.print_answer(1, entry)
    demo.print_summary(result, tmp_path / "demo.json")
    printed = capsys.readouterr().out
    assert entry["tau"] == result["tau"] == tau
    assert f"    tau {said}, 1 tokens" in printed
    assert f"included): {said}\n" in printed


@pytest.mark.parametrize(
    "dtype, gap, code, ties, faults",
    [
        *[("float32", None, 0, 0, 0), ("float32", 0.0, 1, 0, 12)],
        *[("bfloat16", None, 0, 0, 0), ("bfloat16", 0.2, 0, 12, 0), ("bfloat16", 0.5, 1, 0, 12)],
    ],
)
def test_in_fp32_any_difference_is_a_fault_and_in_bf16_one_past_a_tie(
    tmp_path, monkeypatch, capsys, dtype, gap, code, ties, faults
):
    """Found as: bf16, which a GPU needs, would have failed the demo at a tie."""

    class Fake(FakeServer):
        def __init__(self, model, *arguments, log, environment) -> None:
            drafts = "--speculative-algorithm" in arguments
            third = 91 if drafts and gap is not None else 90
            logits = {90: 20.0, 91: 20.0 - (gap or 0.0)}
            histogram = [1, 1] if drafts else []
            super().__init__(lambda _: [5, 5, third], histogram, logits=logits, dtype=dtype)

        def wait(self) -> Fake:
            return self

        def __enter__(self) -> Fake:
            return self

        def __exit__(self, *_) -> None:
            self.stop()

    monkeypatch.setattr(demo, "Server", Fake)
    out = tmp_path / "demo.json"
    assert main(["demo", "--out", str(out), "--rounds", "2"]) == code
    report = json.loads(out.read_text())
    assert (report["dtype"], report["ties"], report["faults"]) == (dtype, ties, faults)
    assert report["outputs_identical"] is (gap is None)
    assert not any(prompt["right"] for prompt in report["prompts"])
    assert f"faults, {'any' if dtype == 'float32' else 'past'}" in capsys.readouterr().out
