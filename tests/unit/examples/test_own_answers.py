"""A target's own answers: the exact tokens, kept, and never mixed with those of other settings."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import EXAMPLE

QUESTIONS = ("What is 2 + 3?", "Name a colour.", "Count to four.", "Say yes or no.")


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import own_answers

    def run(*options: object) -> None:
        arguments = ["--batch", "2", "--per-kind", "2", "--held-out", "1", *map(str, options)]
        monkeypatch.setattr(sys, "argv", ["own_answers.py", *arguments])
        own_answers.main()

    return run


@pytest.fixture
def prompts(tmp_path) -> Path:
    folder = tmp_path / "prompts"
    folder.mkdir()
    for name, questions in (("train", QUESTIONS[:3]), ("held_out", QUESTIONS[3:])):
        turns = ([{"role": "user", "content": question}] for question in questions)
        lines = (json.dumps({"kind": "talk", "messages": messages}) + "\n" for messages in turns)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


def test_answers_are_kept_and_other_settings_are_refused(program, prompts, tmp_path):
    out = tmp_path / "answers"
    program("--prompts", prompts, "--out", out, "--length", 12)
    names = ("greedy", "sampled", "held_out_talk", "held_out_talk_sampled")
    found = {name: (out / f"{name}.jsonl").read_text() for name in names}
    lines = [json.loads(line) for text in found.values() for line in text.splitlines()]
    assert lines, "answers of eight tokens and more"
    for line in lines:
        (sample,) = line["samples"]
        ((start, end),) = sample["spans"]
        assert 8 <= end - start <= 12 and end == len(sample["tokens"])
    (out / "greedy.jsonl").unlink()
    (out / "sampled.jsonl").write_text("kept\n")
    program("--prompts", prompts, "--out", out, "--length", 12)
    assert (out / "greedy.jsonl").read_text() == found["greedy"]
    assert (out / "sampled.jsonl").read_text() == "kept\n"
    with pytest.raises(SystemExit, match="length was 12, now 16"):
        program("--prompts", prompts, "--out", out, "--length", 16)
    (prompts / "held_out.jsonl").write_text((prompts / "train.jsonl").read_text())
    with pytest.raises(SystemExit, match="other settings: held_out was"):
        program("--prompts", prompts, "--out", out, "--length", 12)
