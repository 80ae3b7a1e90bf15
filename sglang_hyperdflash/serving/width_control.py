"""What one scheduler process knows of widths: its clock, its policy and, among ranks, rank 0's.

Every rank of a tensor-parallel group must run the same width. Acceptance is the same on all of
them; clocks are not. So rank 0 sends its cost table now and then, on the CPU, and all ranks, rank 0
too, decide by what was sent last: no collective in a round.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from sglang_hyperdflash.serving.width_policy import Table, WidthPolicy, bucket_of
from sglang_hyperdflash.serving.width_settings import ADAPTIVE, RANDOM, WidthSetting

SHARE_EVERY = 32
# Weight that the past keeps in the measured gain, a round.
KEEP = 0.99


class RoundClock:
    """Seconds between the starts of decoding rounds, where they mean one width's time.

    A round's interval counts if the round before it was of its batch bucket and width: with overlap
    scheduling on a GPU, the time between two launches is that of the round before.

    Args:
        alone: a launch returns when its round is over, as on a CPU: every interval is the round's
            own, up to the next pass of whatever kind. Under load every other pass is a prefill.
    """

    def __init__(self, alone: bool = False) -> None:
        self.alone = alone
        self.stop()

    def stop(self) -> None:
        """Idleness comes: what follows is not timed yet."""
        self._last: tuple[tuple[int, int], float, int] | None = None
        self._repeated = self._late = False

    def pause(self, now: float) -> tuple[tuple[int, int], float] | None:
        """A prefill starts; the cell and the seconds of the round before, if they count."""
        last = self._last
        self.stop()
        return (last[0], now - last[1]) if self.alone and last is not None else None

    def lap(self, now: float, requests: int) -> tuple[tuple[int, int], float] | None:
        """A round of so many starts; the cell and the seconds of the one before, if they count."""
        last = self._last
        if last is None or not (self._repeated or self.alone) or requests > last[2]:
            return None  # more requests without a prefill: a decode node was idle, maybe
        return last[0], now - last[1]

    def start(self, now: float, requests: int, width: int) -> None:
        """The round that starts has this width."""
        key = bucket_of(requests), width
        self._repeated = self._last is not None and self._last[0] == key and not self._late
        self._late = False
        self._last = key, now, requests

    def start_again(self, now: float) -> None:
        """The round that starts begins now: what came before was other rounds' work.

        On a GPU it was launched, and the time between the next two launches has it.
        """
        self._late = not self.alone
        if self._last is not None:
            self._last = self._last[0], now, self._last[2]


class WidthControl:
    """Chooses the width of every round of one worker.

    Args:
        setting: see there. block: the widest there is.
        share: sends rank 0's table to every rank and returns it; None without other ranks.
        now: seconds. alone: see :class:`RoundClock`.
    """

    def __init__(
        self,
        setting: WidthSetting,
        block: int,
        share: Callable[[Table], Table] | None = None,
        now: Callable[[], float] = time.perf_counter,
        alone: bool = False,
    ) -> None:
        self.setting, self.block, self._share, self._now = setting, block, share, now
        self.policy = None
        if setting.mode == ADAPTIVE and not setting.fixed:
            self.policy = WidthPolicy(setting.widths, share is not None, alone)
        self._dice = random.Random(0)
        self._clock = RoundClock(alone)
        self._new: dict[tuple[int, int], float] = {}
        # Start and tokens of the prefill that runs, where its time is its own.
        self._prefill: tuple[float, int] | None = None
        # The last result's requests that were not over before it, as given.
        self._lately: Sequence[tuple[Any, int]] = ()
        # Discounted: tokens a request and round, and a round's seconds over width 1's.
        self._tokens = self._requests = self._ratio = self._timed = 0.0

    def after_idleness(self) -> None:
        """Nothing ran before the next pass."""
        self._clock.stop()
        self._prefill = None

    def pause(self, tokens: int = 0) -> None:
        """The next pass is no decoding round, but a prefill of so many tokens, or another."""
        if self.policy is None:
            return
        now = self._now()
        timed = self._clock.pause(now)
        if timed is not None:
            self._time(*timed)
        self._end_prefill(now)
        if self._clock.alone and tokens:
            self._prefill = now, tokens

    def _end_prefill(self, now: float) -> None:
        if self._prefill is not None:
            started, tokens = self._prefill
            self.policy.costs.prefills.append((tokens, now - started))
            self._prefill = None

    def next(self, greedy: int, sampled: int) -> int:
        """The width of the round that starts now, of so many requests of either class."""
        if self.setting.fixed:
            return self.setting.widths[0]
        if self.setting.mode == RANDOM:
            return self._dice.choice(self.setting.widths)
        if self._share is not None and self.policy.rounds % SHARE_EVERY == 0:
            self.policy.costs.take(self._share(self.policy.costs.table()))
        now = self._now()
        timed = self._clock.lap(now, greedy + sampled)
        if timed is not None:
            self._time(*timed)
        self._end_prefill(now)
        width = self.policy.next(greedy, sampled)
        self._clock.start(now, greedy + sampled, width)
        return width

    def start_again(self) -> None:
        """Work of earlier rounds was done since the width was chosen, or the prefill began."""
        if self.policy is None:
            return
        now = self._now()
        self._clock.start_again(now)
        if self._prefill is not None:
            self._prefill = now, self._prefill[1]

    def _time(self, cell: tuple[int, int], seconds: float) -> None:
        costs = self.policy.costs
        costs.add(*cell, seconds)
        bucket, width = cell
        self._new[round(2 ** (bucket / 2)), width] = costs.measured[cell]
        one = costs.of(bucket, 1)
        if one:
            self._ratio = KEEP * self._ratio + costs.measured[cell] / one
            self._timed = KEEP * self._timed + 1

    def learn(self, width: int, live: Sequence[tuple[Any, int]], behind: int = 0) -> None:
        """A round's result: requests that were not over before it, the drafts accepted of each.

        Args:
            behind: rows of finished requests: with overlap scheduling they may run once more. A row
                that was retracted is in neither.
        """
        if self.policy is None or not (live or behind):
            return
        # An answer's first token is its prefill's.
        lengths = [len(r.output_ids_through_stop) - 1 for r, _ in self._lately if r.finished()]
        self._lately = live
        greedy: list[int] = []
        sampled: list[int] = []
        for req, accepted in live:
            (greedy if req.sampling_params.top_k <= 1 else sampled).append(accepted)
        self.policy.learn(width, greedy, sampled, lengths, behind)
        self._requests = KEEP * self._requests + len(live) + behind
        self._tokens = KEEP * self._tokens + len(live) + sum(greedy) + sum(sampled)

    def predicted_gain(self) -> float | None:
        """Of the width now over width 1; None while either is unknown."""
        rates = self.policy.rates if self.policy else {}
        mine, one = (rates.get(w) for w in (self.policy.width if self.policy else 1, 1))
        return mine / one if mine and one else None

    def measured_gain(self) -> float | None:
        """Tokens a second of the last hundred rounds over those that width 1 would have given."""
        if not (self._requests and self._ratio):
            return None
        return (self._tokens / self._requests) / (self._ratio / self._timed)

    def take_new_cells(self) -> list[tuple[tuple[int, int], float]]:
        """Cells measured since the last call: ``((requests, width), seconds)``."""
        taken, self._new = list(self._new.items()), {}
        return taken
