"""The loss of one batch, as sums to be normalised over the global batch (paper, eq. 2-3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.anchors import anchor_positions, block_labels, sample_anchors
from sglang_hyperdflash.training.losses import dpace_weights, position_weights, row_losses
from sglang_hyperdflash.training.samples import Rows, States, Tensors

TEACHERS = ("gated", "mean")
WEIGHTS = ("exponential", "dpace", "none")


@dataclass(frozen=True)
class Objective:
    """``CE + alpha * KL`` with ``L_KL = T^2 / P * sum_{k <= P} KL(p_k || q_k)`` (eq. 2-3).

    teacher: ``mean`` pools the paths as the paper does; ``gated`` takes the target's own collapse.
    weights: of the drafted positions in the CE: ``exponential`` (``exp(-(k-1) / gamma)``),
    ``dpace`` (the accept length each draft carries) or ``none``.
    """

    alpha: float = 0.15
    T: float = 1.0
    P: int = 2
    teacher: str = "gated"
    weights: str = "exponential"
    gamma: float = 4.0
    chunk: int = 2048

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("teacher", self.teacher, TEACHERS),
            ("weights", self.weights, WEIGHTS),
        ):
            if value not in allowed:
                raise HyperDFlashConfigError(
                    f"objective.{name} must be one of {', '.join(allowed)}; found {value!r}."
                )
        positive = {"T": self.T, "P": self.P, "gamma": self.gamma, "chunk": self.chunk}
        wrong = [name for name, value in positive.items() if not value > 0]
        if self.alpha < 0:
            wrong.append("alpha")
        if wrong:
            raise HyperDFlashConfigError(
                f"objective.{wrong[0]} must be {'at least 0' if wrong[0] == 'alpha' else 'above 0'}"
                f", found {getattr(self, wrong[0])!r}."
            )


@dataclass(frozen=True)
class Blocks(Tensors):
    """Anchors ``[b, n]`` with ``keep``, labels ``[b, n, B-1]`` and which of them are supervised."""

    anchors: torch.Tensor
    keep: torch.Tensor
    labels: torch.Tensor
    supervised: torch.Tensor

    @classmethod
    def draw(cls, rows: Rows, count: int, block_size: int, seeds: list[int]) -> Blocks:
        """Up to ``count`` blocks a row; a row's anchors depend on its own seed and mask only."""
        anchors, keep = sample_anchors(anchor_positions(rows.loss_mask), count, seeds)
        labels, supervised = block_labels(rows.tokens, rows.loss_mask, anchors, block_size)
        return cls(anchors, keep, labels, supervised & keep.unsqueeze(-1))


@dataclass(frozen=True)
class Sums:
    """Numerators of a batch, with gradient, and counts for the log.

    hits and rows are ``[B-1]``: correct drafts and supervised drafts of each position.
    """

    ce: torch.Tensor
    kl: torch.Tensor
    hits: torch.Tensor
    rows: torch.Tensor


def denominators(objective: Objective, blocks: Blocks) -> torch.Tensor:
    """What CE and KL of these blocks are divided by, ``[2]``: known before any forward pass.

    CE: the sum of the position weights (of the supervised drafts under ``dpace``, whose weights
    depend on the model). KL: the number of blocks.
    """
    weights = _fixed_weights(objective, blocks)
    return torch.stack([weights[blocks.supervised].sum(), blocks.keep.sum().float()])


def _fixed_weights(objective: Objective, blocks: Blocks) -> torch.Tensor:
    gamma = objective.gamma if objective.weights == "exponential" else None
    return position_weights(blocks.labels.shape[-1], gamma).expand_as(blocks.labels)


def sums(
    objective: Objective, target, rows: Rows, states: States, blocks: Blocks, hidden: torch.Tensor
) -> Sums:
    """Weighted CE and KL sums of the drafts' states ``hidden [b, n, B-1, d]``.

    Args:
        target: has ``lm_head`` and ``mean_pooled_state``.
    """
    supervised = blocks.supervised
    early = torch.arange(supervised.shape[-1]) < objective.P
    early = early.expand_as(supervised)[supervised]
    if not objective.alpha:
        early = torch.zeros_like(early)
    teacher = teacher_states(objective, target, rows, states, blocks)
    ce, kl, hits = row_losses(
        hidden[supervised].float(),
        blocks.labels[supervised],
        target.lm_head,
        early=early,
        teacher=teacher,
        temperature=objective.T,
        chunk=objective.chunk,
    )
    weights = _fixed_weights(objective, blocks)
    if objective.weights == "dpace":
        grid = torch.zeros(supervised.shape, dtype=ce.dtype)
        grid[supervised] = ce.detach()
        weights = dpace_weights(grid, supervised)
    correct = torch.zeros(supervised.shape, dtype=torch.bool)
    correct[supervised] = hits
    return Sums(
        ce=(weights[supervised] * ce).sum(),
        kl=objective.T**2 / objective.P * kl.sum(),
        hits=correct.sum((0, 1)),
        rows=supervised.sum((0, 1)),
    )


def teacher_states(
    objective: Objective, target, rows: Rows, states: States, blocks: Blocks
) -> torch.Tensor:
    """The target's states at a+k-1 for the supervised drafts k <= P, ``[K, d]``, in row order."""
    if not objective.alpha:
        return states.final.new_zeros(0, states.final.shape[-1])
    p = min(objective.P, blocks.labels.shape[-1])
    early = blocks.supervised[..., :p]
    at = (blocks.anchors.unsqueeze(-1) + torch.arange(p)).clamp(max=rows.tokens.shape[1] - 1)
    row = torch.arange(len(blocks.anchors)).view(-1, 1, 1).expand_as(at)
    if objective.teacher == "gated":
        return states.final[row[early], at[early]]
    return target.mean_pooled_state(states.residual[row[early], at[early]])
