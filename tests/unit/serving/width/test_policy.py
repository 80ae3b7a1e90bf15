"""The width policy on synthetic traces: steady, ramp, burst, drift."""

import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from sglang_hyperdflash.serving.width.policy import Acceptance, CostTable, WidthPolicy, best_width
from sglang_hyperdflash.serving.width.timing import sizes_up_to

WIDTHS = (1, 2, 4, 7)
GOOD, FAIR, HOPELESS = [0.8] * 6, [0.45] * 6, [0.02] * 6


def policy_of(seconds: Callable[[int, int], float], widths: Sequence[int]) -> WidthPolicy:
    """A policy that has timed rounds of so many requests and rows as a start does."""
    policy, costs = WidthPolicy(widths), CostTable(widths)
    for requests in sizes_up_to(64):
        costs.add(requests, [seconds(requests, w) for w in widths] * 2)
    policy.costs = costs
    return policy


def accepted_drafts(acceptance: Sequence[float], width: int, rng: random.Random) -> int:
    for k in range(width - 1):
        if rng.random() >= acceptance[k]:
            return k
    return width - 1


def replay(policy: WidthPolicy, loads: list[int], acceptance) -> list[int]:
    """The widths of one round for each entry of ``loads``, its number of requests.

    ``acceptance`` is that of a request in a round. The policy learns a round later, as overlap
    schedules it.
    """
    rng, widths, result = random.Random(0), [], None
    for number, requests in enumerate(loads):
        width = policy.next(requests, 0)
        accepted = [accepted_drafts(acceptance(number, i), width, rng) for i in range(requests)]
        if result:
            policy.observe(*result, ())
        result = width, accepted
        widths.append(width)
    return widths


def machine(requests: int, width: int) -> float:
    """Milliseconds like those of two cores: rows cost, and a draft pass costs too."""
    return 10 + 0.1 * requests + 0.12 * requests * width + (3 + 0.02 * requests) * (width > 1)


def rates(requests: int, acceptance: list[float]) -> dict[int, float]:
    """Tokens per millisecond at every width where the acceptance is known."""
    known = Acceptance(6)
    known.trials, known.successes = [1e9] * 6, [1e9 * a for a in acceptance]
    tokens = known.expected()
    return {w: requests * tokens[w - 1] / machine(requests, w) for w in WIDTHS}


def efficiency(widths: list[int], loads: list[int], drafts) -> float:
    """Time that the best width of every round would have needed for the same tokens, of ours."""
    needed = taken = 0.0
    for number, (width, requests) in enumerate(zip(widths, loads, strict=True)):
        seconds, known = machine(requests, width), rates(requests, drafts(number, 1))
        needed += seconds * known[width] / max(known.values())
        taken += seconds
    return needed / taken


def always(acceptance: list[float]):
    return lambda number, request: acceptance


def step(number: int, request: int) -> list[float]:
    return HOPELESS if 500 <= number < 2000 else GOOD


# Requests of every round, what is accepted of whom, and rounds to settle.
TRACES = {
    **{f"steady {n}": ([n] * 800, always(a), 0) for n, a in ((1, GOOD), (64, FAIR))},
    "hopeless": ([16] * 800, always(HOPELESS), 0),
    "up and down": ([1] * 300 + [64] * 300 + [1] * 300, always(GOOD), 0),
    "ramp": ([1 + number // 20 for number in range(20 * 128)], always(FAIR), 0),
    "bursts": ([64 if number % 200 < 20 else 2 for number in range(2000)], always(FAIR), 0),
    "falls": ([4] * 2000, step, 1000),
    "rises": ([4] * 4000, step, 3000),
    "one bad request": ([16] * 800, lambda _, request: GOOD if request else HOPELESS, 300),
}


@pytest.mark.parametrize("name", TRACES)
def test_every_load_is_run_nearly_as_fast_as_at_its_best_width(name):
    loads, drafts, settled = TRACES[name]
    widths = replay(policy_of(machine, WIDTHS), loads, drafts)
    late = widths[settled:], loads[settled:], lambda n, _: drafts(n + settled, 1)
    assert efficiency(*late) > 0.98


def test_the_traces_have_different_best_widths():
    best = {max(known, key=known.get) for known in (rates(1, GOOD), rates(64, FAIR))}
    assert len(best) == 2 and max(rates(16, HOPELESS).values()) == rates(16, HOPELESS)[1]


@pytest.mark.parametrize("requests, acceptance", [(1, 0.0), (64, 0.2)])
def test_probes_at_width_1_go_on_and_cost_at_most_1_percent(requests, acceptance):
    loads, drafts = [requests] * 3000, always([acceptance] * 6)
    late = replay(policy_of(machine, WIDTHS), loads, drafts)[1000:]
    assert set(late) == {1, 2}
    seconds = sum(machine(requests, width) for width in late)
    tokens = sum(1 + acceptance * (width > 1) for width in late)
    assert seconds / tokens < 1.01 * machine(requests, 1)
    probes = [number for number, width in enumerate(late) if width > 1]
    assert max(later - earlier for earlier, later in itertools.pairwise(probes)) < 200


def test_an_untimed_server_stays_at_its_widest_and_learns_each_class():
    policy = WidthPolicy(WIDTHS)
    for _ in range(20):
        assert policy.next(4, 4) == 7
        policy.observe(7, [6] * 8, [0] * 8)
    greedy, sampled = policy.classes
    assert greedy.expected()[6] > 6 and sampled.expected()[6] < 1.2


def test_a_worthless_drafter_drafts_where_copies_are_right():
    policy, alone, with_copies = WidthPolicy((1, 7), 2), (1, 0, 0, 0), (0, 1, 0, 0)
    policy.costs = policy_of(lambda requests, width: 1 + width / 4, (1, 7)).costs
    for _ in range(100):
        policy.observe(7, [0], [5], [], [])
    chosen = [policy.next(*counts) for counts in (alone, with_copies, alone, with_copies)]
    assert chosen == [1, 7, 1, 7]


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
        policy.observe(7, [3], [3])
    assert [policy.next(*classes) for classes in ((2, 0), (1, 1), (0, 2))] == [7, 1, 1]


def test_what_the_host_adds_to_every_round_favours_wide_ones():
    """A round of seven rows took four times as long as one row at the start, and serves twice."""
    policy = policy_of(lambda requests, width: 0.04 if width == 7 else 0.01, (1, 7))
    for _ in range(50):
        policy.observe(7, [2] * 32, ())
    assert policy.next(64, 0) == 1
    for _ in range(50):
        policy.took(1, 64, 0, seconds=0.03)
    assert policy.next(64, 0) == 7
    for _ in range(50):  # a pause of a few rounds is none of theirs
        policy.took(7, 64, 0, seconds=0.06)
    policy.took(7, 64, 0, seconds=9.0)
    assert policy.rates[7] == pytest.approx(64 * 3 / 0.06, rel=0.02)


def test_a_width_nearly_as_good_is_kept():
    assert best_width({1: 100.0, 7: 102.0}, 1) == 1
    assert best_width({1: 100.0, 7: 104.0}, 1) == 7
    assert best_width({1: 100.0}, 7) == 1
