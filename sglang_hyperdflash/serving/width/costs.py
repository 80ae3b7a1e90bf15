"""What a decode round costs: seconds by batch size and width. Host only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


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
        found = self._known.get((requests, sampled))
        if found is None:
            columns = np.array(self._rows).T[len(self.widths) * sampled :]
            found = {w: self._at(requests, c) for w, c in zip(self.widths, columns, strict=False)}
            self._known[requests, sampled] = found
        return found

    def _at(self, requests: int, seconds: np.ndarray) -> float:
        beyond = requests - self.sizes[-1]
        if beyond > 0 and len(self.sizes) > 1:
            slope = (seconds[-1] - seconds[-2]) / (self.sizes[-1] - self.sizes[-2])
            return float(seconds[-1] + max(slope, 0.0) * beyond)
        return float(np.interp(requests, self.sizes, seconds))
