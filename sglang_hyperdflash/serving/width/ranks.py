"""One width for all ranks of attention data parallelism, each of which has requests of its own.

Expert layers' collectives force all ranks, idle ones included, through every round together, so a
round has one width. Every rank must compute it from the same numbers: every ``EVERY`` rounds each
sends how many requests it had and how its drafts were accepted. An exchange is read ``EVERY``
rounds after it began, so it has normally finished by then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from sglang.srt.runtime_context import get_parallel

from sglang_hyperdflash.serving.width.policy import HALF_LIFE, WidthPolicy, best_width

EVERY = 32
Exchange = Callable[[torch.Tensor], Callable[[], torch.Tensor]]


def exchange(numbers: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Send this rank's ``numbers [n]``; the returned function waits for all ``[ranks, n]``.

    Seam: the tensor-parallel group of CPU tensors, on which ranks enqueue in the same order.
    """
    group = get_parallel().tp_group
    rows = [torch.empty_like(numbers) for _ in range(group.world_size)]
    sent = torch.distributed.all_gather(rows, numbers, group=group.cpu_group, async_op=True)

    def received() -> torch.Tensor:
        sent.wait()
        return torch.stack(rows)

    return received


class RanksPolicy(WidthPolicy):
    """A width policy whose decisions are the same on every rank.

    Costs are those of the rank with the most requests, for which the others wait. Requests form one
    class; costs are those of greedy rounds, and the host's time is left out.

    Args:
        widths: ascending. copies: ranks that have the same requests: those of an attention group.
    """

    def __init__(self, widths: Sequence[int], send: Exchange = exchange, copies: int = 1) -> None:
        super().__init__(widths)
        super().forget()
        self._clear()
        self._send, self._rounds, self._copies = send, 0, copies
        self._received: Callable[[], torch.Tensor] | None = None
        self._seconds_now: dict[int, float] = {}

    def forget(self) -> None:
        """Another drafter drafts from now on: all ranks forget when they have heard it of one."""
        self._clear()
        self._replaced = 1.0

    def _clear(self) -> None:
        """What is sent next: requests, whether the drafter was replaced, each draft's counts."""
        drafts = self.widths[-1] - 1
        self._requests, self._replaced = 0, 0.0
        self._trials, self._successes = [0] * drafts, [0] * drafts

    def next(self, *counts: int) -> int:
        """The next round's width; every rank calls this once a round, with its own requests."""
        if self.costs is None:
            return self.width
        self._requests += sum(counts)
        self._rounds += 1
        if self._rounds % EVERY == 0:
            if self._received is not None:
                self._learn(self._received())
            numbers = [self._requests, self._replaced, *self._trials, *self._successes]
            self._received = self._send(torch.tensor(numbers, dtype=torch.float64))
            self._clear()
        self._since_probe += 1
        return (self._seconds_now and self._probe(self._seconds_now)) or self.width

    def _learn(self, ranks: torch.Tensor) -> None:
        busiest = math.ceil(float(ranks[:, 0].max()) / EVERY)
        requests, replaced, *counts = (ranks.sum(0) / self._copies).tolist()
        if replaced:
            super().forget()
            return
        if not busiest:
            return
        keep, drafts = 0.5 ** (requests / HALF_LIFE), self.widths[-1] - 1
        for old, new in (
            (self.classes[0].trials, counts[:drafts]),
            (self.classes[0].successes, counts[drafts:]),
        ):
            old[:] = [keep * a + b for a, b in zip(old, new, strict=True)]
        self._seconds_now, tokens = self.costs.of(busiest, False), self.classes[0].expected()
        at_once = requests / EVERY
        self.rates = {w: at_once * tokens[w - 1] / self._seconds_now[w] for w in self.widths}
        self.width = best_width(self.rates, self.width)

    def observe(self, width: int, *accepted: Sequence[int], best: int | None = None) -> None:
        """Count a round of this rank for the next exchange; no rank repeats a probe early."""
        ended = [0] * width
        for each in accepted:
            for drafts in each:
                ended[drafts] += 1
        reached = sum(ended)
        for k in range(width - 1):
            self._trials[k] += reached
            reached -= ended[k]
            self._successes[k] += reached
