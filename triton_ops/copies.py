"""Copy drafts: the tokens that followed the last ones of a request when these came before.

    m    = length of the longest suffix, 3 to 16 tokens, that occurred before; the latest of equals
    c_k  = the k-th token after it        # past the end of what is known c repeats
    W, A = where c_k and the drafter's first choice differ: how often c_k was right, how often that
    w    = (W + 3) / (W + 8 A + 5)        # above 1/2 until the first choice is right instead
    q'_k = (1 - w) q_k + w [c_k]          # while the block's drafts follow c; greedy requests draft
                                          # c_k where w > 1/2

Verification is exact for any ``q`` (``sglang_hyperdflash.draft.propose``), so copies change
acceptance only. A request copies from its own prompt and answer alone. W and A are counted on the
device from what is committed, whichever of the two was drafted, of each kind of match.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from triton_ops.operator import register

SHORTEST, LONGEST = 3, 16
# Kinds of matches, (m + 1) // 4: none, 3-6, 7-10, 11-14, 15-16 tokens.
KINDS = (LONGEST + 1) // 4 + 1
# Of w. Without counts copies are drafted, or rounds of one row, which draft nothing, would never
# count any. A wrong copy costs the rest of a trained drafter's block: it is counted eight times.
AHEAD, AGAINST, BEHIND = 3.0, 8.0, 2.0


@dataclass(frozen=True)
class Copies:
    """The copies of a batch; bs requests, D drafts of a whole block.

    Attributes:
        rows: ``[bs or more, 2 D + 1]`` int64: c, -1 where there is none; the drafter's first
            choices after the copies before, which drafting writes; the kind of match.
        counts: ``[2, KINDS, 2]`` int32: ``counts[sampled, kind]`` is W, A.
    """

    rows: torch.Tensor
    counts: torch.Tensor


def parts(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of c ``[bs, D]``, the first choices ``[bs, D]`` and the kinds ``[bs]``."""
    n = rows.shape[1] // 2
    return rows[:, :n], rows[:, n : 2 * n], rows[:, 2 * n]


def matched(rows: torch.Tensor | None) -> torch.Tensor | None:
    """The ``rows``, or None where no request has a match."""
    return rows if rows is not None and parts(rows)[2].any() else None


def copy_weights(rows: torch.Tensor, counts: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """``w [bs]`` fp32; 0 without a match."""
    kinds = parts(rows)[2]
    right, first_right = counts[(top_ks > 1).long(), kinds].float().unbind(1)
    right = right + AHEAD
    weights = right / (right + (AGAINST * first_right + BEHIND))
    return weights.masked_fill(kinds == 0, 0.0)


def copy_drafts_reference(
    history: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    drafts: torch.Tensor,
    top_ks: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    vocabulary: int,
) -> torch.Tensor:
    """The reference of operator ``copy_drafts``, the end of a round: judge, append, match again.

    Args:
        history: ``[slots, H]`` int32, each request's last H tokens, the one of position p in column
            p modulo H; -1: no token to match or copy. Gets the committed tokens.
        slots, positions: ``[bs]`` int64: rows of ``history``; positions before the first tokens.
        tokens: ``[bs, B]`` int64, committed; lengths: ``[bs]`` int32, how many are.
        drafts: ``[bs, width - 1]`` int64, the round's. top_ks: ``[bs]`` int32.
        rows, counts: of the round's :class:`Copies`; become the next round's.
        vocabulary: tokens from it on are none.

    Returns:
        ``[bs, 2]`` int64: the kinds of the next copies; of the round's drafts, how many were copies
        from the first one on.
    """
    (copies, firsts, kinds), size = parts(rows), history.shape[1]
    width, order = drafts.shape[1], torch.arange(tokens.shape[1], device=tokens.device)
    committed = order < lengths.unsqueeze(1)
    tokens = torch.where(committed & (tokens < vocabulary), tokens, -1)
    # Judge the copies up to the first that is wrong. Tokens before a committed one were drafted, so
    # the drafts have followed c as far as c was right, and the first choice came after the same.
    c, first, given = copies[:, :width], firsts[:, :width], tokens[:, :width]
    right = ((c >= 0) & (given == c)).long().cumprod(1)
    judged = pad(right, (1, 0), value=1)[:, :width].bool() & (c >= 0) & (c != first)
    each = torch.stack([(judged & (given == token)).sum(1) for token in (c, first)], 1)
    counts.view(-1, 2).index_add_(0, (top_ks > 1).long() * KINDS + kinds, each.to(counts.dtype))
    followed = ((c >= 0) & (drafts == c)).long().cumprod(1).sum(1)
    # Append.
    slots, columns = slots.unsqueeze(1), (positions.unsqueeze(1) + 1 + order) % size
    history[slots, columns] = torch.where(committed, tokens, history[slots, columns]).int()
    # Match, in the text's order: its last token is in the last column.
    end, longest = (positions + lengths).unsqueeze(1), size
    if end.is_cpu:  # a GPU's host would wait once more
        longest = min(size, max(int(end.max()) + 1, LONGEST))
    index = torch.arange(longest, device=end.device)
    text = history[slots, (end + 1 - longest + index) % size]
    text = text.masked_fill(index < longest - 1 - end, -1)
    same, length = text >= 0, torch.zeros_like(text)
    for j in range(LONGEST):
        last = text[:, longest - 1 - j, None]
        same = same & (last >= 0) & (pad(text, (j, -j), value=-1) == last)
        length += same
        if not same[:, :-1].any():
            break
    length[:, -1] = 0
    best = torch.where(length >= SHORTEST, length.long() * longest + index, 0).amax(1, keepdim=True)
    start = best % longest
    after = torch.arange(copies.shape[1], device=end.device) % (longest - 1 - start)
    copies.copy_(torch.where(best > 0, text.gather(1, start + 1 + after), -1))
    kinds.copy_((best[:, 0] // longest + 1) // 4)
    return torch.stack([kinds, followed], 1)


copy_drafts = register("copy_drafts", copy_drafts_reference, "triton_ops.copy_kernel:launch")
