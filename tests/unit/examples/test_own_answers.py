"""The tiny target's own answers: exact tokens, kept, never mixed with answers to other prompts."""

from __future__ import annotations

import json
import sys
from collections import Counter

import pytest

from sglang_hyperdflash.tools.errors import HyperDFlashError
from tests.conftest import EXAMPLE


@pytest.fixture
def own_answers(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import corpus
    import own_answers

    monkeypatch.setattr(corpus, "PER_FAMILY", {"train": 20, "held_out": 4})
    monkeypatch.setattr(corpus, "SCRAMBLED_PROMPTS", {"train": 60, "held_out": 12})
    return own_answers


def test_answers_are_kept_and_other_prompts_are_refused(own_answers, monkeypatch, tmp_path):
    monkeypatch.setattr(own_answers, "MAX_NEW", 12)
    out = tmp_path / "answers"
    own_answers.write_answers(out, per_kind=2, held_out=1)
    found = {path.name: path.read_text() for path in out.glob("*.jsonl")}
    assert len(found) == 10
    lines = [json.loads(line) for text in found.values() for line in text.splitlines()]
    assert lines
    for line in lines:
        (sample,) = line["samples"]
        ((start, end),) = sample["spans"]
        assert 8 <= end - start <= 12 and end == len(sample["tokens"])
    (out / "greedy.jsonl").unlink()
    (out / "sampled.jsonl").write_text("kept\n")
    own_answers.write_answers(out, per_kind=2, held_out=1)
    assert (out / "greedy.jsonl").read_text() == found["greedy.jsonl"]
    assert (out / "sampled.jsonl").read_text() == "kept\n"
    with pytest.raises(HyperDFlashError, match="held_out"):
        own_answers.write_answers(out, per_kind=2, held_out=2)


def test_a_drafter_trains_on_twice_as_many_scrambled_prompts(own_answers, monkeypatch, tmp_path):
    answered = Counter()

    def counted(target, prompts, temperature):
        answered["held out" if len(prompts) == 3 else temperature] += len(prompts)
        return [json.dumps({"samples": []})]

    monkeypatch.setattr(own_answers, "answers", counted)
    options = ["--out", str(tmp_path / "own"), "--per-kind", "10", "--held-out", "3"]
    monkeypatch.setattr(sys, "argv", ["own_answers.py", *options])
    own_answers.main()
    assert answered == {0.0: 25, 1.0: 25, "held out": 24}
