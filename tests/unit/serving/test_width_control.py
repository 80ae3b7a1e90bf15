"""Widths by environment variable, what counts as a round's time, and ranks that agree."""

from __future__ import annotations

import itertools
from collections import deque
from functools import partial
from types import SimpleNamespace

import pytest

from sglang_hyperdflash.serving.width_control import RoundClock, WidthControl
from sglang_hyperdflash.serving.width_settings import WIDTH, WIDTHS, WidthSetting, read_setting
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

SET = WidthSetting("adaptive", (1, 2, 4, 7))


def greedy_request() -> SimpleNamespace:
    return SimpleNamespace(sampling_params=SimpleNamespace(top_k=1), finished=lambda: False)


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


def started(clock: RoundClock, now: float, requests: int, width: int):
    """What a round's start says of the one before."""
    timed = clock.lap(now, requests)
    clock.start(now, requests, width)
    return timed


def test_a_round_is_timed_after_one_of_its_width_and_size():
    clock = RoundClock()
    starts = [(0.0, 4, 7), (1.0, 4, 7), (2.5, 4, 1), (3.0, 4, 1), (3.4, 3, 1), (3.9, 2, 1)]
    found = [started(clock, *start) for start in starts]
    assert found[:3] == [None, None, ((4, 7), 1.5)]
    assert found[3] is None  # the first at width 1
    assert found[4] == ((4, 1), pytest.approx(0.4))
    assert found[5] is None  # the first of three requests


def test_a_prefill_or_new_requests_between_two_rounds_are_not_timed():
    clock = RoundClock()
    for at in (0.0, 1.0):
        clock.start(at, 8, 7)
    clock.stop()
    assert started(clock, 9.0, 8, 7) is None
    assert started(clock, 10.0, 8, 7) is None
    assert started(clock, 11.0, 8, 7) == ((6, 7), 1.0)
    assert started(clock, 12.0, 9, 7) is None


def test_where_a_launch_is_its_round_every_round_is_timed_and_idleness_is_not():
    clock = RoundClock(alone=True)
    assert started(clock, 0.0, 8, 7) is None
    assert started(clock, 1.0, 8, 1) == ((6, 7), 1.0)
    assert clock.pause(1.5) == ((6, 1), 0.5)
    assert started(clock, 9.0, 8, 7) is None
    clock.stop()
    assert clock.pause(60.0) is None
    waiting = RoundClock()
    waiting.start(0.0, 8, 7)
    assert waiting.pause(1.0) is None


def test_what_earlier_rounds_left_behind_is_not_the_next_width_s_time():
    """Rounds without drafts leave draft K/V to write, before a block is drafted."""
    at = iter([0.0, 0.1, 0.5, 0.7])
    control = WidthControl(SET, 7, now=lambda: next(at), alone=True)
    assert control.next(1, 0) == 1
    control.next(1, 0)
    control.start_again()  # 0.4 s of writing
    control.next(1, 0)
    assert control.policy.costs.samples[0, 1] == deque([pytest.approx(0.1), pytest.approx(0.2)])
    fixed = WidthControl(WidthSetting("full", (7,)), 7)
    fixed.start_again()
    RoundClock().start_again(1.0)


def test_on_a_gpu_the_second_round_behind_such_work_is_not_timed_either():
    """Between its launch and the next runs the round that the work was launched with."""
    clock = RoundClock()
    clock.start(0.0, 16, 1)
    assert started(clock, 1.0, 16, 2) is None
    clock.start_again(1.1)
    assert started(clock, 2.0, 16, 2) is None
    assert started(clock, 9.0, 16, 2) is None  # with the work
    assert started(clock, 10.0, 16, 1) == ((8, 2), 1.0)


def test_a_prefill_is_timed_from_where_earlier_work_ends():
    at = iter([0.0, 5.0, 6.0])
    control = WidthControl(SET, 7, now=lambda: next(at), alone=True)
    control.pause(40)
    control.start_again()
    control.next(1, 0)
    assert list(control.policy.costs.prefills) == [(40, 1.0)]


def test_idleness_is_no_round():
    """Found as: an answer that ended by its length, then a minute without requests."""
    at = iter([0.0, 0.1, 0.2, 60.0])
    control = WidthControl(SET, 7, now=lambda: next(at), alone=True)
    assert [control.next(1, 0) for _ in range(3)] == [1, 1, 2]
    assert control.policy.costs.samples[0, 1] == deque([pytest.approx(0.1)] * 2)
    control.learn(2, [(greedy_request(), 1)])
    control.after_idleness()
    control.pause()
    assert (0, 2) not in control.policy.costs.samples


def test_answers_lengths_and_prefills_are_learnt():
    """An answer is seen when it is over, by the next result; its first token is its prefill's."""
    at = itertools.count(step=0.5)
    control = WidthControl(SET, 7, now=lambda: next(at), alone=True)
    over = {"short": False, "long": False}
    short, long = (
        SimpleNamespace(
            sampling_params=SimpleNamespace(top_k=1),
            finished=partial(over.get, name),
            output_ids_through_stop=range(tokens),
        )
        for name, tokens in (("short", 9), ("long", 17))
    )
    answers, prefills = control.policy.answers, control.policy.costs.prefills
    control.pause(100)
    control.pause(40)
    control.next(2, 0)
    assert [*prefills] == [(100, 0.5), (40, 0.5)]
    control.learn(1, [(short, 0), (long, 0)])
    assert not answers.ends(1.0)
    over["short"] = True
    control.learn(1, [(long, 0)], behind=1)
    assert answers.ends(8.0) == pytest.approx(1)
    over["long"] = True
    control.learn(1, [(greedy_request(), 0)])
    assert answers.ends(24.0) == pytest.approx(2, rel=0.01)
    control.learn(1, [(greedy_request(), 0)])
    assert answers.ends(24.0) == pytest.approx(2, rel=0.01)
    control.pause(7)
    control.after_idleness()
    control.next(1, 0)
    assert len(prefills) == 2


def test_every_width_of_a_random_server_is_drawn_and_ranks_draw_the_same():
    first, second = (WidthControl(WidthSetting("random", SET.widths), 7) for _ in range(2))
    drawn = [first.next(1, 0) for _ in range(100)]
    assert set(drawn) == set(SET.widths)
    assert drawn == [second.next(1, 0) for _ in range(100)]


def test_a_fixed_width_has_no_policy():
    control = WidthControl(WidthSetting("full", (4,)), 7)
    control.learn(4, [])
    assert control.next(8, 8) == 4
    assert control.predicted_gain() is None and control.measured_gain() is None


class Group:
    """Rank 0's table for everybody, as a broadcast gives it."""

    def __init__(self) -> None:
        self.sent = None

    def from_rank_0(self, table):
        self.sent = table
        return self.sent

    def to_rank_1(self, table):
        return self.sent


class Clock:
    """A clock that a round of width w moves by ``seconds(w)``."""

    def __init__(self, seconds) -> None:
        self.at, self.seconds = 0.0, seconds

    def __call__(self) -> float:
        return self.at


def run(ranks: list[tuple[WidthControl, Clock]], rounds: int) -> list[list[int]]:
    """Widths of each rank; every draft but the first is refused."""
    chosen: list[list[int]] = [[] for _ in ranks]
    for _ in range(rounds):
        for found, (control, clock) in zip(chosen, ranks, strict=True):
            width = control.next(32, 0)
            found.append(width)
            clock.at += clock.seconds(width)
            control.policy.learn(width, [min(1, width - 1)] * 32, ())
    return chosen


def test_ranks_with_different_clocks_choose_the_same_widths():
    group = Group()
    # Rank 1's own clock thinks that wide rounds are free.
    clocks = Clock(lambda width: 1 + 0.3 * width), Clock(lambda width: 1 / width)
    shares = group.from_rank_0, group.to_rank_1
    ranks = [
        (WidthControl(SET, 7, share, clock), clock)
        for share, clock in zip(shares, clocks, strict=True)
    ]
    first, second = run(ranks, 600)
    assert first == second
    assert first[-20:].count(2) > 10
    # The control: alone, by its own clock, rank 1 goes wide.
    clock = Clock(lambda width: 1 / width)
    (alone,) = run([(WidthControl(SET, 7, None, clock), clock)], 600)
    assert alone[-20:].count(7) > 10


def test_gains_are_of_the_width_now_over_width_1():
    clock = Clock(lambda width: 1 + 0.1 * width)
    control = WidthControl(SET, 7, None, clock)
    for _ in range(400):
        width = control.next(2, 0)
        clock.at += clock.seconds(width)
        control.learn(width, [(greedy_request(), width - 1)] * 2)
    expected = 7 * clock.seconds(1) / clock.seconds(7)
    assert control.predicted_gain() == pytest.approx(expected, rel=0.05)
    assert control.measured_gain() == pytest.approx(expected, rel=0.1)
    cells = dict(control.take_new_cells())
    assert cells[2, 7] == pytest.approx(clock.seconds(7))
    assert control.take_new_cells() == []
