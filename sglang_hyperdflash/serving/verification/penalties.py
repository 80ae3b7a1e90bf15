"""How often each running request has generated each token, for penalties (``draft.adjust``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sglang.srt.utils import async_h2d


class GeneratedCounts:
    """``table [slots, V]``: times each token was generated, by row of the request pool.

    It is int32: an answer may repeat a token more often than int16 holds.
    """

    def __init__(self, slots: int, vocabulary: int, device: torch.device | str) -> None:
        self.table = torch.zeros(slots, vocabulary, dtype=torch.int32, device=device)

    def reset(self, slot: int, generated: Sequence[int]) -> None:
        """A request enters with the tokens it has already generated (after a retraction)."""
        row = self.table[slot].zero_()
        if len(generated):
            # Nothing that waits for the device: other requests' rounds are in flight.
            ids = async_h2d(list(generated), dtype=torch.int64, device=row.device)
            row.index_put_((ids,), torch.ones_like(ids, dtype=row.dtype), accumulate=True)

    def add(self, slots: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor) -> None:
        """Count the first ``lengths [n]`` of ``tokens [n, B]`` in ``slots [n]``."""
        order = torch.arange(tokens.shape[1], device=tokens.device)
        real = (order < lengths.unsqueeze(1)).to(torch.int32)
        rows = slots.unsqueeze(1).expand_as(tokens)
        self.table.index_put_((rows, tokens), real, accumulate=True)
