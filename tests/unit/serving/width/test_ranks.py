"""Ranks of attention data parallelism choose one width, from what each tells the others."""

import random

import pytest

from eval.width_ranks import connected
from sglang_hyperdflash.serving.width.policy import CostTable
from sglang_hyperdflash.serving.width.ranks import EVERY

WIDTHS = (1, 2, 4, 7)


class Ranks:
    """Policies of several ranks, which run every round together; an exchange ends in any order."""

    def __init__(self, ranks: int, seconds) -> None:
        costs = CostTable(WIDTHS)
        for size in (1, 16, 256):
            costs.add(size, [seconds(size, w) for w in WIDTHS] * 2)
        self.policies, self.draw = connected(ranks, costs), random.Random(0)

    def run(self, requests: list[int], acceptance: float, rounds: int) -> list[int]:
        """Widths of so many rounds, of each rank's requests."""
        chosen = []
        for _ in range(rounds):
            (width,) = {p.next(n, 0) for p, n in zip(self.policies, requests, strict=True)}
            chosen.append(width)
            for policy, count in zip(self.policies, requests, strict=True):
                drafts = [self.accepted(acceptance, width) for _ in range(count)]
                policy.observe(width, drafts, [], best=policy.width)
        return chosen

    def accepted(self, acceptance: float, width: int) -> int:
        drafts = (k for k in range(width - 1) if self.draw.random() >= acceptance)
        return next(drafts, width - 1)


def by_rows(requests: int, width: int) -> float:
    return 1 + 0.02 * requests * width + 0.1 * (width > 1)


@pytest.mark.parametrize("ranks", [2, 12])
def test_all_ranks_choose_alike_and_follow_load_and_acceptance(ranks):
    """``run`` fails where two ranks differ; one of them is idle, another has most requests."""
    group = Ranks(ranks, by_rows)
    few, many = [1] * (ranks - 1) + [0], [2] * (ranks - 2) + [0, 100]
    assert group.run(few, 0.9, 20 * EVERY)[-EVERY:].count(7) > EVERY - 3
    # The busiest rank decides, whose rows the others wait for.
    assert max(group.run(many, 0.5, 20 * EVERY)[-EVERY:-1]) < 7
    assert group.run(few, 0.0, 40 * EVERY)[-EVERY:].count(1) > EVERY - 3
    assert group.run(few, 0.95, 80 * EVERY)[-EVERY:].count(7) > EVERY - 3, "probes show it"


def test_all_ranks_forget_a_drafter_that_one_has_replaced():
    """``run`` fails where they differ meanwhile."""
    group = Ranks(3, by_rows)
    group.run([1, 1, 1], 0.0, 20 * EVERY)
    group.policies[1].forget()
    group.run([1, 1, 1], 1.0, EVERY)
    assert sum(group.policies[1].classes[0].trials) > 0, "as the others, which have not heard"
    group.run([1, 1, 1], 1.0, EVERY)
    assert all(sum(policy.classes[0].trials) == 0 for policy in group.policies)
    assert group.run([1, 1, 1], 1.0, 20 * EVERY)[-EVERY:].count(7) > EVERY - 3
