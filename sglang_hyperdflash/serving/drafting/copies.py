"""What requests may copy from, and the copies of the batch that runs (``triton_ops.copies``).

A request's row of the history is written from its tokens on the host when it starts: before its
prefill, also after a retraction, or when its first round begins on a decode node. A batch that
changed appends its anchors. From then on every round appends what it commits and looks for the next
round's copies.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
from sglang.srt.utils import async_d2h, async_h2d

from sglang_hyperdflash.serving.batch import BatchRequests, Block
from sglang_hyperdflash.serving.verification.exact import Committed
from triton_ops.copies import KINDS, Copies, copy_drafts

# Rounds after which a judgement counts half.
HALF_LIFE = 256


class CopyHistory:
    """The last tokens of every request, on the device.

    Args:
        slots: rows of the request pool. most: tokens of a row. block: rows of a whole block, of
            which all but one are drafts.
        padding: requests that a captured batch has at most more than there are.

    Attributes:
        copies: buffers of the largest batch, which CUDA graphs read.
    """

    def __init__(
        self,
        slots: int,
        most: int,
        block: int,
        vocabulary: int,
        device: torch.device | str,
        padding: int = 0,
    ) -> None:
        self.vocabulary = vocabulary
        self.tokens = torch.full((slots, most), -1, dtype=torch.int32, device=device)
        rows = torch.zeros(slots + padding, 2 * block - 1, dtype=torch.int64, device=device)
        self.copies = Copies(rows, torch.zeros(2, KINDS, 2, dtype=torch.int32, device=device))
        self._rounds = 0
        self._batch: Any = None  # what a batch keeps from round to round, and no request with it

    def write(self, slot: int, req: Any) -> None:
        """A request's last tokens; placeholders of images and the like are none."""
        most = self.tokens.shape[1]
        total = len(req.origin_input_ids) + len(req.output_ids)
        ids = numpy.asarray((req.origin_input_ids[-most:] + req.output_ids)[-most:])
        row = numpy.full(most, -1, numpy.int32)
        real = (ids >= 0) & (ids < self.vocabulary)
        row[numpy.arange(total - len(ids), total) % most] = numpy.where(real, ids, -1)
        self.tokens[slot] = async_h2d(row, dtype=torch.int32, device=self.tokens.device)

    def begin(self, requests: BatchRequests, block: Block) -> None:
        """Look for the copies of a batch that is another than the last round's."""
        if requests.draws is not self._batch:
            self._batch, anchors = requests.draws, block.tokens[:, :1]
            slots = [slot for slot, _ in requests.places]
            self._slots = async_h2d(slots, dtype=torch.int64, device=self.tokens.device)
            one = torch.ones(len(slots), dtype=torch.int32, device=self.tokens.device)
            self._step(requests, block.positions[:, 0] - 1, anchors, one, anchors[:, :0])

    def end(
        self, requests: BatchRequests, block: Block, committed: Committed, read: bool
    ) -> torch.Tensor | None:
        """Judge the round's copies, append its tokens, look for the next round's copies.

        Returns:
            ``[bs, 2]`` int64: the kinds of the next round's matches, and how many of the round's
            drafts were copies; on the host when the round's result is. None if none is to be
            ``read``.
        """
        given = block.positions[:, 0], committed.tokens, committed.accept_lens
        result = self._step(requests, *given, block.tokens[:, 1:])
        self._rounds += 1
        if self._rounds % HALF_LIFE == 0:
            self.copies.counts.bitwise_right_shift_(1)
        return async_d2h(result) if read else None

    def forget(self) -> None:
        """Forget who was right, which says nothing of another drafter, and the batch."""
        self.copies.counts.zero_()
        self._batch = None

    def _step(self, requests: BatchRequests, *given: torch.Tensor) -> torch.Tensor:
        rows, counts = self.copies.rows[: len(requests.reqs)], self.copies.counts
        given = *given, requests.sampling.top_ks, rows, counts
        return copy_drafts(self.tokens, self._slots, *given, self.vocabulary)
