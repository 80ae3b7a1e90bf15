"""``hyperdflash demo`` without servers: where it starts, and its summary."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from eval.client import Answer
from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands import demo
from tests.conftest import ROOT
from tests.unit.eval.fake_server import FakeServer

PROMPT = {
    "kind": "addition",
    "messages": [{"role": "user", "content": "Add 1 and 1."}],
    "answer": "2",
}


def test_it_runs_only_in_a_checkout(tmp_path, monkeypatch, refused):
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    assert str(tmp_path / "examples") in refused("demo", "--out", tmp_path / "demo.json")


def test_the_command_finds_eval_from_any_folder(tmp_path):
    """As the console script starts it: neither the checkout nor ``eval`` is on the path."""
    source = "from sglang_hyperdflash.commands import demo; demo.find_example(); import eval.client"
    path = f"import sys; sys.path = [p for p in sys.path if p]; sys.path.append({str(ROOT)!r}); "
    path += "import sglang_hyperdflash; sys.path.pop(); sys.modules.pop('eval', None); "
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    code = [sys.executable, "-c", path + source]
    ended = subprocess.run(code, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("rounds, tau, shown", [(0, None, "not measured"), (3, 3.0, "3.00")])
def test_without_a_verification_round_nothing_is_measured(capsys, tmp_path, rounds, tau, shown):
    demo.find_example()
    answer = Answer([[1]], ["1 + 1 = 2"], 1.0, 2 * rounds, rounds, [0, 0, rounds])
    entry = demo.compare(PROMPT, {"baseline": [answer], "hyperdflash2": [answer]}, "identical")
    result = demo.summarise([entry], [answer.histogram], 1, "float32")
    demo.print_answer(1, entry)
    demo.print_summary(result, tmp_path / "demo.json")
    assert entry["tau"] == result["tau"] == tau
    assert capsys.readouterr().out.count(shown) >= 2


@pytest.mark.parametrize(
    "dtype, gap, code, ties, faults",
    [
        *[("float32", None, 0, 0, 0), ("float32", 0.0, 1, 0, 12)],
        *[("bfloat16", 0.2, 0, 12, 0), ("bfloat16", 0.5, 1, 0, 12)],
    ],
)
def test_in_fp32_any_difference_is_a_fault_and_in_bf16_one_past_a_tie(
    tmp_path, monkeypatch, dtype, gap, code, ties, faults
):
    class Fake(FakeServer):
        def __init__(self, model, *arguments, log, environment) -> None:
            drafts = "--speculative-algorithm" in arguments
            third = 91 if drafts and gap is not None else 90
            logits = {90: 20.0, 91: 20.0 - (gap or 0.0)}
            histogram = [1, 1] if drafts else []
            super().__init__(lambda _: [5, 5, third], histogram, logits=logits, dtype=dtype)

        def wait(self) -> Fake:
            return self

    monkeypatch.setattr(demo, "Server", Fake)
    out = tmp_path / "demo.json"
    out.write_text(json.dumps({"outputs_identical": True}))  # of an earlier demo
    assert main(["demo", "--out", str(out), "--rounds", "2"]) == code
    report = json.loads(out.read_text())
    assert (report["dtype"], report["ties"], report["faults"]) == (dtype, ties, faults)
    assert report["outputs_identical"] is (gap is None)
    assert not any(prompt["right"] for prompt in report["prompts"])
