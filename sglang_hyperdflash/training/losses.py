"""The objective: cross-entropy on drafted tokens plus early-position KL (paper, eq. 2-3).

Losses come as one number a row, in rows that are supervised; the caller weights and normalises
them over the global batch. Logits exist for a chunk of rows at a time, forward and backward, so
memory does not grow with vocabulary times sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

Head = Callable[[torch.Tensor], torch.Tensor]


def position_weights(num_drafts: int, gamma: float | None) -> torch.Tensor:
    """``w_k = exp(-(k-1) / gamma)`` for k = 1..num_drafts, ``[num_drafts]``; ones without gamma."""
    k = torch.arange(num_drafts, dtype=torch.float32)
    return torch.ones(num_drafts) if gamma is None else torch.exp(-k / gamma)


def dpace_weights(
    ce: torch.Tensor, supervised: torch.Tensor, smoothing: float = 0.5
) -> torch.Tensor:
    """D-PACE: ``w_j = sum_{m >= j} prod_{i <= m} q_i``, the accept length that draft j carries.

    ``q_i = (1 - a) exp(-CE_i) + a`` is a smoothed chance that draft i is accepted.

    Args:
        ce: ``[..., num_drafts]`` cross-entropy of every draft; no gradient flows through it.
        supervised: the same shape, bool: a prefix of each block.
        smoothing: a.

    Returns:
        fp32 weights of the same shape, zero where nothing is supervised.
    """
    q = (1 - smoothing) * torch.exp(-ce.detach().float()) + smoothing
    reach = torch.where(supervised, q, 0.0).cumprod(-1)
    return reach.flip(-1).cumsum(-1).flip(-1)


def row_losses(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    head: Head,
    *,
    early: torch.Tensor,
    teacher: torch.Tensor,
    temperature: float,
    chunk: int = 2048,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """CE and hit of every row, ``KL(p || q)`` of the early ones, without all logits at once.

    Args:
        hidden: draft states ``[M, d]``; labels: ``[M]``; head: states to logits ``[., V]``.
        early: ``[M]`` bool, the rows that are distilled; teacher: their target states ``[K, d]``.
        temperature: T of eq. 2, for both distributions.
        chunk: rows whose logits are alive at a time; they are computed again in the backward.

    Returns:
        ``ce [M]`` and ``kl [K]``, fp32, both without weights; ``hits [M]`` bool, where the most
        probable token is the label.
    """
    ce, kl, hits, at = [], [], [], 0
    for start in range(0, len(hidden), chunk):
        rows = slice(start, start + chunk)
        count = int(early[rows].sum())
        inputs = (hidden[rows], labels[rows], early[rows], teacher[at : at + count])
        losses = checkpoint(_chunk, *inputs, head, temperature, use_reentrant=False)
        ce.append(losses[0])
        kl.append(losses[1])
        hits.append(losses[2])
        at += count
    if not ce:
        none = hidden.new_zeros(0, dtype=torch.float32)
        return none, none, none.bool()
    return torch.cat(ce), torch.cat(kl), torch.cat(hits)


def _chunk(hidden, labels, early, teacher, head: Head, temperature: float):
    logits = head(hidden).float()
    ce = F.cross_entropy(logits, labels, reduction="none")
    log_q = F.log_softmax(logits[early] / temperature, dim=-1)
    with torch.no_grad():
        log_p = F.log_softmax(head(teacher).float() / temperature, dim=-1)
    return ce, (log_p.exp() * (log_p - log_q)).sum(-1), logits.argmax(-1) == labels
