"""Replays the width policy against a table of round times: the plan past one machine.

A simulated round costs what the table says and accepts what the acceptance says; the policy is the
served one, fed as the worker feeds it: a round is timed when the one before it was of its width.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from sglang_hyperdflash.serving.width_policy import WidthPolicy, bucket_of

# (requests, width) -> seconds of a round.
Seconds = Callable[[int, int], float]


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
    """Run one round for each entry of ``loads``.

    Args:
        loads: requests of each round. acceptance: of a round and a request's number, for each
            draft position. policy: chooses widths; None runs ``width`` always. noise: relative
            standard deviation of a round's time.
    """
    rng, found = random.Random(seed), Replay()
    before = None
    for number, requests in enumerate(loads):
        chosen = policy.next(requests, 0) if policy else width
        taken = seconds(requests, chosen) * max(rng.gauss(1, noise), 0.5)
        accepted = [accepted_drafts(acceptance(number, i), chosen, rng) for i in range(requests)]
        if policy:
            key = (bucket_of(requests), chosen)
            if key == before:
                policy.costs.add(*key, taken)
            before = key
            policy.learn(chosen, accepted, ())
        found.widths.append(chosen)
        found.tokens += requests + sum(accepted)
        found.seconds += taken
    return found
