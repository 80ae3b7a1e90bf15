"""Shares of a round."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from sglang.srt.runtime_context import get_parallel

from sglang_hyperdflash.serving import round_times


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Time passes only where a test says so."""
    state = SimpleNamespace(now=0.0)
    monkeypatch.setattr(round_times, "_now", lambda: state.now)
    monkeypatch.setattr(round_times, "_passes", [])
    with get_parallel().override(tp_rank=0):
        yield state


def batch(size: int, decoding: bool = True):
    return SimpleNamespace(
        reqs=[None] * size,
        forward_mode=SimpleNamespace(is_decode=lambda: decoding, is_idle=lambda: False),
    )


def one_round(clock, worker_is_draft: list[bool], seconds: float) -> None:
    """A round whose passes take ``seconds`` each, then 1 ms of scheduling."""

    def passes(self, _batch):
        for draft in worker_is_draft:

            def work(_worker):
                clock.now += seconds

            round_times.time_target(work, SimpleNamespace(is_draft_worker=draft))
        return "result"

    assert round_times.time_pass(passes, None, batch(2)) == "result"
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


def test_one_rank_writes_and_a_bad_path_ends_no_server(clock, monkeypatch, tmp_path, caplog):
    file = tmp_path / "rounds.jsonl"
    monkeypatch.setenv(round_times.ROUND_TIMES, str(file))
    with get_parallel().override(tp_rank=1):
        for _ in range(round_times.FLUSH_EVERY):
            one_round(clock, [False], 0.002)
    assert not file.exists()
    monkeypatch.setenv(round_times.ROUND_TIMES, str(tmp_path / "none" / "rounds.jsonl"))
    for _ in range(round_times.FLUSH_EVERY):
        one_round(clock, [False], 0.002)
    assert "No times are written" in caplog.text


def test_prefills_and_idle_gaps_are_left_out(tmp_path):
    file = tmp_path / "rounds.jsonl"

    def summary(passes):
        file.write_text("".join(json.dumps(entry) + "\n" for entry in passes))
        return round_times.summarise(file, 1)

    apart = [[i, i + 0.1, 0.05, 1, None, 0.0, True] for i in range(12)]  # 0.9 s: idle
    assert summary(apart) is None
    prefills = [[i, i + 1.0, 0.05, 1, None, 0.0, False] for i in range(12)]
    assert summary(prefills) is None
    rounds = [[12.0 + i / 10, 12.09 + i / 10, 0.05, 1, None, 0.0, True] for i in range(12)]
    found = summary([*prefills, *rounds])
    assert found["rounds"] == 12
    assert found["target"] == pytest.approx(50)


def test_draft_kv_and_the_kind_of_a_pass_are_kept(clock, monkeypatch, tmp_path):
    file = tmp_path / "rounds.jsonl"
    monkeypatch.setenv(round_times.ROUND_TIMES, str(file))

    def write(_worker):
        clock.now += 0.003

    def passes(self, _batch):
        round_times.time_draft_kv(write, None)
        clock.now += 0.001
        return SimpleNamespace(speculative_num_draft_tokens=7)

    for i in range(round_times.FLUSH_EVERY):
        round_times.time_pass(passes, None, batch(3, decoding=i > 0))
    prefill, first, *_ = round_times.read_passes(file)
    assert (prefill.decoding, first.decoding, first.requests, first.width) == (False, True, 3, 7)
    assert first.draft_kv == pytest.approx(0.003)
    assert first.end - first.start == pytest.approx(0.004)


def test_the_drafters_pass_and_choice_are_parts_of_drafting(clock, monkeypatch, tmp_path):
    file = tmp_path / "rounds.jsonl"
    monkeypatch.setenv(round_times.ROUND_TIMES, str(file))

    def work(_self):
        clock.now += 0.004

    @round_times.timed_choice
    def choose(_self):
        clock.now += 0.002

    def passes(self, _batch):
        round_times.time_block(work, SimpleNamespace(is_draft_worker=True))
        choose(None)
        round_times.time_block(work, SimpleNamespace(is_draft_worker=False))
        clock.now += 0.001

    for _ in range(round_times.FLUSH_EVERY):
        round_times.time_pass(passes, None, batch(1))
        clock.now += 0.001
    found = round_times.summarise(file, 1)
    assert found["block"] == pytest.approx(4)
    assert found["choice"] == pytest.approx(2)
    assert found["draft"] == pytest.approx(11), "whatever is not the target's"


def test_a_server_that_times_nothing_keeps_its_method(monkeypatch):
    monkeypatch.delenv(round_times.ROUND_TIMES, raising=False)

    def choose(_self):
        return "drafts"

    assert round_times.timed_choice(choose) is choose
