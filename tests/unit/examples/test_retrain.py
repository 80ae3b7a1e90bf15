"""``make retrain`` on a few prompts and for a second."""

from __future__ import annotations

import json
import sys
from statistics import mean
from types import SimpleNamespace

import pytest

from sglang_hyperdflash.draft.config import load_config
from tests.conftest import EXAMPLE


@pytest.fixture
def retrain(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import corpus
    import own_answers
    import retrain

    monkeypatch.setattr(corpus, "PER_FAMILY", {"train": 20, "held_out": 4})
    monkeypatch.setattr(corpus, "SCRAMBLED_PROMPTS", {"train": 60, "held_out": 20})
    monkeypatch.setattr(own_answers.write_answers, "__defaults__", (2, 2))
    monkeypatch.setattr(retrain, "COMPARED", 2)
    # Nothing but the training takes time.
    monkeypatch.setattr(retrain, "time", SimpleNamespace(monotonic=lambda: 0.0))

    def run(minutes: float) -> int:
        budget = str(retrain.RESERVE_MINUTES + minutes)
        options = ["--per-kind", "2", "--threads", "1", "--budget-minutes", budget]
        monkeypatch.setattr(sys, "argv", ["retrain.py", "--out", str(tmp_path / "new"), *options])
        return retrain.main()

    return run


def test_a_short_training_is_worse_than_the_committed_drafter(retrain, drafter_dir, tmp_path):
    assert retrain(0.02) == 1
    found = json.loads((tmp_path / "new" / "report.json").read_text())["tau"]
    assert set(found["committed"]) == {"math", "code", "chat", "scrambled"}
    assert 1 <= mean(found["retrained"].values()) < mean(found["committed"].values()) - 1
    assert load_config(tmp_path / "new" / "trained") == load_config(drafter_dir)
    with pytest.raises(SystemExit, match="expected an empty folder"):
        retrain(0.02)


def test_answers_that_take_the_whole_budget_end_the_run(retrain, monkeypatch):
    monkeypatch.setattr("retrain.write_answers", lambda *_: None)
    with pytest.raises(SystemExit, match="raise --budget-minutes"):
        retrain(0.0)
