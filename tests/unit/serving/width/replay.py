"""A simulation of the width policy: rounds with given times and acceptance."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from sglang_hyperdflash.serving.width.policy import CostTable, WidthPolicy
from sglang_hyperdflash.serving.width.timing import sizes_up_to

# (requests, width) -> seconds of a round.
Seconds = Callable[[int, int], float]


def policy_of(seconds: Seconds, widths: Sequence[int], most: int = 64) -> WidthPolicy:
    """A policy that has timed ``seconds`` as a start does, up to ``most`` requests."""
    policy, costs = WidthPolicy(widths), CostTable(widths)
    for requests in sizes_up_to(most):
        costs.add(requests, [seconds(requests, w) for w in widths] * 2)
    policy.costs = costs
    return policy


@dataclass
class Replay:
    """What happened, round by round."""

    widths: list[int] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def accepted_drafts(acceptance: Sequence[float], width: int, rng: random.Random) -> int:
    """Drafts accepted of one request's round."""
    for k in range(width - 1):
        if rng.random() >= acceptance[k]:
            return k
    return width - 1


def replay(
    seconds: Seconds,
    loads: Iterable[int],
    acceptance: Callable[[int, int], Sequence[float]],
    *,
    policy: WidthPolicy | None = None,
    width: int = 1,
    noise: float = 0.0,
    seed: int = 0,
) -> Replay:
    """Run one round for each entry of ``loads``, its number of requests.

    The policy learns a round later, as overlap schedules it.

    Args:
        acceptance: of (round, request), of each draft after accepted ones. policy: chooses widths;
            None always runs ``width``. noise: relative standard deviation of a round's time.
    """
    rng, found = random.Random(seed), Replay()
    result = None
    for number, requests in enumerate(loads):
        chosen = policy.next(requests, 0) if policy else width
        taken = seconds(requests, chosen) * max(rng.gauss(1, noise), 0.5)
        accepted = [accepted_drafts(acceptance(number, i), chosen, rng) for i in range(requests)]
        if policy:
            if result:
                policy.observe(*result, ())
            result = chosen, accepted
        found.widths.append(chosen)
        found.tokens += requests + sum(accepted)
        found.seconds += taken
    return found
