"""``python -m eval.demo`` without servers: what it refuses, and its summary."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from eval import demo
from eval.algorithm import decode
from eval.demo import main
from eval.demo_page import CONTROL, DRAFTED, print_rounds
from sglang_hyperdflash.targets.files import load_tokenizer
from sglang_hyperdflash.tools.ownership import lock
from sglang_hyperdflash.training.local_target import LocalTarget
from tests.conftest import EXAMPLE, ROOT
from tests.engine.reference_decoder import block_draft
from tests.unit.eval.fake_server import FakeServer
from tests.waiting import PATIENCE


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Runs the demo, which ends with exit code 2, one line on standard error and no new file."""
    monkeypatch.setattr(demo, "Server", Mock(side_effect=AssertionError("work began")))

    def run(out: Path) -> str:
        before = sorted(tmp_path.rglob("*"))
        assert main(["--out", str(out)]) == 2
        said = capsys.readouterr().err
        assert said.startswith("python -m eval.demo: ") and said.count("\n") == 1, said
        assert sorted(tmp_path.rglob("*")) == before
        return said

    return run


def test_what_is_no_report_is_not_overwritten(tmp_path, refused):
    notes = tmp_path / "notes.json"
    notes.write_text("mine")
    assert str(notes) in refused(notes) and notes.read_text() == "mine"
    assert str(tmp_path) in refused(tmp_path)


def test_a_second_demo_is_refused(tmp_path, refused):
    with lock(logs := tmp_path / "demo-logs", demo.KIND):
        said = refused(tmp_path / "demo.json")
    assert str(logs) in said and f"in use by process {os.getpid()}" in said


@pytest.mark.heavy
def test_its_head_waits_for_neither_torch_nor_sglang():
    code = "import sys, eval.demo; print({'torch', 'sglang', 'numpy'} & sys.modules.keys())"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
    assert (ended.returncode, ended.stdout) == (0, "set()\n"), ended.stderr


@pytest.fixture
def fakes(monkeypatch) -> SimpleNamespace:
    """The demo's servers without a model; its attributes say how they answer."""
    settings = SimpleNamespace(dtype="float32", gap=0.0, wrong="", rounds=[1, 1], die_after=None)
    settings.started = []

    class Fake(FakeServer):
        def __init__(self, _model, *arguments, log, environment) -> None:
            drafts, gap = "--speculative-algorithm" in arguments, settings.gap
            logits = {90: 20.0, 91: 20.0 - gap}
            options = {"dtype": settings.dtype, "die_after": settings.die_after}
            super().__init__(self.ids, settings.rounds if drafts else [], logits, **options)
            self.drafts = drafts
            self.stopped = False
            settings.started.append(self)

        def ids(self, _prompt: str) -> list[int]:
            random = self.loaded and CONTROL in self.loaded[-1]["model_path"]
            wrong = self.drafts and settings.wrong == (CONTROL if random else DRAFTED)
            return [5, 5, 91 if wrong else 90]

        def wait(self):
            return self

        def __exit__(self, *exception) -> None:
            super().__exit__(*exception)
            self.stopped = True

    monkeypatch.setattr(demo, "Server", Fake)
    monkeypatch.setattr(demo, "rounds_of", lambda *_: [])
    return settings


@pytest.mark.parametrize(
    "dtype, gap, wrong, code, ties, faults, rounds, tau",
    [
        ("float32", 0.0, "", 0, 0, 0, [1, 1], 1.5),
        ("float32", 0.0, DRAFTED, 1, 0, 13, [1, 1], 1.5),
        ("float32", 0.0, CONTROL, 1, 0, 13, [1, 1], 1.5),
        ("bfloat16", 0.2, DRAFTED, 0, 13, 0, [1, 1], 1.5),
        ("bfloat16", 0.5, CONTROL, 1, 0, 13, [], 1.0),
    ],
)
def test_in_fp32_any_difference_is_a_fault_and_in_bf16_one_past_a_tie(
    tmp_path, fakes, dtype, gap, wrong, code, ties, faults, rounds, tau
):
    """Without a verification round every pass has given one token."""
    fakes.dtype, fakes.gap, fakes.wrong, fakes.rounds = dtype, gap, wrong, rounds
    out = tmp_path / "demo.json"
    out.write_text(json.dumps({"outputs_identical": True}))  # of an earlier demo
    assert main(["--out", str(out), "--rounds", "2"]) == code
    report = json.loads(out.read_text())
    assert report["provenance"]["dtype"] == dtype
    assert (report["ties"], report["faults"]) == (ties, faults)
    assert report["outputs_identical"] is not bool(wrong)
    for name, server in report["servers"].items():
        assert server["verdicts"].get("identical", 0) == (0 if name == wrong else 13)
    assert report["servers"][DRAFTED]["tau"] == tau
    for prompt in report["prompts"]:
        for name, server in prompt["servers"].items():
            ids = [5, 5, 91 if name == wrong else 90]
            assert [a["output_ids"] for a in server["answers"]] == [
                [ids] * len(prompt["turns"])
            ] * 2
    assert max(len(prompt["turns"]) for prompt in report["prompts"]) == 2


def test_the_page_has_every_prompt_and_what_a_wrong_answer_should_be(tmp_path, fakes, capsys):
    assert main(["--out", str(tmp_path / "demo.json"), "--rounds", "1"]) == 0
    page = capsys.readouterr().out
    for prompt in map(json.loads, (EXAMPLE / "prompts.jsonl").read_text().splitlines()):
        assert prompt["kind"] in page
    assert "Take off the tea." in page and "expected 698" in page  # the fake answers nothing right


def test_own_prompts_take_the_place_of_the_examples(tmp_path, fakes, capsys):
    out = tmp_path / "demo.json"
    asked = ["Who are you?", "Add 1 and 2."]
    options = [word for text in asked for word in ("--prompt", text)]
    assert main(["--out", str(out), "--rounds", "1", *options]) == 0
    report = json.loads(out.read_text())
    assert [prompt["turns"] for prompt in report["prompts"]] == [[text] for text in asked]
    assert [prompt["right"] for prompt in report["prompts"]] == [None, None]
    page = capsys.readouterr().out
    assert all(text in page for text in asked)


@pytest.mark.parametrize("load, warned", [(0.0, False), (4321.0, True)])
def test_a_busy_machine_is_named(tmp_path, fakes, monkeypatch, capsys, load, warned):
    monkeypatch.setattr(demo.os, "getloadavg", lambda: (load, load, load))
    assert main(["--out", str(tmp_path / "demo.json"), "--prompt", "Hi"]) == 0
    assert ("4321.0" in capsys.readouterr().out) is warned
    assert json.loads((tmp_path / "demo.json").read_text())["provenance"]["load_average"] == load


def test_no_server_outlives_an_error(tmp_path, fakes, capsys):
    fakes.die_after = 4
    assert main(["--out", str(tmp_path / "demo.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert [server.stopped for server in fakes.started] == [True, True]


@pytest.mark.parametrize("no_color, painted", [("", True), ("1", False)])
def test_only_a_terminal_has_colours_unless_no_color_is_set(monkeypatch, capsys, no_color, painted):
    monkeypatch.setenv("NO_COLOR", no_color)
    rounds = [{"accepted": "1+1", "bonus": "=", "rejected": "-"}]
    print_rounds("Add 1 and 1.", rounds)
    assert "[1+1] =" in (plain := capsys.readouterr().out) and "\033" not in plain
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_rounds("Add 1 and 1.", rounds)
    assert ("\033" in capsys.readouterr().out) is painted


@pytest.mark.heavy
def test_rounds_are_those_of_the_decoder_without_an_engine():
    """Every piece is of the answer; a server that counts other rounds has none shown."""
    target, tokenizer = LocalTarget(EXAMPLE / "target"), load_tokenizer(str(EXAMPLE / "target"))
    propose = block_draft(target, EXAMPLE / "drafter")
    prompt = tokenizer.encode("Add 478 and 220.")
    answer, histogram = decode(target, propose, prompt, 32, None)

    class Fake(FakeServer):
        def chat(self, asked: dict) -> dict:
            return {"choices": [{"prompt_token_ids": prompt}]}

    with Fake(1, []) as server:
        served = {"output_ids": [answer], "histogram": histogram}
        entry = {"turns": ["any"], "servers": {DRAFTED: {"answers": [served]}}}
        rounds = demo.rounds_of(entry, server.url)
        text = "".join(each["accepted"] + each["bonus"] for each in rounds)
        assert text == tokenizer.decode(answer) and len(rounds) == sum(histogram) + 1
        assert any(each["accepted"] for each in rounds) and any(r["rejected"] for r in rounds)
        served["histogram"] = [sum(histogram) - 1]
        assert demo.rounds_of(entry, server.url) == []
