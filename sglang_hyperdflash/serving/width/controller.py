"""Chooses the width of every round of one worker, by the server's setting."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from sglang_hyperdflash.serving.width.policy import WidthPolicy
from sglang_hyperdflash.serving.width.settings import ADAPTIVE, RANDOM, WidthSetting


class WidthController:
    """The widths of one worker's rounds. All ranks of a tensor-parallel group choose the same.

    Args:
        setting: see there. block: the widest there is.

    Attributes:
        forced: while set, the width of every round; for timing.
        policy: of an adaptive server; None where nothing is learned.
    """

    def __init__(self, setting: WidthSetting, block: int) -> None:
        self.setting, self.block = setting, block
        self.forced: int | None = None
        adapts = setting.mode == ADAPTIVE and not setting.fixed
        self.policy = WidthPolicy(setting.widths) if adapts else None
        # Every rank draws the same.
        self._random = random.Random(0)

    def next(self, greedy: int, sampled: int) -> int:
        """The width of the round that starts, of so many requests of either class."""
        if self.forced is not None:
            return self.forced
        if self.policy is not None:
            return self.policy.next(greedy, sampled)
        if self.setting.mode == RANDOM:
            return self._random.choice(self.setting.widths)
        return self.setting.widths[-1]

    def learn(self, width: int, live: Sequence[tuple[Any, int]]) -> None:
        """A round's result: its requests that had not finished, accepted drafts of each."""
        if self.policy is None:
            return
        greedy: list[int] = []
        sampled: list[int] = []
        for req, accepted in live:
            (greedy if req.sampling_params.top_k <= 1 else sampled).append(accepted)
        self.policy.learn(width, greedy, sampled)

    def predicted_gain(self) -> float | None:
        """Expected tokens per second of the width now over those of width 1; None if unknown."""
        rates = self.policy.rates if self.policy else {}
        return rates[self.policy.width] / rates[1] if 1 in rates else None
