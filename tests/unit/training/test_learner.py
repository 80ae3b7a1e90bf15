"""Learning from a store that grows: what is drawn, judged, published, resumed and refused."""

import os
import signal
import time

import pytest
import torch

from sglang_hyperdflash.draft.published import current, publish
from sglang_hyperdflash.tools.atomic import WriteFailed
from sglang_hyperdflash.training import learner as learner_module
from sglang_hyperdflash.training.checkpoints import saved_states
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.judge import LEAST, Chosen, Comparison, is_better
from sglang_hyperdflash.training.learner import Draws, Policy
from sglang_hyperdflash.training.replay import Replay
from sglang_hyperdflash.training.samples import Sample
from tests.unit.training import streams
from tests.unit.training.store.small import files_of
from tests.unit.training.streams import ANSWER, PROMPT, new_learner, recorded, refreshed, run

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def content(target):
    """400 requests with the target's answers."""
    return recorded(target, 400)


def stored(folder, target, content):
    with streams.writer(folder / "store", target) as opened:
        streams.add(opened, content)
    return folder / "store"


@pytest.fixture(scope="module")
def store(target, content, tmp_path_factory):
    return stored(tmp_path_factory.mktemp("learn"), target, content)


@pytest.fixture(scope="module")
def learned(target, store, tmp_path_factory):
    """A learner that has published."""
    learner = new_learner(target, store, tmp_path_factory.mktemp("learned"), every=40, lr=5e-3)
    run(learner, 40)
    return learner


def judged_once(target, store, folder, **changes):
    """A learner after one step that changes next to nothing."""
    learner = new_learner(target, store, folder, lr=1e-9, every=1, **changes)
    run(learner, 1)
    return learner


def test_an_untrained_drafter_learns_and_a_better_one_is_published(learned):
    version, (record,) = current(learned.published), learned.records
    version.check()
    assert (record["published"], record["version"]) == (1, 0) and "version 1" in learned.lines[0]
    assert record["tau"] > record["tau_served"] + 0.3
    drafters = Drafter.load(version.path), learned.average.module, learned.drafter
    published, average, now = (each.layers[0].mlp.up_proj.weight for each in drafters)
    assert (published - average).norm() < (published - now).norm() / 2  # a step later
    shown = learned.measured()
    assert set(shown) == {"tau", "tau_served", "version", "samples"} and shown["samples"] == 400


def test_an_equal_or_worse_candidate_is_not_published(target, store, learned, tmp_path):
    """The second is compared with what is published, though its working folder is lost."""
    publish(tmp_path / "worse" / "published", current(learned.published).path)
    for name, served in (("equal", 0), ("worse", 1)):
        (record,) = judged_once(target, store, tmp_path / name).records
        assert record["version"] == served and record["judged"]["newest"]["requests"] >= 16
        assert record["tau"] <= record["tau_served"] and not record["better"]
    assert current(tmp_path / "equal" / "published") is None
    assert current(tmp_path / "worse" / "published").number == 1


@pytest.mark.parametrize("file", ["000001/model.safetensors", "current"])
def test_a_damaged_version_is_no_standard(target, store, learned, tmp_path, file):
    """Nor does it end the learner, who alone can publish a whole one."""
    publish(tmp_path / "published", current(learned.published).path)
    damaged = tmp_path / "published" / file
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    learner = judged_once(target, store, tmp_path)
    assert learner.records[0]["version"] == 0 and str(tmp_path) in learner.lines[0]


def test_a_full_disk_at_publishing_costs_one_interval(target, store, tmp_path, monkeypatch):
    """The version before stays; a run that repeats the steps ends as an undisturbed one."""
    monkeypatch.setattr(learner_module, "is_better", lambda *_: True)

    def full(*given):
        if current(tmp_path / "cut" / "published") is None:
            return publish(*given)
        with files_of(64):
            return publish(*given)

    def learner(name: str):
        made = new_learner(target, store, tmp_path / name, every=1, lr=5e-3)
        made.policy = Policy(newest=350, judges=2)
        return made

    with monkeypatch.context() as patch, pytest.raises(WriteFailed, match="/published/000002/"):
        patch.setattr(learner_module, "publish", full)
        run(learner("cut"), 3)
    assert current(tmp_path / "cut" / "published").number == 1
    current(tmp_path / "cut" / "published").check()
    learners = learner("whole"), learner("cut")
    assert learners[1].state["step"] == 1
    for each in learners:
        run(each, 3)
    published = [[record["published"] for record in each.records] for each in learners]
    assert published == [[1, 2, 3], [1, 3, 4]]
    assert [record["version"] for record in learners[1].records] == [0, 1, 3]
    for module in ("drafter", "average"):
        one, other = (getattr(each, module).state_dict() for each in learners)
        assert all(torch.equal(value, other[name]) for name, value in one.items()), module
    judged = [[record["judged"] for record in each.records] for each in learners]
    assert judged[0] == judged[1]


def test_a_kill_after_its_first_version_repeats_its_steps(target, store, tmp_path, monkeypatch):
    """It does not begin with that version, of which only the weights are left."""
    monkeypatch.setattr(learner_module, "is_better", lambda *_: True)
    first = new_learner(target, store, tmp_path, every=1, lr=5e-3)
    first.records = ()  # fails between version and checkpoint
    with pytest.raises(AttributeError):
        first.run(first.published)
    begin, version = streams.new_drafter(target).state_dict(), current(first.published)
    monkeypatch.setattr(streams, "new_drafter", lambda _: Drafter.load(version.path))
    again = new_learner(target, store, tmp_path, draft=first.draft).drafter.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in begin.items())


def test_half_of_a_batch_is_new_and_what_is_held_out_is_never_drawn(target, store):
    stream = refreshed(store, target.config.vocab_size)
    draws = Draws(stream, Policy(newest=60), batch=8, seed=0)
    drawn = [i for step in range(16) for i in draws.batch(step)]
    assert sum(i >= 340 for i in drawn) == len(drawn) // 2
    held_out = set(stream.held_out.nonzero().squeeze(1).tolist())
    assert 20 <= len(held_out) <= 100 and not held_out & set(drawn)
    again = Draws(stream, Policy(newest=60), batch=8, seed=0)
    assert [draws.batch(step) for step in (3, 9)] == [again.batch(step) for step in (3, 9)]
    few = Draws(stream, Policy(newest=1000), batch=8, seed=0)  # nothing is old yet
    assert len(set(few.batch(0))) == 8


def poisoned(content, answer) -> list:
    """The same states; answers of other tokens."""
    return [
        (Sample.continuation([*sample.tokens[:PROMPT], *answer(i)], PROMPT), rows)
        for i, (sample, rows) in enumerate(content)
    ]


def test_a_poisoned_half_does_not_win_on_the_other_half(target, content, learned, tmp_path):
    """Text that is easy to draft and that the target did not say: the mean of tau would rise."""
    version = current(learned.published).path
    poison = poisoned(content[:200], lambda i: [800 + i] + [700] * (ANSWER - 1))
    half = [each for pair in zip(poison, content[200:], strict=True) for each in pair]
    store = stored(tmp_path, target, half)
    learner = new_learner(target, store, tmp_path, draft=version, every=40, lr=5e-3)
    learner.policy = Policy(newest=400, passes=10**6)
    run(learner, 40)
    record, held_out = learner.records[0], int(learner.train.held_out.sum())
    assert 10 <= record["judged"]["newest"]["requests"] < 0.8 * held_out
    assert not record["better"]
    poisoned_half = Chosen(learner.train, range(0, 80, 2))
    for drafter, expected in ((learner.average.module, True), (Drafter.load(version), False)):
        tau = Replay(drafter, target).evaluate(poisoned_half)["tau"]
        assert (tau > 2) is expected, tau


def test_shards_come_and_go_while_it_learns(target, content, tmp_path):
    """A report is shown when the next step has ended."""
    with streams.writer(tmp_path / "store", target) as opened:
        streams.add(opened, content[:100])
        learner, seen = new_learner(target, tmp_path / "store", tmp_path, every=4), []

        def change(trainer, report):
            seen.append((len(trainer.train.lengths), report["loss"] > 0))
            if report["step"] == 0:
                opened.retain(0, 0.0)  # all that it chose from
                trainer.train._open.clear()
            if report["step"] == 1:
                streams.add(opened, content[100:160])
            if report["step"] == 5:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            learner.run(learner.published, change)
    assert seen == [(100, True)] * 2 + [(100, False)] * 2 + [(60, True)] * 2
    assert learner.records[0]["samples"] == 100


@pytest.mark.parametrize(("count", "passes", "said"), [(60, 0, "0 times"), (8, 2, "fewer than 32")])
def test_it_waits_for_new_samples(target, content, tmp_path, monkeypatch, count, passes, said):
    store = stored(tmp_path, target, content[:count])
    learner = new_learner(target, store, tmp_path, every=1)
    learner.policy = Policy(judges=1, passes=passes)
    monkeypatch.setattr(time, "sleep", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        learner.run(learner.published)
    assert ended.value.code == 143 and said in learner.lines[-1]
    assert [path.name for path in saved_states(tmp_path / "work")] == ["state-0", "state-1"]


def histograms(requests: int, tau: float, seed: int = 0) -> torch.Tensor:
    """``[requests, 8]``: ten rounds each, of a tau around the given one."""
    g = torch.Generator().manual_seed(seed)
    p = torch.distributions.Binomial(7, torch.tensor((tau - 1) / 7)).log_prob(torch.arange(8.0))
    drawn = torch.multinomial(p.exp(), requests * 10, replacement=True, generator=g)
    return torch.nn.functional.one_hot(drawn.view(requests, 10), 8).sum(1)


def test_tau_is_of_all_rounds_and_the_interval_holds_the_difference():
    """A request without a whole block, the last, does not count."""
    candidate = torch.tensor([[0, 4], [2, 0], [0, 0]])
    served = torch.tensor([[8, 0], [1, 1], [0, 0]])
    two = Comparison.of(candidate, served)
    assert (two.requests, two.tau, two.served) == pytest.approx((2, (4 * 2 + 2) / 6, 11 / 10))
    big = Comparison.of(histograms(200, 3.0), histograms(200, 2.5, 1))
    assert big.low < big.tau - big.served < big.high and big.high - big.low < 0.5
    same = Comparison.of(histograms(20, 2.0), histograms(20, 2.0))
    assert same.requests == 20 and same.low == same.high == 0
    assert Comparison.of(candidate[2:], served[2:]) == Comparison(0)


def test_the_interval_has_the_level_that_it_claims():
    """Of equal drafters, about one judging of 200 is called better."""
    drawn = (histograms(60, 2.0, seed) for seed in range(200))
    pairs = zip(drawn, drawn, strict=True)  # each its next one
    assert sum(Comparison.of(*pair).low > 0 for pair in pairs) <= 3


@pytest.mark.parametrize(
    ("newest", "older", "better"),
    [
        (Comparison(30, 2.5, 2.0, 0.3, 0.7), Comparison(0), True),
        (Comparison(LEAST - 1, 2.5, 2.0, 0.3, 0.7), Comparison(0), False),
        (Comparison(30, 2.1, 2.0, -0.01, 0.2), Comparison(0), False),
        (Comparison(30, 2.0, 2.0, 0.0, 0.0), Comparison(0), False),
        (Comparison(30, 2.5, 2.0, 0.3, 0.7), Comparison(30, 1.95, 2.0, -0.3, 0.2), True),
        # It forgot the older requests; or there are too few of them to say.
        (Comparison(30, 7.0, 2.0, 4.0, 6.0), Comparison(30, 1.8, 2.0, -0.3, -0.1), False),
        (Comparison(30, 7.0, 2.0, 4.0, 6.0), Comparison(LEAST - 1, 1.8, 2.0, -0.3, -0.1), True),
    ],
)
def test_better_on_new_requests_and_not_worse_on_older_ones(newest, older, better):
    assert is_better(newest, older) is better
