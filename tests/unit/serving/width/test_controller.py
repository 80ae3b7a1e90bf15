"""Widths by environment variable, ranks that agree, and the timing of rounds at the start."""

import random
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from sglang_hyperdflash.serving.settings import WIDTH, WIDTHS, WidthSetting, read_width
from sglang_hyperdflash.serving.width import policy as policy_module
from sglang_hyperdflash.serving.width import timing
from sglang_hyperdflash.serving.width.policy import WidthController
from sglang_hyperdflash.serving.width.timing import time_rounds
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from tests.unit.serving.width.test_policy import policy_of

SET = WidthSetting("adaptive", (1, 2, 4, 7))
RANDOM, FULL = WidthSetting("random", (1, 2, 4, 7)), WidthSetting("full", (4,))


def test_the_environment_names_the_widths():
    for environment, causal, mode, widths in (
        ({}, True, "adaptive", (1, 2, 4, 7)),
        ({WIDTH: "", WIDTHS: ""}, False, "adaptive", (1, 7)),
        ({WIDTH: "full"}, True, "full", (7,)),
        ({WIDTH: "4"}, False, "full", (4,)),
        ({WIDTH: "random"}, True, "random", (1, 2, 4, 7)),
        ({WIDTHS: "4, 1"}, False, "adaptive", (1, 4)),
    ):
        assert read_width(7, causal, environment) == WidthSetting(mode, widths), environment
    assert read_width(3, True, {}).widths == (1, 2, 3), "a short block has no wider ones"
    for name, value in ((WIDTH, "8"), (WIDTH, "wide"), (WIDTHS, "1,0"), (WIDTHS, "1;7")):
        with pytest.raises(HyperDFlashConfigError, match=f"{name}: "):
            read_width(7, True, {name: value})


def timed(setting: WidthSetting, seconds) -> WidthController:
    control = WidthController(setting, 7)
    control.policy.costs = policy_of(seconds, setting.widths).costs
    return control


def test_ranks_choose_the_same_widths():
    """By the same table or draw: batches of every size and kind, chance, probes."""
    ranks = [timed(SET, lambda n, w: 1 + 0.3 * w + 0.01 * n * w) for _ in range(2)]
    draw, chosen = random.Random(1), set()
    for _ in range(500):
        kinds = [draw.random() < 0.5 for _ in range(draw.randint(1, 40))]
        first, second = (rank.next(kinds.count(False), kinds.count(True)) for rank in ranks)
        assert first == second
        chosen.add(first)
        live = [(int(kind), draw.randint(0, first - 1) // 2) for kind in kinds]
        for rank in ranks:
            rank.observe(first, live)
    assert len(chosen) > 1
    ranks = [WidthController(RANDOM, 7) for _ in range(2)]
    first, second = ([rank.next(1, 0) for _ in range(100)] for rank in ranks)
    assert first == second and set(first) == set(RANDOM.widths)


def test_no_gain_is_known_without_width_1():
    narrow = timed(WidthSetting("adaptive", (2, 4)), lambda n, w: 1 + 0.1 * w)
    assert narrow.next(1, 0) == 4 and narrow.predicted_gain() is None


@pytest.mark.parametrize("setting", [SET, FULL, RANDOM])
def test_a_forced_width_goes_before_every_setting_and_draws_nothing(setting):
    control, other = WidthController(setting, 7), WidthController(setting, 7)
    control.forced = 2
    assert {control.next(1, 1) for _ in range(40)} == {2}
    control.forced = None
    chosen = [control.next(1, 1) for _ in range(40)]
    assert chosen == [other.next(1, 1) for _ in range(40)]
    assert setting is not FULL or set(chosen) == {4}


class Worker:
    """What :func:`time_rounds` uses; a round takes ``seconds(requests, width, sampled)``."""

    def __init__(self, monkeypatch, seconds, most: int) -> None:
        self.control, self.clock, self.seconds, self.ran = WidthController(SET, 7), 0.0, seconds, []
        runner = SimpleNamespace(max_running_requests=most)
        self.runners = SimpleNamespace(device="cpu", target=runner)
        monkeypatch.setattr(timing, "made_up_batch", lambda runner, n, sampled: (n, sampled))
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.clock)

    def time(self, *share):
        return time_rounds(self.runners, self.run, self.control, *share)

    def run(self, batch) -> None:
        requests, sampled = batch
        self.ran.append((requests, self.control.forced, sampled))
        # The first of its kind builds what is built once.
        first = 50.0 if self.ran.count(self.ran[-1]) == 1 else 0.0
        self.clock += first + self.seconds(requests, self.control.forced, sampled)


def test_every_width_and_kind_is_timed_without_its_first_round(monkeypatch):
    def seconds(requests, width, sampled):
        return 1e-3 * (1 + requests * width + 5 * sampled)

    worker = Worker(monkeypatch, seconds, most=6)
    costs = worker.time()
    assert costs.sizes == [1, 4, 6] and worker.control.forced is None
    for requests in costs.sizes:
        for sampled in (False, True):
            expected = {w: pytest.approx(seconds(requests, w, sampled)) for w in SET.widths}
            assert costs.of(requests, sampled) == expected


def test_timing_stops_before_it_takes_too_long_and_ranks_stop_together(monkeypatch):
    fast, sent = Worker(monkeypatch, lambda n, w, s: 1e-3 * n, most=4096), []
    first = fast.time(lambda row: sent.append(row) or row)
    assert 1 < first.sizes[-1] < 4096
    assert sum(1e-3 * n for n, _, _ in fast.ran) < timing.LIMIT
    slow, numbers = Worker(monkeypatch, lambda n, w, s: 0.5 * n, most=4096), iter(sent)
    second = slow.time(lambda row: next(numbers))
    assert second.sizes == first.sizes and slow.ran == fast.ran
    assert second.of(3, True) == first.of(3, True)
    # However slow, one size is timed.
    alone = Worker(monkeypatch, lambda n, w, s: 60.0, most=4096)
    assert alone.time().sizes == [1]


def test_a_batch_that_does_not_fit_ends_the_start(monkeypatch):
    worker = Worker(monkeypatch, Mock(side_effect=torch.OutOfMemoryError), most=8)
    with pytest.raises(HyperDFlashConfigError, match="--max-running-requests"):
        worker.time()
    assert worker.control.forced is None


def test_rounds_that_follow_each_other_tell_what_the_host_adds(monkeypatch):
    """Of one batch without another pass in between; not of ranks, which would differ."""
    for alone, expected in ((True, [0.1, 0.05]), (False, [])):
        clock = iter([1.0, 1.5, 9.0, 9.25, 20.0])
        monkeypatch.setattr(policy_module.time, "perf_counter", lambda clock=clock: next(clock))
        control = WidthController(SET, 7, alone)
        control.policy = policy_of(lambda requests, width: 0.1, SET.widths)
        one, other = [None] * 4, [None] * 3
        for reqs in (one, one, other, other, one):
            control.started(reqs, 7, len(reqs), 0)
        assert list(control.policy._host) == pytest.approx(expected), alone
