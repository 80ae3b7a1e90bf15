"""Anchors and the block mask of block-parallel training.

A block anchored at ``a`` holds rows ``[anchor, mask x (B-1)]`` at positions ``a ... a+B-1``; row
k is trained to predict the token at ``a+k``. It sees context features strictly before ``a`` (the
anchor's own target state does not exist yet when serving) and its own block: bidirectionally, or
in a causal block itself and the rows before it.
"""

from __future__ import annotations

import torch


def sample_anchors(
    valid: torch.Tensor, count: int, seeds: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw up to ``count`` anchors per row, uniformly and without replacement, in order.

    A row's draw depends on its own seed and valid positions, so not on the padding or the other
    rows of its batch: many processes draw the same as one.

    Args:
        valid: ``[b, S]`` bool, valid anchor positions; seeds: one per row.

    Returns:
        anchors ``[b, n]`` int64 and ``[b, n]`` bool, False for rows' padding entries.
    """
    drawn = []
    for row, seed in zip(valid, seeds, strict=True):
        places = row.nonzero().squeeze(1)
        order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))
        drawn.append(places[order[:count]].sort().values)
    anchors = torch.nn.utils.rnn.pad_sequence(drawn, batch_first=True, padding_value=-1)
    if anchors.shape[1] == 0:
        anchors = torch.full((len(valid), 1), -1)
    keep = anchors >= 0
    return anchors.clamp(min=0), keep


def anchor_positions(loss_mask: torch.Tensor) -> torch.Tensor:
    """``[b, S]`` bool: an anchor and its first drafted token must both be answer tokens."""
    valid = loss_mask.clone()
    valid[:, -1] = False
    valid[:, :-1] &= loss_mask[:, 1:]
    return valid


def block_labels(
    tokens: torch.Tensor, loss_mask: torch.Tensor, anchors: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels ``[b, n, B-1]`` of drafts 1..B-1 and the contiguous prefix that is supervised."""
    s = tokens.shape[1]
    at = anchors.unsqueeze(-1) + torch.arange(1, block_size)
    inside = at < s
    flat = at.clamp(max=s - 1).flatten(1)
    labels = tokens.gather(1, flat).view_as(at)
    supervised = loss_mask.gather(1, flat).view_as(at) & inside
    return labels, supervised.int().cumprod(-1).bool()


def block_mask(
    anchors: torch.Tensor,
    keep: torch.Tensor,
    context: int,
    block_size: int,
    window: int | None = None,
    *,
    causal: bool = False,
) -> torch.Tensor:
    """``[b, n*B, context + n*B]`` bool, True where a block row may attend.

    Args:
        anchors: ``[b, n]``; keep: ``[b, n]`` bool; context: number of context features S.
        window: context features visible to a block at most, its last ones; None for all.
        causal: whether a row sees no later row of its block.
    """
    b, n = anchors.shape
    before = torch.arange(context) < anchors.unsqueeze(-1)  # [b, n, S]
    if window is not None:
        before &= torch.arange(context) >= anchors.unsqueeze(-1) - window
    before = before.unsqueeze(2).expand(b, n, block_size, context).reshape(b, -1, context)
    owner = torch.arange(n).repeat_interleave(block_size)
    own = owner[:, None] == owner[None, :]
    if causal:
        own = own.tril()
    own = own.expand(b, -1, -1)
    rows = keep.repeat_interleave(block_size, dim=1).unsqueeze(-1)
    # Padding blocks keep their own block visible: a row without any key would be NaN.
    return torch.cat([before & rows, own], dim=-1)
