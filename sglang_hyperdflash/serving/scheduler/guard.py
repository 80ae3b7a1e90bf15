"""Whether a drafter's first drafts are accepted less often than those of the drafter before it.

Only rounds that drafted are counted, request by request. The first ``ROUNDS`` of them are left
out: contexts still hold K/V that the drafter before has written. Cached prompts keep it for longer:
on the tiny target random K/V there cost 0.08 of 0.61 first drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

# Rounds of a request in a sample. With four standard deviations 0.8 is told from 0.69 and less;
# rounds of one answer resemble each other, and so fewer would do harm.
ROUNDS, DEVIATIONS = 512, 4.0


class Sample(NamedTuple):
    """First drafts that were accepted, and that were verified."""

    accepted: int
    tried: int

    def __str__(self) -> str:
        return f"{self.accepted / self.tried:.3f} of {self.tried}"


def worse(found: Sample, before: Sample) -> bool:
    """Whether the first sample's proportion is below the other's: the test of two proportions."""
    both = (found.accepted + before.accepted) / (found.tried + before.tried)
    deviation = math.sqrt(both * (1 - both) * (1 / found.tried + 1 / before.tried))
    difference = before.accepted / before.tried - found.accepted / found.tried
    return difference > DEVIATIONS * deviation


class Guard:
    """Counts one drafter's rounds.

    Attributes:
        recent: the last whole sample; None until the drafter's trial is over.
    """

    def __init__(self) -> None:
        self.recent: Sample | None = None
        self._aged, self._accepted, self._tried = False, 0, 0

    def learn(self, width: int, accepted: Sequence[int]) -> None:
        """Count a round of a batch: ``accepted`` drafts of each request."""
        if width < 2:
            return
        self._tried += len(accepted)
        self._accepted += sum(n > 0 for n in accepted)
        if self._tried >= ROUNDS:
            if self._aged:
                self.recent = Sample(self._accepted, self._tried)
            self._aged, self._accepted, self._tried = True, 0, 0
