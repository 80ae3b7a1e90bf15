"""The width policy on synthetic traces: steady, ramp, burst, drift, a bad request; its time."""

from __future__ import annotations

import itertools
import statistics
import sys
from functools import partial
from types import SimpleNamespace

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.values import MultiProcessValue

from eval.width_replay import policy_of, replay
from sglang_hyperdflash.serving.scheduler.metrics import Metrics
from sglang_hyperdflash.serving.width.policy import (
    Acceptance,
    CostTable,
    WidthController,
    WidthPolicy,
    best_width,
)
from sglang_hyperdflash.serving.width.settings import WidthSetting
from sglang_hyperdflash.serving.width.timing import sizes_up_to
from tests.unit.serving.width.simulator import Traffic, closed_loop

WIDTHS = (1, 2, 4, 7)
GOOD, HOPELESS = [0.8] * 6, [0.02] * 6


def machine(requests: int, width: int) -> float:
    """Milliseconds like those of two cores: rows cost, and a draft pass costs too."""
    return 10 + 0.1 * requests + 0.12 * requests * width + (3 + 0.02 * requests) * (width > 1)


def steady(acceptance: list[float]):
    return lambda number, request: acceptance


def rate(width: int, requests: int, acceptance: list[float]) -> float:
    known = Acceptance(6)
    known.trials, known.successes = [1e9] * 6, [1e9 * a for a in acceptance]
    return requests * known.expected()[width - 1] / machine(requests, width)


def best(requests: int, acceptance: list[float]) -> int:
    return max(WIDTHS, key=lambda width: rate(width, requests, acceptance))


def efficiency(widths: list[int], loads: list[int], acceptance: list[float]) -> float:
    """Seconds that the best width of every round would have needed for the same tokens."""
    needed = taken = 0.0
    for width, requests in zip(widths, loads, strict=True):
        seconds = machine(requests, width)
        most = rate(best(requests, acceptance), requests, acceptance)
        needed += seconds * rate(width, requests, acceptance) / most
        taken += seconds
    return needed / taken


def good_enough(width: int, requests: int, acceptance: list[float]) -> bool:
    """Within the hysteresis of the best."""
    rates = [rate(w, requests, acceptance) for w in WIDTHS]
    return rate(width, requests, acceptance) > max(rates) / 1.05


@pytest.mark.parametrize("requests", [1, 4, 16, 64])
@pytest.mark.parametrize("acceptance", [GOOD, [0.5] * 6, HOPELESS], ids=["good", "fair", "bad"])
def test_a_steady_load_is_run_nearly_as_fast_as_its_best_width(requests, acceptance):
    policy, loads = policy_of(machine, WIDTHS), [requests] * 1200
    found = replay(machine, loads, steady(acceptance), policy=policy, noise=0.05)
    fixed = [replay(machine, loads, steady(acceptance), width=w).tokens_per_s for w in WIDTHS]
    assert found.tokens_per_s > 0.97 * max(fixed), (found.tokens_per_s, fixed)


def test_the_traces_have_different_best_widths():
    assert {best(c, GOOD) for c in (1, 64, 512)} >= {7, 4}
    assert best(64, HOPELESS) == 1


@pytest.mark.parametrize("acceptance", [GOOD, [0.45] * 6], ids=["good", "fair"])
def test_a_load_that_steps_up_and_down_settles_within_100_rounds_each_way(acceptance):
    loads = [1] * 400 + [64] * 400 + [1] * 400
    found = replay(
        machine, loads, steady(acceptance), policy=policy_of(machine, WIDTHS), noise=0.03
    )
    for start, requests in ((0, 1), (400, 64), (800, 1)):
        late = found.widths[start + 100 : start + 400]
        fine = [good_enough(width, requests, acceptance) for width in late]
        # Probes go on.
        assert sum(fine) > 0.9 * len(fine), (requests, late)


def test_a_ramp_is_followed_bucket_by_bucket():
    loads = [1 + number // 40 for number in range(40 * 128)]
    found = replay(machine, loads, steady([0.45] * 6), policy=policy_of(machine, WIDTHS))
    assert efficiency(found.widths, loads, [0.45] * 6) > 0.97
    assert found.widths[200] > found.widths[-1]


LOADS = (1, 4, 16, 64)


@pytest.mark.parametrize(
    ("answer", "prompt", "prefill"),
    [
        (16, 20, lambda tokens: 15 + 0.02 * tokens),
        (16, 500, lambda tokens: 0.1 * tokens),
        (300, 20, lambda tokens: 15 + 0.02 * tokens),
    ],
    ids=["short answers", "prompts that fill a pass", "long answers"],
)
def test_a_closed_loop_is_as_fast_as_the_better_of_no_drafts_and_whole_blocks(
    answer, prompt, prefill
):
    """Within 3 % at each load, and 1 % over all of them and of good and hopeless drafters."""
    ratios = []
    for requests, acceptance in itertools.product(LOADS, (GOOD, HOPELESS)):
        traffic = Traffic(requests, answer, prompt, prefill)
        run = partial(closed_loop, machine, traffic, acceptance, rounds=1500)
        found = run(policy=policy_of(machine, (1, 7))).tokens_per_s
        ratios.append(found / max(run(width=width).tokens_per_s for width in (1, 7)))
    assert min(ratios) > 0.97, ratios
    assert statistics.geometric_mean(ratios) > 0.99, ratios


def test_bursts_do_not_unsettle_it():
    loads = [64 if number % 200 < 20 else 2 for number in range(4000)]
    found = replay(machine, loads, steady([0.5] * 6), policy=policy_of(machine, WIDTHS), noise=0.05)
    assert efficiency(found.widths, loads, [0.5] * 6) > 0.97


def test_acceptance_that_drifts_is_followed_down_and_up_again():
    def drifting(number, request):
        return HOPELESS if 1000 <= number < 3000 else GOOD

    found = replay(machine, [4] * 6000, drifting, policy=policy_of(machine, WIDTHS))
    assert found.widths[900] == best(4, GOOD)
    assert max(found.widths[2900:2960]) <= 2
    late = found.widths[5000:]
    assert sum(good_enough(width, 4, GOOD) for width in late) > 0.9 * len(late)


def test_one_bad_request_does_not_narrow_the_others():
    def mixed(number, request):
        return HOPELESS if request == 0 else GOOD

    found = replay(machine, [16] * 1000, mixed, policy=policy_of(machine, WIDTHS))
    late = found.widths[300:]
    assert sum(width >= 4 for width in late) > 0.9 * len(late)


@pytest.mark.parametrize("acceptance", [0.0, 0.02, 0.2])
@pytest.mark.parametrize("requests", [1, 8, 64])
def test_probes_at_width_1_go_on_and_cost_at_most_1_percent(requests, acceptance):
    loads, drafts = [requests] * 5000, steady([acceptance] * 6)
    found = replay(machine, loads, drafts, policy=policy_of(machine, WIDTHS))
    without = replay(machine, loads, drafts, width=1)
    late = found.widths[1000:]
    assert set(late) == {1, 2}
    assert found.tokens_per_s > 0.985 * without.tokens_per_s  # the start and its own draws, too
    seconds = sum(machine(requests, width) for width in late)
    tokens = sum(1 + acceptance * (width > 1) for width in late)
    assert seconds / tokens < 1.01 * machine(requests, 1)
    probes = [number for number, width in enumerate(late) if width > 1]
    gaps = [later - earlier for earlier, later in itertools.pairwise(probes)]
    assert max(gaps) < 200


@pytest.mark.parametrize("requests", [1, 4, 16])
def test_a_drafter_that_was_hopeless_is_noticed_when_it_is_not(requests):
    """By probes that were faster by themselves: few trials move a long-known acceptance slowly."""

    def better(number, request):
        return HOPELESS if number < 4000 else GOOD

    found = replay(machine, [requests] * 6000, better, policy=policy_of(machine, WIDTHS))
    assert max(found.widths[3990:4000]) <= 2
    late = found.widths[5000:]
    assert sum(good_enough(width, requests, GOOD) for width in late) > 0.9 * len(late)


def test_narrow_rounds_say_nothing_of_the_drafts_they_leave_out():
    known = Acceptance(6)
    known.learn(7, [6] * 100)
    before = known.trials[2:]
    known.learn(2, [1] * 100)
    assert known.trials[2:] == before
    assert known.expected()[6] > 6.5
    # What was never drafted is thought as good as the last draft that was.
    fresh = Acceptance(6)
    fresh.learn(2, [0] * 100)
    assert fresh.expected()[6] == pytest.approx(fresh.expected()[1], abs=0.01)


def test_greedy_and_sampled_requests_have_an_acceptance_of_their_own():
    policy = WidthPolicy(WIDTHS)
    for _ in range(20):
        policy.learn(7, [6] * 8, [0] * 8)
    greedy, sampled = policy.classes
    assert greedy.expected()[6] > 6 and sampled.expected()[6] < 1.2


def test_old_observations_fade():
    known = Acceptance(6)
    for accepted in (6, 0):
        for _ in range(100):
            known.learn(7, [accepted] * 32)
    assert known.expected()[6] < 1.15


def test_an_untimed_server_stays_at_its_widest_and_learns():
    policy = WidthPolicy(WIDTHS)
    assert policy.next(4, 0) == 7
    policy.learn(7, [0] * 200, ())
    assert policy.next(4, 0) == 7 and policy.classes[0].expected()[6] < 1.1


def test_seconds_are_linear_between_timed_sizes_and_after_them():
    costs = CostTable((1, 7))
    costs.add(4, [1.0, 2.0, 1.5, 3.0])
    assert costs.of(1, False) == costs.of(64, False) == {1: 1.0, 7: 2.0}
    costs.add(8, [2.0, 4.0, 1.5, 2.9])
    assert costs.of(4, False) == {1: 1.0, 7: 2.0} and costs.of(4, True) == {1: 1.5, 7: 3.0}
    assert costs.of(6, False) == {1: 1.5, 7: 3.0}
    assert costs.of(16, False) == {1: 4.0, 7: 8.0}
    # A larger batch that was timed shorter was noise; none is expected to cost less and less.
    assert costs.of(1000, True) == {1: 1.5, 7: 2.9}


def test_sampled_requests_are_decided_by_the_times_of_sampled_rounds():
    policy, costs = WidthPolicy((1, 7)), CostTable((1, 7))
    costs.add(1, [1.0, 1.5, 1.0, 9.0])
    policy.costs = costs
    for _ in range(50):
        policy.learn(7, [3], [3])
    assert [policy.next(*classes) for classes in ((2, 0), (1, 1), (0, 2))] == [7, 1, 1]


def test_what_the_host_adds_to_every_round_favours_wide_ones():
    """A round of seven rows took four times as long as one row at the start, and serves twice."""
    policy = policy_of(lambda requests, width: 0.04 if width == 7 else 0.01, (1, 7))
    for _ in range(50):
        policy.learn(7, [2] * 32, ())
    assert policy.next(64, 0) == 1
    for _ in range(50):
        policy.took(1, 64, 0, 0.03)
    assert policy.next(64, 0) == 7
    for _ in range(50):  # a pause of a few rounds is none of theirs
        policy.took(7, 64, 0, 0.06)
    policy.took(7, 64, 0, 9.0)
    assert policy.rates[7] == pytest.approx(64 * 3 / 0.06, rel=0.02)


def test_batches_are_timed_at_powers_of_four_and_at_the_largest():
    assert [sizes_up_to(n) for n in (1, 2, 4, 48)] == [[1], [1, 2], [1, 4], [1, 4, 16, 48]]


def test_a_width_nearly_as_good_is_kept():
    assert best_width({1: 100.0, 7: 102.0}, 1) == 1
    assert best_width({1: 100.0, 7: 104.0}, 1) == 7
    assert best_width({1: 100.0}, 7) == 1


def test_a_round_costs_the_host_fewer_than_250_calls(tmp_path, monkeypatch):
    """All that a round does on the host: its width, its result, its metrics, as a server does it.

    A server's metrics lie in files that its processes share, which is slower than memory. Calls are
    counted, for their time depends on what else runs: about 40 microseconds on idle cores.
    """
    requests = 64
    control = WidthController(WidthSetting("adaptive", WIDTHS), 7)
    control.policy.costs = policy_of(machine, WIDTHS).costs
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(prometheus_client.values, "ValueClass", MultiProcessValue())
    registry = CollectorRegistry()
    counter, gauge = (partial(kind, registry=registry) for kind in (Counter, Gauge))
    metrics = Metrics({"model_name": "m", "tp_rank": 0}, control, counter, gauge)
    kinds = [
        SimpleNamespace(sampling_params=SimpleNamespace(top_k=1 if i % 2 else 50))
        for i in range(requests)
    ]
    results = {w: [(kinds[i], min(i % 7, w - 1)) for i in range(requests)] for w in WIDTHS}
    rounds, calls = 200, []
    for _ in range(2):  # the first rounds make what is made once
        calls.clear()
        sys.setprofile(lambda _, event, __: event in ("call", "c_call") and calls.append(event))
        try:
            for _ in range(rounds):
                width = control.next(requests // 2, requests // 2)
                control.learn(width, results[width])
                metrics.add([accepted for _, accepted in results[width]], width)
        finally:
            sys.setprofile(None)
    assert control.predicted_gain() and list(tmp_path.iterdir())
    # 216; one call a request would be 64 more.
    assert len(calls) / rounds < 250
