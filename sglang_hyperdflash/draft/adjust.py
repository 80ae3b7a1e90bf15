"""Penalties, ``min_new_tokens`` and bias, exact inside a block.

Source: SGLang's ``sampling/penaltylib``: with ``c`` the times a token was generated,

    x = x - frequency * c - presence * [c > 0]
    x = x * repetition if x < 0 else x / repetition          # where c > 0

and end tokens are impossible until ``min_new_tokens`` are out; then the bias is added. Row k of a
block follows k drafts that are not generated yet, so its counts are the request's own and those
drafts'. SGLang computes one row of penalties a round and uses it for the whole block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triton_ops.operator import register

# The score of an impossible candidate; finite, so a row of nothing else stays a distribution.
UNLIKELY = -1e30
NEUTRAL = (0.0, 0.0, 1.0)


@dataclass(frozen=True)
class Adjustments:
    """The changes to the logits of a batch of bs requests; a field that none needs is None.

    Attributes:
        counts: ``[slots, V]`` int32, how often each token was generated; with ``penalties`` only.
        slots: ``[bs]`` int64, each request's row of ``counts``.
        penalties: ``[bs, 3]`` fp32, frequency, presence and repetition; ``NEUTRAL`` for none.
        end_ids: ``[bs, E]`` int64, each request's end tokens, padded with -1.
        earliest: ``[bs]`` int64, the context length from which an end token is allowed.
        bias: ``[bs, V]``, added in the logits' dtype.
    """

    counts: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    penalties: torch.Tensor | None = None
    end_ids: torch.Tensor | None = None
    earliest: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The fields in the order of the operators' arguments."""
        return self.counts, self.slots, self.penalties, self.end_ids, self.earliest, self.bias


def penalised(logits: torch.Tensor, counts: torch.Tensor, penalties: torch.Tensor) -> torch.Tensor:
    """Return ``logits [n, ...]`` in fp32 with ``penalties [n, 3]`` for ``counts`` applied."""
    shape = (-1, *[1] * (logits.ndim - 1))
    frequency, presence, repetition = (values.reshape(shape) for values in penalties.T)
    seen = counts > 0
    x = logits.float() - frequency * counts
    # In place from here: a block of a large batch has gigabytes of logits.
    x -= presence * seen
    scaled = x / repetition
    torch.where(x < 0, x * repetition, scaled, out=scaled)
    return torch.where(seen, scaled, x, out=scaled)


def adjust_candidates(
    scores: torch.Tensor,
    ids: torch.Tensor,
    drafts: torch.Tensor,
    positions: torch.Tensor,
    adjustments: Adjustments,
) -> torch.Tensor:
    """Return the adjusted ``scores [bs, K]`` of the next draft's candidates ``ids [bs, K]``.

    Args:
        drafts: ``[bs, k]`` int64, the block's drafts so far.
        positions: ``[bs]`` int64, the position of the token before the next draft.
    """
    counts, slots, penalties, end_ids, earliest, bias = adjustments.tensors
    if counts is not None:
        times = counts[slots.unsqueeze(1), ids]
        times = times + (ids.unsqueeze(2) == drafts.unsqueeze(1)).sum(-1)
        scores = penalised(scores, times, penalties)
    if end_ids is not None:
        is_end = (ids.unsqueeze(2) == end_ids.unsqueeze(1)).any(-1)
        early = (positions + 1 < earliest).unsqueeze(1)
        scores = scores.masked_fill(is_end & early, UNLIKELY)
    if bias is not None:
        scores = scores + bias.gather(1, ids).float()
    return scores


def adjust_rows_reference(
    logits: torch.Tensor,
    block_tokens: torch.Tensor,
    positions: torch.Tensor,
    counts: torch.Tensor | None,
    slots: torch.Tensor | None,
    penalties: torch.Tensor | None,
    end_ids: torch.Tensor | None,
    earliest: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> None:
    """Adjust the rows of blocks in place; the reference of operator ``adjust_rows``.

    Rows of requests without adjustments are not touched.

    Args:
        logits: ``[bs, B, V]``.
        block_tokens: ``[bs, B]`` int64, the anchor, then the drafts.
        positions: ``[bs, B]`` int64.
        counts, slots, penalties, end_ids, earliest, bias: see :class:`Adjustments`.
    """
    if counts is not None:
        requests = (penalties != penalties.new_tensor(NEUTRAL)).any(1).nonzero().squeeze(-1)
        drafts, times = block_tokens[requests, 1:], counts[slots[requests]]
        logits[requests] = _penalised_block(logits[requests], times, drafts, penalties[requests])
    if end_ids is not None:
        request, column = (end_ids >= 0).nonzero(as_tuple=True)
        end, row = (positions[request] + 1 < earliest[request, None]).nonzero(as_tuple=True)
        logits[request[end], row, end_ids[request, column][end]] = float("-inf")
    if bias is not None:
        logits.add_(bias.unsqueeze(1).to(logits.dtype))


def _penalised_block(
    logits: torch.Tensor, counts: torch.Tensor, drafts: torch.Tensor, penalties: torch.Tensor
) -> torch.Tensor:
    """Return ``logits [n, B, V]`` penalised for ``counts [n, V]`` and ``drafts [n, B - 1]``."""
    n, block, _ = logits.shape
    out = penalised(logits, counts.unsqueeze(1), penalties).to(logits.dtype)
    # Only the drafts' own entries differ from row to row; every entry is computed whole, so a draft
    # that occurs twice writes one value twice.
    columns = drafts.unsqueeze(1).expand(n, block, block - 1)
    order = torch.arange(block, device=drafts.device)
    before = order.unsqueeze(1) > order[:-1]  # [B, B - 1]: draft i comes before row k
    equal = drafts.unsqueeze(2) == drafts.unsqueeze(1)  # [n, j, i]
    extra = (equal.unsqueeze(1) & before.view(1, block, 1, block - 1)).sum(-1)
    times = counts.gather(1, drafts).unsqueeze(1) + extra
    exact = penalised(logits.gather(2, columns), times, penalties)
    return out.scatter(2, columns, exact.to(out.dtype))


adjust_rows = register("adjust_rows", adjust_rows_reference, "triton_ops.adjust_kernel:launch")
