"""Shares of a round."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from sglang_hyperdflash.serving import round_times


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Time passes only where a test says so."""
    state = SimpleNamespace(now=0.0)
    monkeypatch.setattr(round_times, "_now", lambda: state.now)
    monkeypatch.setattr(round_times, "_rounds", [])
    return state


def batch(size: int, decoding: bool = True):
    return SimpleNamespace(
        reqs=[None] * size, forward_mode=SimpleNamespace(is_decode=lambda: decoding)
    )


def one_round(clock, worker_is_draft: list[bool], seconds: float) -> None:
    """A round whose passes take ``seconds`` each, then 1 ms of scheduling."""

    def passes(self, _batch):
        for draft in worker_is_draft:

            def work(_worker):
                clock.now += seconds

            round_times.time_target(work, SimpleNamespace(is_draft_worker=draft))
        return "result"

    assert round_times.time_round(passes, None, batch(2)) == "result"
    clock.now += 0.001


def test_target_and_draft_passes_are_told_apart(clock, monkeypatch, tmp_path):
    file = tmp_path / "rounds.jsonl"
    monkeypatch.setenv(round_times.ROUND_TIMES, str(file))
    for _ in range(round_times.FLUSH_EVERY):
        one_round(clock, [False, True, True], 0.002)
    found = round_times.summarise(file, 2)
    assert found["target"] == pytest.approx(2.0)
    assert found["draft"] == pytest.approx(4.0)
    assert found["scheduler"] == pytest.approx(1.0)
    assert found["rounds"] == round_times.FLUSH_EVERY
    assert round_times.summarise(file, 1) is None
    assert round_times.summarise(tmp_path / "none", 1) is None


def test_prefills_and_idle_gaps_are_left_out(clock, monkeypatch, tmp_path):
    file = tmp_path / "rounds.jsonl"
    rounds = [[i, i + 0.1, 0.05, 1] for i in range(12)]  # 0.9 s apart: idle
    file.write_text("".join(json.dumps(entry) + "\n" for entry in rounds))
    assert round_times.summarise(file, 1) is None
    round_times.time_round(lambda self, _batch: None, None, batch(1, decoding=False))
    assert round_times._rounds == []
