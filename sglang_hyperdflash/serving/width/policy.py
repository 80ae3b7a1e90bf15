"""Which width the next round should have: expected tokens over timed seconds. Host only.

    tokens(w) = sum over requests of 1 + sum_{k < w} a_1 ... a_k      # a_k: acceptance of draft k
    choose the w with the largest tokens(w) / (seconds(batch size, w) + host(batch size))

A round of width w shows whether draft k <= w - 1 is accepted where the k - 1 before it were. Later
positions are censored, not rejected. Seconds are those of :class:`CostTable`; ``host`` is what the
scheduler adds to a round of any width, which only serving shows.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from sglang_hyperdflash.serving.settings import ADAPTIVE, RANDOM, WidthSetting

# Request-rounds after which an observation counts half.
HALF_LIFE = 512
# Trials that the acceptance of the previous position counts for.
PRIOR_TRIALS, FIRST_PRIOR = 4.0, 0.8
HYSTERESIS = 0.03
# Share of the time that probes of a wider width may cost, and rounds between two of them at least.
PROBE_SHARE, PROBE_EVERY = 0.005, 32
# Rounds of which the host's time is the median.
HOST_ROUNDS = 31


class CostTable:
    """Seconds of a round, by batch size, width and whether any request is sampled.

    Args:
        widths: ascending.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = tuple(widths)
        self.sizes: list[int] = []
        self._rows: list[Sequence[float]] = []
        self._known: dict[tuple[int, bool], dict[int, float]] = {}

    def add(self, requests: int, seconds: Sequence[float]) -> None:
        """Timings of a larger batch: of every width without sampling, then of every width with."""
        self.sizes.append(requests)
        self._rows.append(tuple(seconds))
        self._known.clear()

    def of(self, requests: int, sampled: bool) -> dict[int, float]:
        """Seconds of a round of every width: linear between timed batch sizes, and after them."""
        seconds = self._known.get((requests, sampled))
        if seconds is None:
            columns = np.array(self._rows).T[len(self.widths) * sampled :]
            seconds = {w: self._at(requests, c) for w, c in zip(self.widths, columns, strict=False)}
            self._known[requests, sampled] = seconds
        return seconds

    def _at(self, requests: int, seconds: np.ndarray) -> float:
        beyond = requests - self.sizes[-1]
        if beyond > 0 and len(self.sizes) > 1:
            slope = (seconds[-1] - seconds[-2]) / (self.sizes[-1] - self.sizes[-2])
            return float(seconds[-1] + max(slope, 0.0) * beyond)
        return float(np.interp(requests, self.sizes, seconds))


class Acceptance:
    """Discounted acceptance of each draft position, of one class of requests."""

    def __init__(self, drafts: int) -> None:
        self.trials, self.successes = [0.0] * drafts, [0.0] * drafts

    def observe(self, width: int, accepted: Sequence[int]) -> None:
        """Count a round of ``width`` in which each request had so many drafts accepted."""
        keep = 0.5 ** (len(accepted) / HALF_LIFE)
        reached = len(accepted)
        for k in range(width - 1):
            if not reached:
                return
            passed = reached - accepted.count(k)
            self.trials[k] = keep * self.trials[k] + reached
            self.successes[k] = keep * self.successes[k] + passed
            reached = passed

    def expected(self) -> list[float]:
        """Expected tokens of one request in a round of every width, from 1 on.

        The prior of a position is the acceptance of the one before it.
        """
        total = survives = 1.0
        by_width, a = [total], FIRST_PRIOR
        for passed, tried in zip(self.successes, self.trials, strict=True):
            a = (passed + PRIOR_TRIALS * a) / (tried + PRIOR_TRIALS)
            survives *= a
            total += survives
            by_width.append(total)
        return by_width


def best_width(rates: Mapping[int, float], current: int) -> int:
    """The width with the largest rate, or ``current`` while that is nearly as good."""
    best = max(rates, key=rates.__getitem__)
    return current if rates.get(current, 0.0) * (1 + HYSTERESIS) >= rates[best] else best


class WidthPolicy:
    """The decision of one server: deterministic, so ranks with the same ``costs`` decide alike.

    Ranks' hosts differ, so :meth:`took` is for servers of one rank. Requests of a class accept
    alike: greedy or sampled ones, of a kind. Arguments by class are of all greedy kinds, then of
    all sampled ones.

    Args:
        widths: ascending. Until ``costs`` is set, the last one is chosen.
        kinds: of greedy requests, and as many of sampled ones.

    Attributes:
        width: the best one now. rates: tokens per second of every width, of the last batch.
    """

    def __init__(self, widths: Sequence[int], kinds: int = 1) -> None:
        self.widths, self.width, self.kinds = tuple(widths), widths[-1], kinds
        self.costs: CostTable | None = None
        self.forget()
        self.rates: dict[int, float] = {}
        self._since_probe = 0.0
        # Seconds that the host adds to a round, by request.
        self._host: deque[float] = deque(maxlen=HOST_ROUNDS)

    def forget(self) -> None:
        """Forget the acceptance of all rounds: another drafter drafts from now on."""
        drafts = self.widths[-1] - 1
        self.classes = tuple(Acceptance(drafts) for _ in range(2 * self.kinds))

    def next(self, *counts: int) -> int:
        """The width of the next round, of so many requests of each class."""
        if self.costs is None:
            return self.width
        seconds = self._seconds(counts)
        self.rates = self._rates(counts, seconds)
        self.width = best_width(self.rates, self.width)
        self._since_probe += 1
        return self._probe(seconds) or self.width

    def took(self, width: int, *counts: int, seconds: float) -> None:
        """Record the seconds from one round's start to the next one's."""
        if self.costs is not None:
            timed = self._timed(counts).get(width, seconds)
            self._host.append(max(seconds - timed, 0.0) / sum(counts))

    def _timed(self, counts: Sequence[int]) -> dict[int, float]:
        return self.costs.of(sum(counts), any(counts[self.kinds :]))

    def _seconds(self, counts: Sequence[int]) -> dict[int, float]:
        host = sum(counts) * median(self._host) if self._host else 0.0
        return {w: timed + host for w, timed in self._timed(counts).items()}

    def _rates(self, counts: Sequence[int], seconds: Mapping[int, float]) -> dict[int, float]:
        classes = zip(self.classes, counts, strict=True)
        present = [(acceptance.expected(), count) for acceptance, count in classes if count]
        return {
            w: sum([count * tokens[w - 1] for tokens, count in present]) / seconds[w]
            for w in self.widths
        }

    def _probe(self, seconds: Mapping[int, float]) -> int | None:
        """The next wider width now and then: narrow rounds show nothing of later drafts."""
        if self.width == self.widths[-1]:
            return None
        wider = self.widths[self.widths.index(self.width) + 1]
        # Seconds that a probe loses, in rounds.
        lost = 1 - self.rates[wider] / self.rates[self.width]
        lost *= seconds[wider] / seconds[self.width]
        if self._since_probe < max(PROBE_EVERY, lost / PROBE_SHARE):
            return None
        self._since_probe = 0
        return wider

    def observe(self, width: int, *accepted: Sequence[int], best: int | None = None) -> None:
        """A round's result: accepted drafts of each request of every class.

        Args:
            best: the policy's width when the round was launched, if it may be another by now.
        """
        best = best or self.width
        for acceptance, drafts in zip(self.classes, accepted, strict=True):
            if drafts:
                acceptance.observe(width, drafts)
        counts = tuple(map(len, accepted))
        if width > best and any(counts) and self.costs is not None:
            seconds = self._seconds(counts)
            rate = (sum(counts) + sum(map(sum, accepted))) / seconds[width]
            if rate > self._rates(counts, seconds)[best]:
                # A probe that was faster by itself is repeated at once: it costs nothing, and a
                # long memory would need many.
                self._since_probe = math.inf


class WidthController:
    """The widths of one worker's rounds by its setting; the same on all ranks of a group.

    Args:
        alone: a group of one rank. kinds: as of :class:`WidthPolicy`. policy: makes one of these
            widths that ranks with requests of their own share; None for a :class:`WidthPolicy`.

    Attributes:
        forced: while set, the width of every round; for timing.
        policy: of an adaptive server; None where nothing is learned.
    """

    def __init__(
        self,
        setting: WidthSetting,
        block: int,
        alone: bool = False,
        kinds: int = 1,
        policy: Callable[[Sequence[int]], WidthPolicy] | None = None,
    ) -> None:
        self.setting, self.block, self.alone, self.classes = setting, block, alone, 2 * kinds
        self._last: tuple[list[Any] | None, int, float] = None, block, 0.0
        self.forced: int | None = None
        adapts = setting.mode == ADAPTIVE and len(setting.widths) > 1
        policy = policy or partial(WidthPolicy, kinds=kinds)
        self.policy = policy(setting.widths) if adapts else None
        # Every rank draws the same.
        self._random = random.Random(0)

    def next(self, *counts: int) -> int:
        """The width of the round that starts, of so many requests of each class."""
        if self.forced is not None:
            return self.forced
        if self.policy is not None:
            return self.policy.next(*counts)
        if self.setting.mode == RANDOM:
            return self._random.choice(self.setting.widths)
        return self.setting.widths[-1]

    def started(self, reqs: list[Any], width: int, *counts: int) -> None:
        """Note that a round starts; ``reqs`` is the same list while its batch runs."""
        if self.policy is None or not self.alone:
            return
        (before, last, then), now = self._last, time.perf_counter()
        self._last = reqs, width, now
        if before is reqs:  # no other pass in between
            self.policy.took(last, *counts, seconds=now - then)

    @property
    def best(self) -> int | None:
        """The policy's width; rounds of a wider one are probes."""
        return self.policy.width if self.policy else None

    def observe(self, width: int, live: Sequence[tuple[int, int]], best: int | None = None) -> None:
        """A round's result: class and accepted drafts of its requests that had not finished.

        Args:
            best: what it was when the round was launched.
        """
        if self.policy is None:
            return
        by_class: list[list[int]] = [[] for _ in range(self.classes)]
        for number, accepted in live:
            by_class[number].append(accepted)
        self.policy.observe(width, *by_class, best=best)

    def predicted_gain(self) -> float | None:
        """Expected tokens per second of the width now over those of width 1; None if unknown."""
        rates = self.policy.rates if self.policy else {}
        return rates[self.policy.width] / rates[1] if 1 in rates else None
