"""``hyperdflash demo`` without servers: where it starts, and its summary."""

import json
import os
import subprocess
import sys

import pytest

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands import demo
from tests.conftest import ROOT
from tests.unit.eval.fake_server import FakeServer


def test_it_runs_only_in_a_checkout(tmp_path, monkeypatch, refused):
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    assert str(tmp_path / "examples") in refused("demo", "--out", tmp_path / "demo.json")


@pytest.mark.heavy
def test_the_command_finds_eval_from_any_folder(tmp_path):
    """As the console script starts it: neither the checkout nor ``eval`` is on the path."""
    source = "from sglang_hyperdflash.commands import demo; demo.find_example(); import eval.client"
    path = f"import sys; sys.path = [p for p in sys.path if p]; sys.path.append({str(ROOT)!r}); "
    path += "import sglang_hyperdflash; sys.path.pop(); sys.modules.pop('eval', None); "
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    code = [sys.executable, "-c", path + source]
    ended = subprocess.run(code, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    "dtype, gap, code, ties, faults, rounds, tau",
    [
        *[("float32", None, 0, 0, 0, [1, 1], 1.5), ("float32", 0.0, 1, 0, 12, [1, 1], 1.5)],
        *[("bfloat16", 0.2, 0, 12, 0, [1, 1], 1.5), ("bfloat16", 0.5, 1, 0, 12, [], None)],
    ],
)
def test_in_fp32_any_difference_is_a_fault_and_in_bf16_one_past_a_tie(
    tmp_path, monkeypatch, capsys, dtype, gap, code, ties, faults, rounds, tau
):
    """Without a verification round no accept length is measured."""

    class Fake(FakeServer):
        def __init__(self, model, *arguments, log, environment) -> None:
            drafts = "--speculative-algorithm" in arguments
            third = 91 if drafts and gap is not None else 90
            logits = {90: 20.0, 91: 20.0 - (gap or 0.0)}
            histogram, answer = rounds if drafts else [], [5, 5, third]
            super().__init__(lambda _: answer, histogram, logits=logits, dtype=dtype)

        def wait(self):
            return self

    monkeypatch.setattr(demo, "Server", Fake)
    out = tmp_path / "demo.json"
    out.write_text(json.dumps({"outputs_identical": True}))  # of an earlier demo
    assert main(["demo", "--out", str(out), "--rounds", "2"]) == code
    report = json.loads(out.read_text())
    assert (report["dtype"], report["ties"], report["faults"]) == (dtype, ties, faults)
    assert report["outputs_identical"] is (gap is None)
    assert not any(prompt["right"] for prompt in report["prompts"])
    assert {prompt["tau"] for prompt in report["prompts"]} == {report["tau"]} == {tau}
    assert ("not measured" in capsys.readouterr().out) is (tau is None)
