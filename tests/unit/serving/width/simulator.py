"""A closed loop of requests under the width policy, on the rounds of :mod:`eval.width_replay`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eval.width_replay import Replay, Seconds, accepted_drafts
from sglang_hyperdflash.serving.width.policy import WidthPolicy


@dataclass(frozen=True)
class Traffic:
    """A closed loop: an answer that ends makes room for the next prompt.

    answer: mean decoded tokens; lengths are evenly spread up to twice that. prompt: tokens of each.
    prefill: seconds of a prefill pass of so many tokens.
    """

    concurrency: int
    answer: int
    prompt: int
    prefill: Callable[[int], float]


def closed_loop(
    seconds: Seconds,
    traffic: Traffic,
    acceptance: Sequence[float],
    *,
    rounds: int,
    policy: WidthPolicy | None = None,
    width: int = 1,
) -> Replay:
    """Run so many decoding rounds, and a prefill pass wherever answers have ended."""
    rng, found = random.Random(0), Replay()
    left: list[int] = []  # tokens of each running answer
    for _ in range(rounds):
        new = traffic.concurrency - len(left)
        if new:
            taken = traffic.prefill(new * traffic.prompt)
            found.seconds += taken
            found.tokens += new
            left += [rng.randint(1, 2 * traffic.answer - 1) for _ in range(new)]
        chosen = policy.next(len(left), 0) if policy else width
        taken = seconds(len(left), chosen)
        accepted = [accepted_drafts(acceptance, chosen, rng) for _ in left]
        if policy:
            policy.learn(chosen, accepted, ())
        found.widths.append(chosen)
        found.tokens += sum(min(n, 1 + a) for n, a in zip(left, accepted, strict=True))
        left = [n - 1 - a for n, a in zip(left, accepted, strict=True) if n > 1 + a]
        found.seconds += taken
    return found
