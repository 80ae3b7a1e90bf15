"""Frequency, presence and repetition penalties and ``min_new_tokens``, exact inside a block.

Source: SGLang's ``sampling/penaltylib``: with ``c`` the times a token was generated,

    x = x - frequency * c - presence * [c > 0]
    x = x * repetition if x < 0 else x / repetition          # where c > 0

and end tokens are impossible until ``min_new_tokens`` are out. Row k of a block follows k drafts
that are not generated yet, so its counts are the request's own and those drafts'. SGLang computes
one row of penalties a round and uses it for the whole block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from sglang.srt.utils import async_h2d

# For a drafter's candidates: impossible, yet a row of nothing else stays a distribution.
UNLIKELY = -1e30


@dataclass(frozen=True)
class Penalties:
    """Of the n requests of a batch that have any.

    Attributes:
        rows: ``[n]`` int64, their rows in the batch; slots: ``[n]`` int64, in the counts.
        frequency, presence, repetition: ``[n, 1]`` fp32.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor

    def applied(self, logits: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """``[n, ...]`` fp32 of ``logits [n, ...]`` whose tokens were generated ``counts`` times."""
        shape = (-1, *[1] * (logits.ndim - 1))
        seen = counts > 0
        penalised = logits.float() - self.frequency.view(shape) * counts
        # In place from here: a block of a large batch has gigabytes of logits.
        penalised -= self.presence.view(shape) * seen
        repetition = self.repetition.view(shape)
        scaled = penalised / repetition
        torch.where(penalised < 0, penalised * repetition, scaled, out=scaled)
        return torch.where(seen, scaled, penalised, out=scaled)

    def apply_to_block(
        self, logits: torch.Tensor, counts: torch.Tensor, drafts: torch.Tensor
    ) -> torch.Tensor:
        """Penalised rows of a block, ``[n, B, V]`` in the logits' dtype.

        Args:
            logits: ``[n, B, V]``; counts: ``[n, V]`` before the block's drafts.
            drafts: ``[n, B - 1]`` int64: row k follows the first k of them.
        """
        n, block, _ = logits.shape
        out = self.applied(logits, counts.unsqueeze(1)).to(logits.dtype)
        if block == 1:
            return out
        # Only the drafts' own entries differ from row to row; every entry is computed whole, so
        # a draft that occurs twice writes one value twice.
        at = drafts.unsqueeze(1).expand(n, block, block - 1)
        order = torch.arange(block, device=drafts.device)
        before = order.unsqueeze(1) > order[:-1]  # [B, B - 1]: draft i comes before row k
        equal = drafts.unsqueeze(2) == drafts.unsqueeze(1)  # [n, j, i]
        extra = (equal.unsqueeze(1) & before.view(1, block, 1, block - 1)).sum(-1)
        exact = self.applied(logits.gather(2, at), counts.gather(1, drafts).unsqueeze(1) + extra)
        return out.scatter(2, at, exact.to(out.dtype))


@dataclass(frozen=True)
class EndTokens:
    """Of the n requests of a batch with ``min_new_tokens`` and any end token.

    Attributes:
        rows: ``[n]`` int64; minimum: ``[n]``; prompts: ``[n]`` int64, tokens of each prompt.
        ids: ``[n, S]`` int64, each request's end tokens, the first repeated.
    """

    rows: torch.Tensor
    minimum: torch.Tensor
    prompts: torch.Tensor
    ids: torch.Tensor

    def too_early(self, contexts: torch.Tensor, block: int) -> torch.Tensor:
        """``[n, B]`` bool: an end token may not come out of row k.

        Args:
            contexts: ``[bs]``: tokens of each context at row 0.
        """
        out = contexts[self.rows] - self.prompts
        ahead = torch.arange(block, device=contexts.device)
        return out.unsqueeze(1) + ahead < self.minimum.unsqueeze(1)

    def forbid(self, logits: torch.Tensor, contexts: torch.Tensor) -> None:
        """Make early end tokens of ``logits [bs, B, V]`` impossible, in place.

        No other entry is touched or copied: the rows of a large batch have gigabytes.
        """
        block = logits.shape[1]
        order = torch.arange(block, device=logits.device)
        at = self.rows.view(-1, 1, 1), order.view(1, -1, 1), self.ids.unsqueeze(1)
        early = self.too_early(contexts, block).unsqueeze(2)
        # An end token that is repeated is written twice with one value.
        logits[at] = logits[at].masked_fill(early, float("-inf"))


class GeneratedCounts:
    """How often each running request has generated each token: ``table [slots, V]``.

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
