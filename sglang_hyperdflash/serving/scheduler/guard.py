"""Whether a drafter's first drafts are accepted less often than those of the drafter before it.

Rounds of one answer resemble each other, so requests are what is compared: each has the share of
its first rounds whose first draft was accepted. Requests that ran before the drafter came do not
count, since their contexts hold K/V of the one before. Cached prompts still do: on the tiny target
random K/V there lowered the acceptance of first drafts from 0.61 to 0.53.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, pvariance
from typing import Any, NamedTuple

# Requests of a sample, and rounds of each that count. Where requests differ by 0.2, four standard
# deviations tell 0.8 from 0.7 and less.
REQUESTS, ROUNDS, DEVIATIONS = 128, 32, 4.0
# Requests never differ less: a difference without any spread would always be clear.
LEAST_VARIANCE = 0.0025
_SEEN = "hyperdflash_guard"


class Sample(NamedTuple):
    """Of some requests: the mean and the variance of their shares of accepted first drafts."""

    rate: float
    variance: float
    requests: int

    def __str__(self) -> str:
        return f"{self.rate:.3f} in {self.requests} requests"


def worse(found: Sample, before: Sample) -> bool:
    """Whether the first sample's mean is clearly below the other's."""
    variance = sum(max(s.variance, LEAST_VARIANCE) / s.requests for s in (found, before))
    return before.rate - found.rate > DEVIATIONS * math.sqrt(variance)


class Guard:
    """Counts one drafter's rounds.

    Attributes:
        recent: the last whole sample; None until the drafter's trial is over.
    """

    def __init__(self) -> None:
        self.recent: Sample | None = None
        self.begin()

    def begin(self) -> None:
        """The drafter drafts from the next round on: requests that run then do not count."""
        self._begun = False
        self._open: dict[Any, list[int]] = {}  # accepted first drafts and rounds
        self._rates: list[float] = []

    def learn(self, width: int, live: Sequence[tuple[Any, int]]) -> None:
        """Count a round of a batch.

        Args:
            live: SGLang's ``Req`` and its accepted drafts, of those that had not finished.
        """
        for req in [req for req in self._open if req.finished()]:
            self._close(req)
        for req, accepted in live:
            if getattr(req, _SEEN, None) is not self:
                setattr(req, _SEEN, self)
                if self._begun:
                    self._open[req] = [0, 0]
            counts = self._open.get(req)
            if counts is not None and width > 1:
                counts[0] += accepted > 0
                counts[1] += 1
                if counts[1] == ROUNDS:
                    self._close(req)
        self._begun = True

    def _close(self, req: Any) -> None:
        accepted, tried = self._open.pop(req)
        if tried:
            self._rates.append(accepted / tried)
        if len(self._rates) == REQUESTS:
            self.recent = Sample(fmean(self._rates), pvariance(self._rates), REQUESTS)
            self._rates = []
