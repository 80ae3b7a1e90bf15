"""The loss of one batch, as sums to be normalised over the global batch."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch

from sglang_hyperdflash.training.anchors import anchor_positions, block_labels, sample_anchors
from sglang_hyperdflash.training.losses import position_weights, row_losses
from sglang_hyperdflash.training.recipe import Objective
from sglang_hyperdflash.training.samples import Rows, States, Tensors, moved
from sglang_hyperdflash.training.vocabulary import vocabulary_logits


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

    def before(self, states: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """``states [b, S, d]`` of the token before each draft, for chosen blocks or drafts."""
        at = self.anchors.unsqueeze(-1) + torch.arange(self.labels.shape[-1], device=chosen.device)
        row = torch.arange(len(at), device=chosen.device).view(-1, 1, 1).expand_as(at)
        at = at.clamp(max=states.shape[1] - 1)[chosen]
        return states[moved(row[chosen], states.device), moved(at, states.device)]


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
    drafter,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weighted sums of the drafts' states ``hidden [b, n, B-1, d]``.

    Args:
        rows, blocks: on the CPU, where the rows to compute are chosen: a GPU would be waited for.
        states: on ``hidden``'s device.

    Returns:
        What :func:`denominators` divide, with gradient, ``[3]``; correct drafts and supervised
        drafts of each position, ``[B-1]`` each.
    """
    device, supervised, drafts = hidden.device, blocks.supervised, blocks.labels.shape[-1]
    count = drafts if objective.taught is None else objective.taught
    taught = supervised & (torch.arange(drafts, device="cpu") < count)
    chosen = moved(supervised.flatten().nonzero().squeeze(1), device)
    ce, distance, hits, own = row_losses(
        hidden.flatten(0, 2).index_select(0, chosen).float(),
        moved(blocks.labels[supervised], device),
        partial(vocabulary_logits, target.lm_head),
        early=taught[supervised],
        teacher=target.final(blocks.before(states.residual, taught)),
        temperature=objective.T if objective.loss == "ce_kl" else 1.0,
        chunk=objective.chunk,
        term=objective.term,
        dependency=drafter.dependency,
        previous=moved(blocks.previous(rows.tokens)[supervised], device),
        top_k=drafter.config.candidates,
        own=objective.candidates > 0,
    )
    weights = moved(_weights(objective, blocks), device)
    correct = torch.zeros(supervised.numel(), device=device).index_copy(0, chosen, hits.float())
    if objective.taught is None:
        distance = (weights * distance).sum()
    else:
        distance = objective.T**2 / objective.P * distance.sum()
    terms = torch.stack([(weights * ce).sum(), distance, (weights[: len(own)] * own).sum()])
    return terms, correct.view_as(supervised).sum((0, 1)), moved(supervised.sum((0, 1)), device)
