"""Copy drafts: the tokens that followed the last ones of a request when these came before.

    m    = tokens of the longest suffix, of 3 to 16, that occurs before, most lately
    c_k  = the k-th token after it                    # past the end of what is known c repeats
    s    = W / (W + A)                                # where c_k is not the drafter's likeliest
                                                      # token: how often c_k was right, and that
    q'_k = (1 - s) q_k + s [c_k]                      # while the block's drafts follow c; greedy
                                                      # requests draft c_k where s > 1/2

Verification is exact for any ``q`` (``sglang_hyperdflash.draft.propose``), so copies change
acceptance only. A request copies from its own prompt and answer alone. W and A are counted on the
device from what is committed, whichever of the two was drafted, by the kind of match.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triton_ops.operator import register

SHORTEST, LONGEST = 3, 16
# Of matches, (m + 1) // 4: none, then 3-6, 7-10, 11-14, 15-16 tokens.
KINDS = (LONGEST + 1) // 4 + 1
# What W and A begin with.
PRIOR, DRAFTER_PRIOR = 3.0, 3.5


@dataclass(frozen=True)
class Copies:
    """The copies of a batch; bs requests, D drafts of a whole block.

    Attributes:
        rows: ``[bs, 2 D + 1]`` int64: c, -1 where there is none; the drafter's likeliest tokens
            after the copies before, which drafting writes; m, or 0 where nothing matches.
        counts: ``[2, 5, 2]`` int32: W and A of greedy and of sampled requests by kind.
    """

    rows: torch.Tensor
    counts: torch.Tensor

    def of(self, bs: int) -> Copies:
        """Those of the first ``bs`` requests."""
        return Copies(self.rows[:bs], self.counts)


def parts(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of c ``[bs, D]``, the likeliest ``[bs, D]`` and m ``[bs]``."""
    n = rows.shape[1] // 2
    return rows[:, :n], rows[:, n : 2 * n], rows[:, 2 * n]


def copy_shares(rows: torch.Tensor, counts: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """``s [bs]`` fp32; 0 without a match."""
    m = parts(rows)[2]
    right, drafter_right = counts[(top_ks > 1).long(), (m + 1) // 4].float().unbind(1)
    right = right + PRIOR
    return (right / (right + (drafter_right + DRAFTER_PRIOR))).masked_fill(m == 0, 0.0)


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
    totals: torch.Tensor,
    vocabulary: int,
) -> torch.Tensor:
    """The reference of operator ``copy_drafts``, the end of a round: judge, append, match again.

    Args:
        history: ``[slots, H]`` int32, each request's last H tokens, the one of position p in column
            p modulo H; -1: no token to match or copy. Gets the committed tokens.
        slots, positions: ``[bs]`` int64: rows of ``history``, and positions of the last anchors.
        tokens: ``[bs, B]`` int64, committed after them; lengths: ``[bs]`` int32, how many are.
        drafts: ``[bs, width - 1]`` int64, the round's. top_ks: ``[bs]`` int32.
        rows, counts: of the round's :class:`Copies`; become the next round's.
        totals: ``[2]`` int64: drafts that were copies, and how many were accepted; added to.

    Returns:
        ``[bs]`` int64, m of the next round's copies.
    """
    (copies, likeliest, m), size = parts(rows), history.shape[1]
    width, order = drafts.shape[1], torch.arange(tokens.shape[1], device=tokens.device)
    committed = order < lengths.unsqueeze(1)
    tokens = torch.where(committed & (tokens < vocabulary), tokens, -1)
    # Judge the copies up to the first that is wrong. Tokens before a committed one were drafted, so
    # the drafts have followed c as far as c was right.
    c, first, given = copies[:, :width], likeliest[:, :width], tokens[:, :width]
    right = ((c >= 0) & (given == c)).long().cumprod(1)
    judged = (right.cumsum(1) - right == order[:width]) & (c >= 0) & (given >= 0) & (c != first)
    each = torch.stack([(judged & (given == token)).sum(1) for token in (c, first)], 1)
    kinds = (top_ks > 1).long() * KINDS + (m + 1) // 4
    counts.view(-1, 2).index_add_(0, kinds, each.to(counts.dtype))
    followed = ((c >= 0) & (drafts == c)).long().cumprod(1).sum(1)
    totals += torch.stack([followed.sum(), torch.minimum(followed, lengths - 1).sum()])
    # Append.
    columns, known = (positions.unsqueeze(1) + 1 + order) % size, history[slots]
    known.scatter_(1, columns, torch.where(committed, tokens, known.gather(1, columns)).int())
    history[slots] = known
    # Match: ``here`` is the position of each column's token, ``end`` that of the last.
    end = (positions + lengths).unsqueeze(1)
    here = end - (end - torch.arange(size, device=end.device)) % size
    earliest = (end - size + 1).clamp(min=0)
    same, length = (here >= earliest) & (here < end), torch.zeros_like(here)
    for j in range(LONGEST):
        last = known.gather(1, (end - j) % size)
        same = same & (last >= 0) & (here - j >= earliest) & (known.roll(j, 1) == last)
        length += same
        if not same.any():
            break
    best = torch.where(length >= SHORTEST, (length << 32) | here, 0).amax(1, keepdim=True)
    start = best & 0xFFFFFFFF
    after = torch.arange(copies.shape[1], device=end.device) % (end - start).clamp(min=1)
    found = known.gather(1, (start + 1 + after) % size).long()
    copies.copy_(torch.where(best > 0, found, -1))
    return m.copy_(best[:, 0] >> 32).clone()


copy_drafts = register("copy_drafts", copy_drafts_reference, "triton_ops.copy_kernel:launch")
