"""The loss of one batch, as sums to be normalised over the global batch."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import pydantic
import torch
from pydantic import Field

from sglang_hyperdflash.draft.config import HyperDFlashConfig
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.fields import CLOSED
from sglang_hyperdflash.training.anchors import anchor_positions, block_labels, sample_anchors
from sglang_hyperdflash.training.losses import position_weights, row_losses
from sglang_hyperdflash.training.samples import Rows, States, Tensors

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=CLOSED)
class Objective:
    """What a drafter learns; the predecessor of each draft is the data's own token.

    ``ce_kl`` is the paper's eq. 2-3, ``acceptance`` DSpark's form, ``selector`` DFlash 2's. p is
    the target's own distribution; the paper teaches with the mean of the paths instead, which
    served alike (tau 2.60 against 2.61 over three trainings each).
    ``candidates`` is needed because a server's candidates are the likeliest tokens of the draft
    row's own logits u: a head trained from the start on ``s`` alone carries the drafts by itself,
    and the right token is seldom among the candidates.
    """

    loss: Annotated[
        Literal["ce_kl", "acceptance", "selector"] | None,
        Field(
            description="ce_kl: CE + alpha * T^2 / P * sum of KL(p_k || q_k) over k <= P; "
            "acceptance: (1 - mix) * CE + mix * sum of |p - q| over all drafts; selector: CE and a "
            "K-way CE over the candidates; none: acceptance with a dependency head, else ce_kl"
        ),
    ] = None
    mix: Annotated[float, Field(ge=0, le=1, description="weight of the distance")] = 0.9
    alpha: Annotated[float, Field(ge=0, description="weight of the KL term; 0 turns it off")] = 0.15
    T: Annotated[Positive, Field(description="temperature of both distributions of the KL")] = 1.0
    P: Annotated[Count, Field(description="drafted positions in the KL, from the first")] = 2
    gamma: Annotated[
        Positive,
        Field(description="decay of the position weights exp(-(k-1) / gamma) of CE and distance"),
    ] = 4.0
    candidates: Annotated[
        float,
        Field(
            ge=0,
            description="weight of the CE of the draft rows' own logits, which choose the "
            "candidates of a dependency head; unused by selector, whose CE is that already",
        ),
    ] = 0.3
    chunk: Annotated[
        Count, Field(description="rows of logits in memory at once; changes nothing else")
    ] = 2048

    def resolved(self, config: HyperDFlashConfig) -> Objective:
        """The objective of a drafter: its loss named, ``candidates`` 0 where it does not apply.

        It does not without a head, nor to ``selector``, whose CE is of u already.

        Raises:
            HyperDFlashConfigError: the loss needs a dependency head that the drafter lacks.
        """
        loss = self.loss or ("acceptance" if config.dependency else "ce_kl")
        if loss == "selector" and config.dependency is None:
            raise HyperDFlashConfigError(
                "[objective]: loss = selector needs a drafter with a dependency head. Make one "
                "with `hyperdflash init --dependency-rank R`, or choose another loss."
            )
        chosen = config.dependency is not None and loss != "selector"
        return dataclasses.replace(self, loss=loss, candidates=self.candidates if chosen else 0.0)

    @property
    def term(self) -> str:
        """The second term's name in :data:`~sglang_hyperdflash.training.losses.TERMS` and logs."""
        names = {"ce_kl": "kl", "acceptance": "tv", "selector": "selector"}
        return names[self.loss or "ce_kl"]

    @property
    def factors(self) -> tuple[float, float, float]:
        """Of the CE, of the second term, and of the CE of u alone."""
        factors = {"acceptance": (1.0 - self.mix, self.mix), "selector": (1.0, 0.0)}
        return *factors.get(self.loss, (1.0, self.alpha)), self.candidates

    @property
    def taught(self) -> int | None:
        """Drafts of a block that the target teaches, from the first; None for all."""
        return {"acceptance": None, "selector": 0}.get(self.loss, self.P if self.alpha else 0)


@dataclasses.dataclass(frozen=True)
class Blocks(Tensors):
    """Anchors ``[b, n]`` with ``keep``, labels ``[b, n, B-1]`` and which of them are supervised."""

    anchors: torch.Tensor
    keep: torch.Tensor
    labels: torch.Tensor
    supervised: torch.Tensor

    @classmethod
    def draw(cls, rows: Rows, count: int, block_size: int, seeds: list[int]) -> Blocks:
        """Up to ``count`` blocks a row; a row's draws depend on its own seed and mask only."""
        anchors, keep = sample_anchors(anchor_positions(rows.loss_mask), count, seeds)
        labels, supervised = block_labels(rows.tokens, rows.loss_mask, anchors, block_size)
        return cls(anchors, keep, labels, supervised & keep.unsqueeze(-1))

    def previous(self, tokens: torch.Tensor) -> torch.Tensor:
        """The token before each draft, ``[b, n, B-1]``: the anchor, then the labels' own."""
        anchor = tokens.gather(1, self.anchors).unsqueeze(-1)
        return torch.cat([anchor, self.labels[..., :-1]], -1)


@dataclasses.dataclass(frozen=True)
class Sums:
    """Numerators of a batch, with gradient, and counts for the log.

    distance: the second term's. own: the CE of u alone. hits and rows are ``[B-1]``: correct
    drafts and supervised drafts of each position.
    """

    ce: torch.Tensor
    distance: torch.Tensor
    own: torch.Tensor
    hits: torch.Tensor
    rows: torch.Tensor


def denominators(objective: Objective, blocks: Blocks) -> torch.Tensor:
    """What CE, second term and CE of u are divided by, ``[3]``: known before any forward pass.

    Both CE, and D of ``acceptance``: the sum of the position weights. KL: the number of blocks.
    """
    weights = _weights(objective, blocks).sum()
    blocks_count = blocks.keep.sum().float()
    return torch.stack([weights, weights if objective.taught is None else blocks_count, weights])


def _weights(objective: Objective, blocks: Blocks) -> torch.Tensor:
    """Position weights of the supervised drafts, in row order."""
    weights = position_weights(blocks.labels.shape[-1], objective.gamma)
    return weights.expand_as(blocks.labels)[blocks.supervised]


def sums(
    objective: Objective,
    target,
    rows: Rows,
    states: States,
    blocks: Blocks,
    hidden: torch.Tensor,
    drafter=None,
) -> Sums:
    """Weighted sums of the drafts' states ``hidden [b, n, B-1, d]``.

    Args:
        target: has ``lm_head``.
        drafter: has ``dependency`` and ``config``; None for one without a head.
    """
    supervised, drafts = blocks.supervised, blocks.labels.shape[-1]
    taught = drafts if objective.taught is None else objective.taught
    early = (torch.arange(drafts) < taught).expand_as(supervised)[supervised]
    dependent = drafter is not None and drafter.dependency is not None
    ce, distance, hits, own = row_losses(
        hidden[supervised].float(),
        blocks.labels[supervised],
        target.lm_head,
        early=early,
        teacher=teacher_states(objective, rows, states, blocks),
        temperature=objective.T if objective.loss in (None, "ce_kl") else 1.0,
        chunk=objective.chunk,
        term=objective.term,
        dependency=drafter.dependency if dependent else None,
        previous=blocks.previous(rows.tokens)[supervised] if dependent else None,
        top_k=drafter.config.candidates if dependent else 0,
        own=objective.candidates > 0,
    )
    weights = _weights(objective, blocks)
    correct = torch.zeros(supervised.shape, dtype=torch.bool)
    correct[supervised] = hits
    if objective.taught is None:
        distance = (weights * distance).sum()
    else:
        distance = objective.T**2 / objective.P * distance.sum()
    return Sums(
        ce=(weights * ce).sum(),
        distance=distance,
        own=(weights[: len(own)] * own).sum(),
        hits=correct.sum((0, 1)),
        rows=supervised.sum((0, 1)),
    )


def teacher_states(
    objective: Objective, rows: Rows, states: States, blocks: Blocks
) -> torch.Tensor:
    """The target's final states at a+k-1 for the supervised drafts that it teaches, in row order.

    Returns:
        ``[K, d]``.
    """
    drafts = blocks.labels.shape[-1]
    p = drafts if objective.taught is None else min(objective.taught, drafts)
    if not p:
        return states.final.new_zeros(0, states.final.shape[-1])
    early = blocks.supervised[..., :p]
    at = before_drafts(rows, blocks, p)
    return states.final[tuple(index[early] for index in at)]


def before_drafts(rows: Rows, blocks: Blocks, drafts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and position of the state before each block's first drafts, ``[b, n, drafts]``."""
    device = blocks.anchors.device
    at = blocks.anchors.unsqueeze(-1) + torch.arange(drafts, device=device)
    row = torch.arange(len(at), device=device).view(-1, 1, 1).expand_as(at)
    return row, at.clamp(max=rows.tokens.shape[1] - 1)
