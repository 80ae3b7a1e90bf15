"""Anchors and the block mask of block-parallel training.

A block anchored at ``a`` holds rows ``[anchor, mask x (B-1)]`` at positions ``a ... a+B-1``; row
k is trained to predict the token at ``a+k``. It sees context features strictly before ``a`` (the
anchor's own target state does not exist yet when serving) and its own block: bidirectionally, or
in a causal block itself and the rows before it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


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


def visible(
    anchors: torch.Tensor,
    keep: torch.Tensor,
    context: int,
    block_size: int,
    window: int | None = None,
    *,
    causal: bool = False,
) -> Callable[..., torch.Tensor]:
    """Whether block row ``q`` of batch row ``b`` may attend key ``k``, as FlexAttention asks it:
    ``(b, head, q, k)``, integer tensors that broadcast, to bool.

    Args:
        anchors: ``[b, n]``; keep: ``[b, n]`` bool; context: number of context features S, which
            come before the blocks' own n*B rows among the keys.
        window: context features visible to a block at most, its last ones; None for all.
        causal: whether a row sees no later row of its block.
    """
    # Tensors, not numbers: a compiled kernel is made again for every new number.
    anchors = anchors.masked_fill(~keep, 0)  # padding blocks see no context
    first = torch.full((), context, device=anchors.device)

    def may_attend(b, _head, q, k):
        own, anchor = k - first, anchors[b, q // block_size]
        before = k < anchor
        if window is not None:
            before = before & (k >= anchor - window)
        # Padding blocks keep their own block visible: a row without any key would be NaN.
        inside = (own >= 0) & (own // block_size == q // block_size)
        if causal:
            inside = inside & (own <= q)
        return before | inside

    return may_attend


def dense_mask(may_attend, batch: int, queries: int, keys: int, device) -> torch.Tensor:
    """``[batch, queries, keys]`` bool of :func:`visible`."""
    b, q, k = (torch.arange(n, device=device) for n in (batch, queries, keys))
    return may_attend(b.view(-1, 1, 1), None, q.view(-1, 1), k)


def block_mask(
    anchors: torch.Tensor, keep: torch.Tensor, context: int, block_size: int, *args, **options
) -> torch.Tensor | BlockMask:
    """The mask of ``n*B`` block rows over ``context + n*B`` keys; arguments of :func:`visible`.

    Dense on a CPU, ``[b, n*B, context + n*B]`` bool. On a GPU the tiles that hold a visible pair:
    anchors are in order, so with a window few of a block's tiles do.
    """
    may_attend = visible(anchors, keep, context, block_size, *args, **options)
    (batch, blocks), device = anchors.shape, anchors.device
    queries, keys = blocks * block_size, context + blocks * block_size
    if device.type == "cuda":
        return create_block_mask(may_attend, batch, None, queries, keys, device)
    return dense_mask(may_attend, batch, queries, keys, device)
