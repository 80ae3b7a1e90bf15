"""Replays the width policy against a table of round times.

A simulated round costs what the table says and accepts what the acceptance says; the policy is the
served one, fed as the worker feeds it.
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
    """Run one round for each entry of ``loads``, its number of requests.

    Args:
        acceptance: of (round, request), for each draft position. policy: chooses widths; None
            always runs ``width``. noise: relative standard deviation of a round's time.
    """
    rng, found = random.Random(seed), Replay()
    before = None
    for number, requests in enumerate(loads):
        chosen = policy.next(requests, 0) if policy else width
        taken = seconds(requests, chosen) * max(rng.gauss(1, noise), 0.5)
        accepted = [accepted_drafts(acceptance(number, i), chosen, rng) for i in range(requests)]
        if policy:
            key = (bucket_of(requests), chosen)
            if key == before:  # a round is timed when the one before it was of its width
                policy.costs.add(*key, taken)
            before = key
            policy.learn(chosen, accepted, ())
        found.widths.append(chosen)
        found.tokens += requests + sum(accepted)
        found.seconds += taken
    return found


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
    # Of each running answer the tokens left and all its tokens; of those that ended, all.
    left: list[tuple[int, int]] = []
    lengths: list[int] = []
    for _ in range(rounds):
        new = traffic.concurrency - len(left)
        if new:
            taken = traffic.prefill(new * traffic.prompt)
            found.seconds += taken
            found.tokens += new
            wholes = (rng.randint(1, 2 * traffic.answer - 1) for _ in range(new))
            left += [(whole, whole) for whole in wholes]
            if policy:
                policy.costs.prefills.append((new * traffic.prompt, taken))
        chosen = policy.next(len(left), 0) if policy else width
        taken = seconds(len(left), chosen)
        accepted = [accepted_drafts(acceptance, chosen, rng) for _ in left]
        if policy:
            policy.costs.add(bucket_of(len(left)), chosen, taken)
            policy.learn(chosen, accepted, (), lengths)
        found.widths.append(chosen)
        found.tokens += sum(min(n, 1 + a) for (n, _), a in zip(left, accepted, strict=True))
        after = [(n - 1 - a, whole) for (n, whole), a in zip(left, accepted, strict=True)]
        # A policy sees an answer's length a round later.
        lengths = [whole for n, whole in after if n <= 0]
        left = [(n, whole) for n, whole in after if n > 0]
        found.seconds += taken
    return found
