"""Which published version drafts: taken on all ranks at once, refused, and returned from."""

import json
import pickle
import random
import shutil
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_hyperdflash.draft.config import load_config
from sglang_hyperdflash.draft.published import current, publish
from sglang_hyperdflash.serving.scheduler import follow
from sglang_hyperdflash.serving.scheduler.follow import Follower, add_own_request
from sglang_hyperdflash.serving.scheduler.guard import REQUESTS, ROUNDS, Guard, Sample, worse
from tests.conftest import EXAMPLE

DRAFTER = EXAMPLE / "drafter"
CONFIG = json.loads((DRAFTER / "config.json").read_text())
ANSWER = 8  # rounds


class Model:
    """A draft model that keeps what it was given last."""

    def __init__(self) -> None:
        self.raw_config, self.hyperdflash_config = CONFIG, load_config(DRAFTER)
        self.norm = SimpleNamespace(weight=torch.zeros(1))
        self.first = self.weights = load_file(DRAFTER / "model.safetensors")

    def replace_weights(self, tensors) -> None:
        self.weights = tensors


def follower(folder, **options) -> Follower:
    parts = {"draft_model": Model(), "width_control": SimpleNamespace(trial=False)}
    return Follower(folder, SimpleNamespace(device="cpu", **parts), **options)


def publish_variant(folder, scale: float = 1.0, **config) -> int:
    """Publish a drafter whose final norm is scaled, and whose config has other fields."""
    source = folder.parent / "source"
    shutil.copytree(DRAFTER, source, dirs_exist_ok=True)
    tensors = load_file(DRAFTER / "model.safetensors")
    tensors["norm.weight"] = tensors["norm.weight"] * scale
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(CONFIG | config))
    return publish(folder, source)


class Req:
    rounds = 0

    def finished(self) -> bool:
        return self.rounds >= ANSWER


def draft(one: Follower | Guard, requests: int, acceptance: float, width: int = 7) -> None:
    """Answer so many requests while another one runs."""
    rng, running = random.Random(0), [(Req(), 0)]
    one.learn(width, running)
    for req in (Req() for _ in range(requests)):
        for req.rounds in range(1, ANSWER + 1):
            one.learn(width, [(req, 6 * (rng.random() < acceptance))])
    one.learn(width, running)


def ask(*ranks: Follower) -> bool:
    """One iteration of the scheduler, a while later: what rank 0 asks reaches all ranks."""
    ranks[0]._next = 0.0
    request = ranks[0].next_request()
    for rank in ranks if request else ():
        rank.serve(pickle.loads(pickle.dumps(request)))
    return request is not None


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "published"


def test_a_worse_version_is_left_for_the_one_before_it_and_never_taken_again(folder, caplog):
    """Each is compared with the one before it; the mark is for other servers and the next start."""
    one = follower(folder)
    model, control = one.worker.draft_model, one.worker.width_control
    one.look()  # no folder yet
    for number, acceptance in ((1, 0.8), (2, 0.75), (3, 0.75)):
        publish_variant(folder, number)
        one.look()
        (folder / f"{number:06}" / "model.safetensors").write_bytes(b"")  # it is in memory
        draft(one, REQUESTS - 1, acceptance)
        assert not ask(one) and control.trial, "the trial of the one before is not over"
        draft(one, 1, acceptance)
        assert not control.trial
        assert ask(one) and one.serving.number == number and control.trial
        assert torch.equal(model.weights["norm.weight"], number * model.first["norm.weight"])
    draft(one, REQUESTS, 0.2)
    assert ask(one) and one.serving.number == 2 and list(one.refused) == [3]
    assert model.weights is one.serving.tensors
    assert not control.trial, "it has had its trial"
    one.look()
    assert len(caplog.messages) == 1 and not ask(one)
    assert current(folder).number == 2 and (folder / "000003/refused").is_file()
    publish_variant(folder, 4.0)
    one.look()
    assert ask(one) and one.serving.number == 4


def test_a_prefill_node_which_drafts_nothing_takes_every_version_at_once(folder):
    one = follower(folder, drafts=lambda: False)
    for number in (1, 2):
        publish_variant(folder, number)
        one.look()
        assert ask(one) and one.serving.number == number


def test_a_sample_is_of_requests_that_were_drafted_for_since_the_drafter_came():
    """Not of older ones, whose contexts hold another drafter's K/V, nor of rounds of width 1."""
    one, long, old = Guard(), Req(), [(Req(), 0) for _ in range(REQUESTS)]
    one.learn(7, old)
    for req, _ in old:
        req.rounds = ANSWER
    draft(one, REQUESTS, 0.0, width=1)
    draft(one, REQUESTS - 1, 1.0)
    assert one.recent is None
    draft(one, 1, 1.0)
    assert one.recent == Sample(1.0, 0.0, REQUESTS)
    one.begin()
    draft(one, REQUESTS - 1, 0.0)
    for _ in range(ROUNDS - 1):  # a long answer counts as one, and before its end
        one.learn(7, [(long, 6)])
    assert one.recent.rate == 1.0
    one.learn(7, [(long, 6)])
    assert one.recent.rate == 1 / REQUESTS


def test_only_a_clear_difference_counts():
    def is_worse(found, before) -> bool:
        return worse(Sample(*found, REQUESTS), Sample(*before, REQUESTS))

    assert is_worse((0.0, 0.0), (0.8, 0.04)) and is_worse((0.69, 0.04), (0.8, 0.04))
    assert not is_worse((0.71, 0.04), (0.8, 0.04)) and not is_worse((0.8, 0.04), (0.69, 0.04))
    assert not is_worse((0.99, 0.0), (1.0, 0.0)), "requests always differ a little"


@pytest.mark.parametrize("name", ["depth", "not finite", "damaged"])
def test_what_does_not_fit_is_refused_with_one_line(folder, caplog, name):
    changes = {"num_hidden_layers": 2} if name == "depth" else {}
    publish_variant(folder, float("nan") if name == "not finite" else 1, **changes)
    if name == "damaged":
        with (folder / "000001" / "model.safetensors").open("r+b") as file:
            file.seek(-4, 2)
            file.write(b"torn")
    one = follower(folder)
    for _ in range(3):
        one.look()
    draft(one, REQUESTS, 0.5)
    assert list(one.refused) == [1] and len(caplog.messages) == 1 and not ask(one)


def test_trouble_is_said_once_and_following_goes_on(folder, caplog):
    publish_variant(folder)
    one, pauses = follower(folder), [None] * 5 + [KeyboardInterrupt]
    with (
        mock.patch.object(follow.time, "sleep", side_effect=pauses),
        mock.patch.object(follow, "in_own_memory", side_effect=RuntimeError("exhausted")),
        pytest.raises(KeyboardInterrupt),
    ):
        one.watch()
    assert len(caplog.messages) == 1 and not one.refused
    one.look()
    assert one.ready.number == 1


class Ranks(list):
    """Two followers whose ``gather`` sees what all of them would say."""

    def __init__(self, folder) -> None:
        super().__init__(follower(folder, leads=lead, gather=self.said) for lead in (True, False))
        for rank in self:
            draft(rank, REQUESTS, 0.5)
        self[0].look()

    def said(self, _) -> list[str]:
        return list(self.before)

    def ask(self) -> list[int]:
        """The version that each drafts with afterwards."""
        self.before = [
            one.refused.get(1, follow.READY if one.ready else follow.LOADING) for one in self
        ]
        ask(*self)
        return [rank.serving.number for rank in self]


def test_ranks_take_refuse_and_leave_a_version_together(folder, monkeypatch, caplog):
    """With attention data parallelism each group has requests of its own: rank 0 decides."""
    monkeypatch.setattr(follow, "PAUSE", 3600.0)
    publish_variant(folder)
    ranks = Ranks(folder)
    assert ranks.ask() == [0, 0], "one is still reading"
    assert ranks[0].next_request() is None, "not at every iteration"
    ranks[1].look()
    assert ranks.ask() == [1, 1]
    draft(ranks[1], REQUESTS, 0.9)
    draft(ranks[0], REQUESTS, 0.0)
    assert ranks.ask() == [0, 0] and len(caplog.messages) == 1 and not ask(*ranks)
    ranks = Ranks(folder)
    ranks[1]._refuse(1, "damaged on this node")
    assert ranks.ask() == [0, 0] and 1 in ranks[0].refused


def test_rank_0_alone_adds_its_request_to_those_it_received(monkeypatch, folder):
    publish_variant(folder)
    one = follower(folder)
    one.look()
    draft(one, REQUESTS, 0.5)
    assert add_own_request([1], None) == [1]
    monkeypatch.setattr(follow, "_follower", one)
    assert add_own_request(None, None) is None, "a rank that receives nothing"
    assert add_own_request([1], None) == [1, follow.ServeVersion(1)]
    one.leads, one._next = False, 0.0
    assert add_own_request([1], None) == [1]
