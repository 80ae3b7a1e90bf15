"""Learning from a store that grows: what is drawn, judged, published, resumed and refused."""

from __future__ import annotations

import json
import os
import resource
import signal
import time

import pytest
import torch

from sglang_hyperdflash.draft.published import current, publish
from sglang_hyperdflash.tools.atomic import WriteFailed
from sglang_hyperdflash.training import learner as learner_module
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.judge import Chosen
from sglang_hyperdflash.training.learner import Draws, Policy
from sglang_hyperdflash.training.replay import Replay
from sglang_hyperdflash.training.samples import Sample
from sglang_hyperdflash.training.trainer import saved_states
from tests.unit.training.streams import (
    ANSWER,
    PROMPT,
    add,
    new_learner,
    recorded,
    refreshed,
    run,
    writer,
)


@pytest.fixture(scope="module")
def content(target):
    """400 requests with the target's answers."""
    return recorded(target, 400)


@pytest.fixture(scope="module")
def store(target, content, tmp_path_factory):
    folder = tmp_path_factory.mktemp("learn") / "store"
    with writer(folder, target) as opened:
        add(opened, content)
    return folder


@pytest.fixture(scope="module")
def learned(target, store, tmp_path_factory):
    """A learner that has published, and its folder."""
    folder = tmp_path_factory.mktemp("learned")
    learner = new_learner(target, store, folder, every=40, lr=5e-3)
    run(learner, 80)
    return learner, folder


def tau(target, drafter, store) -> float:
    return Replay(drafter, target).evaluate(refreshed(store, target.config.vocab_size))["tau"]


def test_an_untrained_drafter_learns_and_a_better_one_is_published(target, store, learned):
    learner, folder = learned
    version = current(folder / "published")
    version.check()
    published, untrained = Drafter.load(version.path), Drafter.load(folder / "draft")
    assert tau(target, published, store) > tau(target, untrained, store) + 0.3
    average = learner.average.module
    assert not torch.equal(average.norm.weight, learner.drafter.norm.weight)
    records = learner.records
    assert records[0]["published"] == 1 and records[0]["version"] == 0
    assert records[1]["version"] == 1  # what the second candidate was compared with
    assert "published as version 1" in learner.lines[0]
    log = (folder / "work" / "training_log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == [40, 80]


def test_an_equal_or_worse_candidate_is_not_published(target, store, learned, tmp_path):
    version = current(learned[1] / "published")
    for name, draft in (("equal", None), ("worse", version.path)):
        learner = new_learner(target, store, tmp_path / name, draft=draft, lr=1e-9, every=1)
        run(learner, 1)
        record = learner.records[0]
        assert record["judged"]["newest"]["requests"] >= 16
        assert record["tau"] <= record["tau_served"] and not record["better"]
        assert current(tmp_path / name / "published") is None
        assert "not published" in learner.lines[0]


def test_a_learner_of_a_lost_working_folder_is_compared_with_what_is_published(
    target, store, learned, tmp_path
):
    publish(tmp_path / "published", current(learned[1] / "published").path)
    learner = new_learner(target, store, tmp_path, lr=1e-9, every=1)
    run(learner, 1)
    assert learner.records[0]["version"] == 1 and not learner.records[0]["better"]


@pytest.mark.parametrize(
    ("file", "said"),
    [("000001/model.safetensors", "is damaged"), ("current", "expected the name of a version")],
)
def test_a_damaged_version_is_no_standard(target, store, learned, tmp_path, file, said):
    """Nor does it end the learner, who alone can publish a whole one."""
    publish(tmp_path / "published", current(learned[1] / "published").path)
    damaged = tmp_path / "published" / file
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    learner = new_learner(target, store, tmp_path, lr=1e-9, every=1)
    run(learner, 1)
    assert learner.records[0]["version"] == 0 and said in learner.lines[0]


def test_a_full_disk_at_publishing_costs_one_interval(
    target, store, learned, tmp_path, monkeypatch
):
    """The version before stays; the next run repeats the steps since the last checkpoint."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def full(*given):
        if current(tmp_path / "published") is None:
            return publish(*given)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
        try:
            return publish(*given)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    with monkeypatch.context() as patch:
        patch.setattr(learner_module, "publish", full)
        with pytest.raises(WriteFailed, match=r"^cannot write .*/published/000002/config.json: "):
            run(new_learner(target, store, tmp_path, every=40, lr=5e-3), 80)
    assert current(tmp_path / "published").number == 1
    current(tmp_path / "published").check()
    again = new_learner(target, store, tmp_path, every=40, lr=5e-3)
    assert again.state["step"] == 40
    run(again, 80)
    assert [record["published"] for record in again.records] == [1, 3]
    weights = [
        (current(learner.published).path / "model.safetensors").read_bytes()
        for learner in (learned[0], again)
    ]
    assert weights[0] == weights[1]


def test_a_cut_run_ends_with_the_same_weights_and_history(target, store, tmp_path):
    whole = new_learner(target, store, tmp_path / "whole")
    run(whole, 4)
    run(new_learner(target, store, tmp_path / "cut"), 2)  # ends between steps 3 and 4
    again = new_learner(target, store, tmp_path / "cut")
    assert again.state["step"] == 2
    run(again, 4)
    assert saved_states(tmp_path / "cut" / "work")[-1].name == "state-4.pt"
    for module in ("drafter", "average"):
        one, other = (getattr(each, module).state_dict() for each in (whole, again))
        for name, value in one.items():
            assert torch.equal(value, other[name]), (module, name)
    judged = [[record["judged"] for record in each.records] for each in (whole, again)]
    assert judged[0] == judged[1] and len(judged[0]) == 2


def test_half_of_a_batch_is_new_and_what_is_held_out_is_never_drawn(target, store):
    stream = refreshed(store, target.config.vocab_size)
    draws = Draws(stream, Policy(newest=60), batch=8, seed=0)
    drawn = [i for step in range(16) for i in draws.batch(step)]
    assert sum(i >= 340 for i in drawn) == len(drawn) // 2
    held_out = set(stream.held_out.nonzero().squeeze(1).tolist())
    assert 20 <= len(held_out) <= 100 and not held_out & set(drawn)
    assert [draws.batch(step) for step in (3, 9)] == [
        Draws(stream, Policy(newest=60), batch=8, seed=0).batch(step) for step in (3, 9)
    ]
    few = Draws(stream, Policy(newest=1000), batch=8, seed=0)  # nothing is old yet
    assert len(set(few.batch(0))) == 8


def poisoned(target, content, answer) -> list:
    """The same states; answers of other tokens."""
    return [
        (Sample.continuation([*sample.tokens[:PROMPT], *answer(i)], PROMPT), rows)
        for i, (sample, rows) in enumerate(content)
    ]


def random_answer(i: int) -> list[int]:
    g = torch.Generator().manual_seed(i)
    return torch.randint(10, 1300, (ANSWER,), generator=g).tolist()


def test_nothing_is_published_from_random_tokens(target, content, tmp_path):
    """Of neither kind: with states of other text, or with the target's states of the same text."""
    tokens = [content[0][0].tokens[:PROMPT] + random_answer(i) for i in range(240)]
    states = target.features(torch.tensor(tokens))[1].clone()
    fitting = [(Sample.continuation(t, PROMPT), s) for t, s in zip(tokens, states, strict=True)]
    for name, poison in (
        ("foreign", poisoned(target, content, random_answer)),
        ("own", fitting),
    ):
        with writer(tmp_path / name / "store", target) as opened:
            add(opened, poison)
        learner = new_learner(target, tmp_path / name / "store", tmp_path / name, every=8)
        run(learner, 16)
        assert current(tmp_path / name / "published") is None
        assert "0 of 16 held-out requests are usable" in learner.lines[-1]


def test_a_poisoned_half_does_not_win_on_the_other_half(target, content, learned, tmp_path):
    """Text that is easy to draft and that the target did not say: the mean of tau would rise."""
    version = current(learned[1] / "published").path
    poison = poisoned(target, content[:200], lambda i: [800 + i] + [700] * (ANSWER - 1))
    half = [each for pair in zip(poison, content[200:], strict=True) for each in pair]
    with writer(tmp_path / "store", target) as opened:
        add(opened, half)
    learner = new_learner(target, tmp_path / "store", tmp_path, draft=version, every=40, lr=5e-3)
    learner.policy = Policy(newest=400, passes=10**6)
    run(learner, 40)
    record, held_out = learner.records[0], int(learner.train.held_out.sum())
    assert 10 <= record["judged"]["newest"]["requests"] < 0.8 * held_out
    assert not record["better"]
    poisoned_half = Chosen(learner.train, range(0, 400, 2))
    for drafter, expected in ((learner.average.module, True), (Drafter.load(version), False)):
        found = Replay(drafter, target).evaluate(poisoned_half)["tau"]
        assert (found > 2) is expected, found


def test_tokens_that_the_target_does_not_have_teach_nothing(target, content, tmp_path):
    """Their embedding is an error, on a GPU one that no later call survives."""
    learners = []
    for name in ("clean", "poisoned"):
        with writer(tmp_path / name / "store", target) as opened:
            add(opened, content[:60])
            for outside in (target.config.vocab_size, -1) if name == "poisoned" else ():
                add(opened, poisoned(target, content[60:70], lambda _, o=outside: [o] * ANSWER))
        learners.append(new_learner(target, tmp_path / name / "store", tmp_path / name))
        run(learners[-1], 2)
    one, other = (learner.drafter.state_dict() for learner in learners)
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert learners[1].records[0]["samples"] == 80


def test_shards_come_and_go_while_it_learns(target, content, tmp_path):
    store = tmp_path / "store"
    with writer(store, target) as opened:
        add(opened, content[:100])
        learner = new_learner(target, store, tmp_path)
        seen = []

        def change(trainer, report):
            seen.append((len(trainer.train.lengths), report["loss"]))
            step = trainer.state["step"]
            if step == 1:
                opened.retain(0, 0.0)  # all that it chose from
                trainer.train._open.clear()
            if step == 2:
                add(opened, content[100:160])
            if step == 4:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            learner.run(learner.published, change)
    assert [count for count, _ in seen] == [100, 100, 60, 60]
    assert seen[0][1] > 0 and seen[1][1] == 0 and seen[2][1] > 0
    assert learner.records[0]["samples"] == 100


def test_it_waits_for_samples_and_says_so(target, content, tmp_path, monkeypatch):
    store, waits = tmp_path / "store", []
    with writer(store, target) as opened:
        add(opened, content[:8])
        learner = new_learner(target, store, tmp_path)

        def wait(_seconds):
            waits.append(learner.lines[-1])
            add(opened, content[8 * len(waits) :][:8])

        monkeypatch.setattr(time, "sleep", wait)
        learner.after_checkpoint()
        assert len(waits) >= 4 and "holds " in waits[0] and "fewer than 32" in waits[0]
        learner.policy = Policy(passes=1)
        learner.state["step"] = 6
        learner.after_checkpoint()
        assert "drawn 1 times each" in waits[-1]


def test_sigterm_ends_a_wait(target, content, tmp_path, monkeypatch):
    with writer(tmp_path / "store", target) as opened:
        add(opened, content[:60])
    learner = new_learner(target, tmp_path / "store", tmp_path, every=1)
    learner.policy = Policy(judges=1, passes=0)
    monkeypatch.setattr(time, "sleep", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        learner.run(learner.published)
    assert ended.value.code == 143
    assert [path.name for path in saved_states(tmp_path / "work")] == ["state-1.pt"]


def test_progress_shows_both_drafters(learned):
    measured = learned[0].measured()
    assert set(measured) == {"tau", "tau_served", "version", "samples"}
    assert measured["version"] == 1 and measured["samples"] == 400
