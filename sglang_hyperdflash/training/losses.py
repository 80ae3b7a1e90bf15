"""The objective: cross-entropy on drafted tokens plus early-position KL (paper, eq. 2-3).

Every loss returns a numerator and a denominator, so a caller can normalise over a global batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def position_weights(num_drafts: int, decay: float | None) -> torch.Tensor:
    """``w_k = exp(-(k-1) / decay)`` for k = 1..num_drafts, ``[num_drafts]``; ones without decay."""
    k = torch.arange(num_drafts, dtype=torch.float32)
    return torch.ones(num_drafts) if decay is None else torch.exp(-k / decay)


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted CE of ``logits [M, V]`` (fp32) against ``labels [M]`` with ``weights [M]``."""
    losses = F.cross_entropy(logits.float(), labels, reduction="none")
    return (losses * weights).sum(), weights.sum()


def kl_distillation(
    student: torch.Tensor, teacher: torch.Tensor, blocks: int, temperature: float, positions: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Eq. 2: ``T^2 / P * sum_k E[KL(p_k || q_k)]`` over the first P draft positions.

    Args:
        student, teacher: logits ``[K, V]`` of every supervised position with k <= P, flattened;
            the teacher for draft k is the target's state at a+k-1.
        blocks: number of blocks the expectation runs over; positions: P.

    Returns:
        Numerator and the denominator ``blocks``.
    """
    log_q = F.log_softmax(student.float() / temperature, dim=-1)
    log_p = F.log_softmax(teacher.float() / temperature, dim=-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum()
    scale = temperature**2 / positions
    return scale * divergence, torch.tensor(float(blocks))
