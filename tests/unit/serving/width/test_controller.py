"""Widths by environment variable, ranks that agree, and the timing of rounds at the start."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from eval.width_replay import policy_of
from sglang_hyperdflash.serving.width import policy as policy_module
from sglang_hyperdflash.serving.width import timing
from sglang_hyperdflash.serving.width.policy import WidthController
from sglang_hyperdflash.serving.width.settings import WIDTH, WIDTHS, WidthSetting, read_setting
from sglang_hyperdflash.serving.width.timing import time_rounds
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

SET = WidthSetting("adaptive", (1, 2, 4, 7))


@pytest.mark.parametrize(
    ("environment", "causal", "mode", "widths"),
    [
        ({}, True, "adaptive", (1, 2, 4, 7)),
        ({}, False, "adaptive", (1, 7)),
        ({WIDTH: "adaptive"}, True, "adaptive", (1, 2, 4, 7)),
        ({WIDTH: "adaptive"}, False, "adaptive", (1, 7)),
        ({WIDTH: "full"}, True, "full", (7,)),
        ({WIDTH: "4"}, False, "full", (4,)),
        ({WIDTH: "random"}, True, "random", (1, 2, 4, 7)),
        ({WIDTHS: "4, 1"}, False, "adaptive", (1, 4)),
        ({WIDTH: "", WIDTHS: ""}, False, "adaptive", (1, 7)),
    ],
)
def test_the_environment_names_the_widths(environment, causal, mode, widths):
    assert read_setting(7, causal, environment) == WidthSetting(mode, widths)


def test_a_short_block_has_no_wider_widths():
    assert read_setting(3, True, {WIDTH: "adaptive"}).widths == (1, 2, 3)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({WIDTH: "8"}, "HYPERDFLASH_WIDTH: .*adaptive, full or a width from 1 to .* 7, found '8'"),
        ({WIDTH: "wide"}, "HYPERDFLASH_WIDTH: .*found 'wide'"),
        ({WIDTHS: "1,0"}, "HYPERDFLASH_WIDTHS: .*widths from 1 .* commas, found '0'"),
        ({WIDTHS: "1;7"}, "HYPERDFLASH_WIDTHS: .*found '1;7'"),
    ],
)
def test_what_is_no_width_is_refused_in_one_line(environment, said):
    with pytest.raises(HyperDFlashConfigError, match=said):
        read_setting(7, True, environment)


def test_every_width_of_a_random_server_is_drawn_and_ranks_draw_the_same():
    first, second = (WidthController(WidthSetting("random", SET.widths), 7) for _ in range(2))
    drawn = [first.next(1, 0) for _ in range(100)]
    assert set(drawn) == set(SET.widths)
    assert drawn == [second.next(1, 0) for _ in range(100)]


def test_a_fixed_width_has_no_policy():
    control = WidthController(WidthSetting("full", (4,)), 7)
    control.learn(4, [])
    assert control.next(8, 8) == 4
    assert control.predicted_gain() is None


def one_request(sampled: bool = False) -> SimpleNamespace:
    return SimpleNamespace(sampling_params=SimpleNamespace(top_k=50 if sampled else 1))


def test_ranks_with_the_same_table_choose_the_same_widths():
    """Batches that change in size and kind, drafts that are accepted by chance, probes."""
    ranks = [WidthController(SET, 7) for _ in range(2)]
    for control in ranks:
        control.policy.costs = policy_of(lambda n, w: 1 + 0.3 * w + 0.01 * n * w, SET.widths).costs
    draw, chosen = random.Random(1), []
    for _ in range(2000):
        kinds = [draw.random() < 0.5 for _ in range(draw.randint(1, 40))]
        widths = [control.next(kinds.count(False), kinds.count(True)) for control in ranks]
        assert widths[0] == widths[1]
        chosen.append(widths[0])
        live = [(one_request(kind), draw.randint(0, widths[0] - 1) // 2) for kind in kinds]
        for control in ranks:
            control.learn(widths[0], live)
    assert len(set(chosen)) > 1


def test_the_gain_is_of_the_width_now_over_width_1():
    control, seconds = WidthController(SET, 7), (lambda n, w: 1 + 0.1 * w)
    assert control.predicted_gain() is None
    control.policy.costs = policy_of(seconds, SET.widths).costs
    for _ in range(400):
        width = control.next(2, 0)
        control.learn(width, [(one_request(), width - 1)] * 2)
    assert width == 7
    assert control.predicted_gain() == pytest.approx(7 * seconds(2, 1) / seconds(2, 7), rel=0.05)
    narrow = WidthController(WidthSetting("adaptive", (2, 4)), 7)
    narrow.policy.costs = policy_of(seconds, (2, 4)).costs
    assert narrow.next(1, 0) == 4 and narrow.predicted_gain() is None


@pytest.mark.parametrize(
    "setting", [SET, WidthSetting("full", (7,)), WidthSetting("random", (1, 7))]
)
def test_a_forced_width_goes_before_every_setting_and_draws_nothing(setting):
    control, other = WidthController(setting, 7), WidthController(setting, 7)
    control.forced = 4
    assert [control.next(1, 1) for _ in range(40)] == [4] * 40
    control.forced = None
    assert [control.next(1, 1) for _ in range(40)] == [other.next(1, 1) for _ in range(40)]


class Worker:
    """What :func:`time_rounds` uses; a round takes ``seconds(requests, width, sampled)``."""

    device = "cpu"

    def __init__(self, monkeypatch, seconds, most: int) -> None:
        self.control, self.clock, self.seconds, self.ran = WidthController(SET, 7), 0.0, seconds, []
        runner = SimpleNamespace(max_running_requests=most)
        self.target_worker = SimpleNamespace(model_runner=runner)
        monkeypatch.setattr(timing, "made_up_batch", lambda runner, n, sampled: (n, sampled))
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.clock)

    def forward_batch_generation(self, batch) -> None:
        requests, sampled = batch
        self.ran.append((requests, self.control.forced, sampled))
        # The first of its kind builds what is built once.
        first = 50.0 if self.ran.count(self.ran[-1]) == 1 else 0.0
        self.clock += first + self.seconds(requests, self.control.forced, sampled)


def test_every_width_and_kind_is_timed_without_its_first_round(monkeypatch):
    def seconds(requests, width, sampled):
        return 1e-3 * (1 + requests * width + 5 * sampled)

    worker = Worker(monkeypatch, seconds, most=6)
    costs = time_rounds(worker, worker.control)
    assert costs.sizes == [1, 4, 6] and worker.control.forced is None
    for requests in costs.sizes:
        for sampled in (False, True):
            expected = {w: pytest.approx(seconds(requests, w, sampled)) for w in SET.widths}
            assert costs.of(requests, sampled) == expected


def test_timing_stops_before_it_takes_too_long_and_ranks_stop_together(monkeypatch):
    fast = Worker(monkeypatch, lambda n, w, s: 1e-3 * n, most=4096)
    sent = []
    first = time_rounds(fast, fast.control, lambda row: sent.append(row) or row)
    assert 1 < first.sizes[-1] < 4096
    assert sum(1e-3 * n for n, _, _ in fast.ran) < timing.LIMIT
    slow = Worker(monkeypatch, lambda n, w, s: 0.5 * n, most=4096)
    numbers = iter(sent)
    second = time_rounds(slow, slow.control, lambda row: next(numbers))
    assert second.sizes == first.sizes and slow.ran == fast.ran
    assert second.of(3, True) == first.of(3, True)
    # However slow, one size is timed.
    alone = Worker(monkeypatch, lambda n, w, s: 60.0, most=4096)
    assert time_rounds(alone, alone.control).sizes == [1]


def test_a_batch_that_does_not_fit_is_named(monkeypatch):
    def seconds(requests, width, sampled):
        if requests * width > 12:
            raise torch.OutOfMemoryError
        return 1e-3

    worker = Worker(monkeypatch, seconds, most=8)
    with pytest.raises(HyperDFlashConfigError, match="decoding 4 requests with 4 rows each"):
        time_rounds(worker, worker.control)
    assert worker.control.forced is None


def test_rounds_that_follow_each_other_tell_what_the_host_adds(monkeypatch):
    """Of one batch without another pass in between; ranks of a group would differ."""
    clock = iter([1.0, 1.5, 9.0, 9.25, 20.0])
    monkeypatch.setattr(policy_module.time, "perf_counter", lambda: next(clock))
    for alone, expected in ((True, [0.1, 0.05]), (False, [])):
        control = WidthController(SET, 7, alone)
        control.policy = policy_of(lambda requests, width: 0.1, SET.widths)
        one, other = [None] * 4, [None] * 3
        for reqs in (one, one, other, other, one):
            control.started(reqs, 7, len(reqs), 0)
        assert list(control.policy._host) == pytest.approx(expected), alone
