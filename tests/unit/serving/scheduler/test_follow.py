"""Which published version drafts: taken on all ranks at once, refused, and returned from."""

from __future__ import annotations

import json
import logging
import pickle
import random
import shutil
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_hyperdflash.draft.config import load_config
from sglang_hyperdflash.draft.published import current, publish
from sglang_hyperdflash.serving.scheduler import follow
from sglang_hyperdflash.serving.scheduler.follow import (
    LOADING,
    READY,
    Follower,
    ServeVersion,
    add_own_request,
    read,
)
from sglang_hyperdflash.serving.scheduler.guard import REQUESTS, ROUNDS, Guard, Sample, worse
from sglang_hyperdflash.tools.atomic import WriteFailed
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from tests.conftest import ROOT

DRAFTER = ROOT / "examples" / "tiny_deepseek_v4" / "drafter"
ANSWER = 8  # rounds


class Model:
    """A draft model that keeps what it was given last."""

    def __init__(self) -> None:
        self.raw_config = json.loads((DRAFTER / "config.json").read_text())
        self.hyperdflash_config = load_config(DRAFTER)
        self.norm = SimpleNamespace(weight=torch.zeros(1))
        self.first = load_file(DRAFTER / "model.safetensors")
        self.weights = self.first

    def replace_weights(self, tensors) -> None:
        self.weights = tensors


def follower(folder, **options) -> Follower:
    worker = SimpleNamespace(
        device="cpu", draft_model=Model(), width_control=SimpleNamespace(trial=False)
    )
    return Follower(folder, worker, **options)


def variant(folder, scale: float, **config):
    """A drafter folder whose final norm is scaled, and whose config has other fields."""
    shutil.copytree(DRAFTER, folder)
    tensors = load_file(DRAFTER / "model.safetensors")
    tensors["norm.weight"] = tensors["norm.weight"] * scale
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((DRAFTER / "config.json").read_text())
    raw["hyperdflash_config"] |= config.pop("own", {})
    (folder / "config.json").write_text(json.dumps(raw | config))
    return folder


class Req:
    """As SGLang's."""

    def __init__(self) -> None:
        self.rounds = 0

    def finished(self) -> bool:
        return self.rounds >= ANSWER


def draft(one: Follower | Guard, requests: int, acceptance: float, width: int = 7) -> None:
    """Answer so many requests, four at a time, while another one runs."""
    rng, running = random.Random(0), [(Req(), 0)]
    one.learn(width, running)
    for begin in range(0, requests, 4):
        batch = [Req() for _ in range(min(4, requests - begin))]
        for _ in range(ANSWER):
            for req in batch:
                req.rounds += 1
            one.learn(width, [(req, 6 * (rng.random() < acceptance)) for req in batch])
    one.learn(width, running)


def ask(*ranks: Follower) -> bool:
    """One iteration of the scheduler: what rank 0 asks reaches all ranks."""
    request = ranks[0].next_request()
    for rank in ranks if request else ():
        rank.serve(pickle.loads(pickle.dumps(request)))
    return request is not None


def test_a_new_version_waits_for_the_end_of_the_trial_before_it(tmp_path):
    one = follower(tmp_path)
    one.look()
    publish(tmp_path, variant(tmp_path / "better", 2.0))
    assert one.worker.width_control.trial
    one.look()
    draft(one, REQUESTS - 1, 0.5)
    assert not ask(one) and one.serving.number == 0
    draft(one, 1, 0.5)
    assert not one.worker.width_control.trial
    assert ask(one) and one.serving.number == 1 and one.worker.width_control.trial
    norm = one.worker.draft_model.weights["norm.weight"]
    assert torch.equal(norm, 2 * one.worker.draft_model.first["norm.weight"])
    one.look()
    draft(one, REQUESTS, 0.5)
    assert not ask(one) and one.serving.number == 1


@pytest.mark.parametrize("acceptance", [0.0, 0.35])
def test_a_worse_version_is_left_and_never_taken_again(tmp_path, caplog, acceptance):
    one = follower(tmp_path)
    publish(tmp_path, variant(tmp_path / "worse", -1.0))
    one.look()
    draft(one, REQUESTS, 0.5)
    assert ask(one) and one.serving.number == 1
    draft(one, REQUESTS - 1, acceptance)
    assert not ask(one)
    draft(one, 1, acceptance)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert ask(one) and one.serving.number == 0
    assert one.worker.draft_model.weights is one.worker.draft_model.first
    (line,) = caplog.messages
    assert "version 1 is not taken" in line and "version 0" in line and "128 requests" in line
    # The drafter from before has had its trial.
    assert not one.worker.width_control.trial
    one._next = 0.0
    one.look()
    assert not ask(one) and one.ready is None and len(caplog.messages) == 1
    # Nor by this server when it starts again, nor by others.
    assert current(tmp_path) is None and "version 0" in (tmp_path / "000001/refused").read_text()
    # The next one is taken.
    publish(tmp_path, variant(tmp_path / "next", 3.0))
    one.look()
    assert ask(one) and one.serving.number == 2


def test_where_a_version_cannot_be_marked_the_server_goes_on(tmp_path, monkeypatch, caplog):
    one = follower(tmp_path)
    publish(tmp_path, variant(tmp_path / "worse", -1.0))
    one.look()
    for acceptance in (0.5, 0.0):
        draft(one, REQUESTS, acceptance)
        assert ask(one)

    def read_only(*_):
        raise WriteFailed("a read-only folder")

    monkeypatch.setattr(follow, "refuse", read_only)
    watched(one, monkeypatch)
    assert sum("a read-only folder" in line for line in caplog.messages) == 1
    assert one.serving.number == 0 and one.ready is None
    publish(tmp_path, variant(tmp_path / "next", 3.0))
    watched(one, monkeypatch)
    one._next = 0.0
    assert ask(one) and one.serving.number == 2


def test_a_version_before_the_last_is_not_returned_to(tmp_path):
    """Each version is compared with the one before it, on its own traffic."""
    one = follower(tmp_path)
    for number, acceptance in ((1, 0.8), (2, 0.75), (3, 0.2)):
        publish(tmp_path, variant(tmp_path / f"drafter {number}", float(number)))
        one.look()
        one._next = 0.0
        draft(one, REQUESTS, 0.8 if number == 1 else 0.75)
        assert ask(one) and one.serving.number == number
        if number < 3:
            draft(one, REQUESTS, acceptance)
            assert not ask(one)
    draft(one, REQUESTS, 0.2)
    assert ask(one) and one.serving.number == 2


def test_a_prefill_node_takes_every_version_at_once(tmp_path):
    """It drafts nothing; when its role changes, it returns to none that had no trial."""
    roles = ["prefill"]
    one = follower(tmp_path, drafts=lambda: roles == ["decode"])
    for number in (1, 2):
        publish(tmp_path, variant(tmp_path / f"drafter {number}", float(number)))
        one.look()
        one._next = 0.0
        assert ask(one) and one.serving.number == number
    roles[:] = ["decode"]
    publish(tmp_path, variant(tmp_path / "drafter 3", 3.0))
    one.look()
    one._next = 0.0
    assert not ask(one)
    draft(one, REQUESTS, 0.0)
    assert ask(one) and one.serving.number == 3 and not one.refused


def test_rounds_that_draft_nothing_say_nothing():
    one = Guard()
    draft(one, 2 * REQUESTS, 0.0, width=1)
    assert one.recent is None
    draft(one, REQUESTS, 1.0, width=2)
    assert one.recent == Sample(1.0, 0.0, REQUESTS)


def test_requests_that_ran_before_do_not_count():
    """Their contexts hold K/V of the drafter before."""
    one, old = Guard(), [Req() for _ in range(REQUESTS)]
    for _ in range(ANSWER):
        for req in old:
            req.rounds += 1
        one.learn(7, [(req, 0) for req in old])
    draft(one, REQUESTS - 1, 1.0)
    assert one.recent is None
    draft(one, 1, 1.0)
    assert one.recent == Sample(1.0, 0.0, REQUESTS)
    one.begin()
    draft(one, REQUESTS - 1, 0.0)
    assert one.recent.rate == 1.0


def test_a_long_answer_counts_as_one():
    one, long = Guard(), Req()
    draft(one, REQUESTS - 1, 0.0)
    for _ in range(ROUNDS - 1):
        one.learn(7, [(long, 6)])
    assert one.recent is None
    one.learn(7, [(long, 6)])
    assert one.recent.rate == 1 / REQUESTS and one.recent.requests == REQUESTS


@pytest.mark.parametrize(
    ("found", "before", "expected"),
    [
        ((0.0, 0.0), (0.8, 0.04), True),
        ((0.0, 0.0), (0.0, 0.0), False),
        ((1.0, 0.0), (1.0, 0.0), False),
        ((0.99, 0.0), (1.0, 0.0), False),
        ((0.69, 0.04), (0.8, 0.04), True),
        ((0.71, 0.04), (0.8, 0.04), False),
        ((0.8, 0.04), (0.69, 0.04), False),
    ],
)
def test_only_a_clear_difference_counts(found, before, expected):
    assert worse(Sample(*found, REQUESTS), Sample(*before, REQUESTS)) is expected


def test_equal_drafters_are_hardly_ever_told_apart():
    """Four thousand trials of one drafter against itself, on answers that differ."""
    g = torch.Generator().manual_seed(0)
    for spread in (0.0, 0.3):
        rates = 0.5 + spread * (2 * torch.rand(2, 4000, REQUESTS, generator=g) - 1)
        shares = torch.binomial(torch.full_like(rates, ANSWER), rates, generator=g) / ANSWER
        means, variances = shares.mean(-1), shares.var(-1, correction=0)
        pairs = (
            [Sample(m, v, REQUESTS) for m, v in zip(*each, strict=True)]
            for each in zip(means.T.tolist(), variances.T.tolist(), strict=True)
        )
        assert sum(worse(*pair) for pair in pairs) <= 4


TARGET = json.loads((DRAFTER / "config.json").read_text())["hyperdflash_config"]["target"]
OTHERS = {
    "another target": {"own": {"target": TARGET | {"hc_head_fingerprint": "0" * 16}}},
    "another gate": {"own": {"gate": "approximate"}},
    "another window": {"own": {"window": 64}},
    "another head": {"own": {"dependency": {"rank": 64, "top_k": 64}}},
    "another block": {"block_size": 5},
    "another depth": {"num_hidden_layers": 2},
}


@pytest.mark.parametrize("name", [*OTHERS, "damaged", "not finite", "lacks a tensor"])
def test_what_does_not_fit_is_refused_with_one_line(tmp_path, caplog, name):
    folder, source = tmp_path / "published", tmp_path / "source"
    config = OTHERS.get(name, {})
    if name == "another block":
        raw = json.loads((DRAFTER / "config.json").read_text())
        config = {"block_size": 5, "dflash_config": raw["dflash_config"] | {"block_size": 5}}
    variant(source, float("nan") if name == "not finite" else 1.0, **config)
    if name == "lacks a tensor":
        tensors = load_file(source / "model.safetensors")
        del tensors["norm.weight"]
        save_file(tensors, source / "model.safetensors")
    publish(folder, source)
    if name == "damaged":
        with (folder / "000001" / "model.safetensors").open("r+b") as file:
            file.seek(-4, 2)
            file.write(b"torn")
    one = follower(folder)
    for _ in range(3):
        one.look()
    assert one.ready is None and list(one.refused) == [1]
    assert len(caplog.messages) == 1 and "version 1 is not taken" in caplog.messages[0]
    draft(one, REQUESTS, 0.5)
    assert not ask(one)


class Ended(BaseException):
    """Ends a thread that has no end."""


def watched(one: Follower, monkeypatch) -> None:
    """Three looks of the following thread."""
    pauses = [None, None]

    def pause(_seconds) -> None:
        if not pauses:
            raise Ended
        pauses.pop()

    with monkeypatch.context() as patch, pytest.raises(Ended):
        patch.setattr(follow.time, "sleep", pause)
        one.watch()


def test_a_version_that_finds_no_memory_is_tried_again(tmp_path, monkeypatch, caplog):
    """Found by reading: the thread ended, and with it the following, without a word."""
    publish(tmp_path, DRAFTER)
    one = follower(tmp_path)

    def full(*_):
        raise RuntimeError("pinned memory is exhausted")

    with monkeypatch.context() as patch:
        patch.setattr(follow, "in_own_memory", full)
        watched(one, monkeypatch)
    assert not one.refused and len(caplog.messages) == 1
    assert "pinned memory is exhausted" in caplog.messages[0]
    one.look()
    assert one.ready.number == 1


@pytest.mark.parametrize("pointer", ["000009", "9" * 5000])
def test_a_pointer_to_nothing_is_said_once(tmp_path, caplog, monkeypatch, pointer):
    publish(tmp_path, DRAFTER)
    (tmp_path / "current").write_text(pointer)
    one = follower(tmp_path)
    watched(one, monkeypatch)
    assert len(caplog.messages) == 1 and len(caplog.messages[0]) < 500 and one.ready is None


@pytest.mark.parametrize("step", ["current", "load_config", "load_file"])
def test_a_version_that_is_removed_while_it_is_read_is_not_taken(tmp_path, monkeypatch, step):
    source, plain = variant(tmp_path / "source", 2.0), getattr(follow, step)
    publish(tmp_path, source)

    def late(*given):
        found = plain(*given) if step == "current" else None
        for _ in range(3):
            publish(tmp_path, source)
        return plain(*given) if found is None else found

    one = follower(tmp_path)
    with monkeypatch.context() as patch, suppress(OSError):
        patch.setattr(follow, step, late)
        one.look()
    assert one.ready is None
    one.look()
    assert one.ready.number == 4


def test_a_version_is_read_into_own_memory(tmp_path):
    publish(tmp_path, DRAFTER)
    found = read(current(tmp_path), Model())
    (tmp_path / "000001" / "model.safetensors").write_bytes(b"")
    expected = load_file(DRAFTER / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


class Ranks(list):
    """Followers whose ``gather`` sees what all of them would say."""

    def __init__(self, folder, count: int) -> None:
        super().__init__(
            follower(folder, leads=rank == 0, gather=self.said) for rank in range(count)
        )
        self.number = 1

    def said(self, _) -> list[str]:
        return list(self.before)

    def ask(self) -> bool:
        self.before = [
            one.refused.get(self.number, READY if one.ready else LOADING) for one in self
        ]
        return ask(*self)


def test_ranks_take_a_version_together(tmp_path):
    publish(tmp_path, variant(tmp_path / "better", 2.0))
    ranks = Ranks(tmp_path, 3)
    for rank in ranks:
        draft(rank, REQUESTS, 0.5)
    ranks[0].look()
    ranks[1].look()
    assert ranks.ask()
    assert [rank.serving.number for rank in ranks] == [0, 0, 0]  # one is still reading
    assert not ranks.ask()  # not at every iteration
    ranks[2].look()
    ranks[0]._next = 0.0
    assert ranks.ask()
    assert [rank.serving.number for rank in ranks] == [1, 1, 1]


def test_one_rank_s_refusal_is_everyone_s(tmp_path, caplog):
    publish(tmp_path, variant(tmp_path / "better", 2.0))
    ranks = Ranks(tmp_path, 2)
    for rank in ranks:
        draft(rank, REQUESTS, 0.5)
    ranks[0].look()
    ranks[1]._refuse(1, "damaged on this node")
    assert ranks.ask()
    assert [rank.serving.number for rank in ranks] == [0, 0]
    ranks[0]._next = 0.0
    ranks[0].look()
    assert not ranks.ask()
    assert caplog.messages == ["HYPERDFLASH: drafter version 1 is not taken: damaged on this node"]


def test_ranks_that_count_other_requests_return_with_rank_0(tmp_path):
    """With attention data parallelism each group has requests of its own."""
    publish(tmp_path, variant(tmp_path / "worse", 2.0))
    ranks = Ranks(tmp_path, 2)
    draft(ranks[0], REQUESTS, 0.5)
    for rank in ranks:
        rank.look()
    assert ranks.ask()
    draft(ranks[1], REQUESTS, 0.9)
    draft(ranks[0], REQUESTS, 0.0)
    assert ranks.ask()
    assert [rank.serving.number for rank in ranks] == [0, 0]
    assert not ranks.ask()


def test_rank_0_adds_its_request_to_those_it_received(monkeypatch, tmp_path):
    assert add_own_request([1], None) == [1]
    publish(tmp_path, DRAFTER)
    one = follower(tmp_path)
    one.look()
    monkeypatch.setattr(follow, "_follower", one)
    assert add_own_request([1], None) == [1]  # on trial
    draft(one, REQUESTS, 0.5)
    assert add_own_request(None, None) is None  # a rank that receives nothing
    assert add_own_request([1], None) == [1, ServeVersion(1)]
    one.leads = False
    one._next = 0.0
    assert add_own_request([1], None) == [1]


def test_the_scheduler_is_not_answered():
    """SGLang's dispatcher hands the request to the handler, whose None is not sent on."""
    from sglang.utils import TypeBasedDispatcher

    found = []
    dispatcher = TypeBasedDispatcher([(int, lambda n: n)])
    dispatcher += TypeBasedDispatcher([(ServeVersion, found.append)])
    assert dispatcher(ServeVersion(4)) is None and found == [ServeVersion(4)]


def test_a_folder_that_comes_late_is_followed(tmp_path):
    one = follower(tmp_path / "later")
    one.look()
    assert one.ready is None and not one.refused
    publish(tmp_path / "later", DRAFTER)
    one.look()
    assert one.ready.number == 1


def test_reading_raises_what_is_wrong(tmp_path):
    publish(tmp_path, variant(tmp_path / "source", 1.0, own={"window": 64}))
    with pytest.raises(HyperDFlashConfigError, match=r"window=None.*found 64"):
        read(current(tmp_path), Model())
