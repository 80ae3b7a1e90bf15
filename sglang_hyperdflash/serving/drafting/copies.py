"""What requests may copy from, and the copies of the batch that runs (``triton_ops.copies``).

A request's row of the history is written from its tokens on the host when its first round begins in
a row of the request pool: after a prefill, a retraction, a prefill node's transfer. From then on
every round appends what it commits and looks for the next round's copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy
import torch
from sglang.srt.utils import async_d2h, async_h2d

from sglang_hyperdflash.serving.batch import BatchRequests, Block
from sglang_hyperdflash.serving.verification.exact import Committed
from triton_ops.copies import KINDS, Copies, copy_drafts

# Rounds after which a judgement counts half, and between two readings of the totals.
HALF_LIFE, READ_EVERY = 256, 8


class CopyHistory:
    """The last tokens of every request, on the device.

    Args:
        slots: rows of the request pool. most: tokens of a row.
        ranks: captured batches are padded to a multiple of them.
        block: rows of a whole block, of which all but one are drafts.

    Attributes:
        copies: buffers of the largest batch, which CUDA graphs read.
        totals: ``[2]`` int64: drafts that were copies, and how many of them were accepted.
    """

    def __init__(
        self,
        slots: int,
        most: int,
        block: int,
        vocabulary: int,
        device: torch.device | str,
        ranks: int = 1,
    ) -> None:
        self.vocabulary, self.device = vocabulary, device

        def filled(value: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        self.tokens = filled(-1, slots, most, dtype=torch.int32)
        counts = filled(0, 2, KINDS, 2, dtype=torch.int32)
        self.copies = Copies(filled(0, slots + ranks, 2 * block - 1), counts)
        self.totals = filled(0, 2)
        self._rounds = 0
        self._reqs: list[Any] | None = None
        self._places: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()

    def begin(self, requests: BatchRequests, block: Block) -> Copies:
        """The copies of a round's batch; those of another batch than the last are looked for."""
        bs = len(requests.reqs)
        copies = self.copies.of(bs)
        if requests.reqs is not self._reqs:
            for req, place in zip(requests.reqs, requests.places, strict=True):
                if place != self._places.get(req):
                    self._places[req] = place
                    self.tokens[place[0]] = self._row(req)
            slots = [slot for slot, _ in requests.places]
            self._slots = async_h2d(slots, dtype=torch.int64, device=self.device)
            self._reqs = requests.reqs
            copies.rows[:, :-1].fill_(-1)  # nothing to judge
            one = torch.ones(bs, dtype=torch.int32, device=self.device)
            anchors = block.tokens[:, :1]
            self._step(block.positions[:, 0] - 1, anchors, one, anchors[:, :0], requests)
        return copies

    def end(
        self, requests: BatchRequests, block: Block, committed: Committed
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Judge the round's copies, append its tokens, look for the next round's copies.

        Returns:
            the lengths ``[bs]`` of the next round's matches and, in some rounds, the totals; on the
            host as soon as the round's result is there.
        """
        positions, drafts = block.positions[:, 0], block.tokens[:, 1:]
        given = positions, committed.tokens, committed.accept_lens, drafts
        matches = async_d2h(self._step(*given, requests))
        self._rounds += 1
        if self._rounds % HALF_LIFE == 0:
            self.copies.counts.bitwise_right_shift_(1)
        return matches, async_d2h(self.totals) if self._rounds % READ_EVERY == 0 else None

    def leave(self, reqs: Sequence[Any]) -> None:
        """Requests that get a token in a prefill: their rows are written again after it."""
        for req in reqs:
            self._places.pop(req, None)

    def forget(self) -> None:
        """Forget who was right: of another drafter it says nothing."""
        self.copies.counts.zero_()

    def _step(
        self,
        positions: torch.Tensor,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        drafts: torch.Tensor,
        requests: BatchRequests,
    ) -> torch.Tensor:
        copies = self.copies.of(len(lengths))
        given = self._slots, positions, tokens, lengths, drafts, requests.sampling.top_ks
        state = copies.rows, copies.counts, self.totals
        return copy_drafts(self.tokens, *given, *state, self.vocabulary)

    def _row(self, req: Any) -> torch.Tensor:
        """``[H]`` int32, a request's tokens by position modulo H.

        Placeholders of images and the like are no tokens.
        """
        most = self.tokens.shape[1]
        total = len(req.origin_input_ids) + len(req.output_ids)
        ids = numpy.asarray((req.origin_input_ids[-most:] + req.output_ids)[-most:])
        row = numpy.full(most, -1, numpy.int32)
        real = (ids >= 0) & (ids < self.vocabulary)
        row[numpy.arange(total - len(ids), total) % most] = numpy.where(real, ids, -1)
        return async_h2d(row, dtype=torch.int32, device=self.device)
