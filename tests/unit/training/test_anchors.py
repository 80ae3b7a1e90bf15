"""Drawn anchors, and the block mask against a plain Python loop."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from sglang_hyperdflash.training.anchors import block_mask, sample_anchors


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 4])
def test_a_row_sees_what_is_strictly_before_its_anchor_and_its_own_block(window, causal):
    """A padding block (of anchor 0) sees itself alone: a row of nothing would be NaN."""
    anchors = torch.tensor([[2, 5, 0], [1, 3, 7]])
    keep = torch.tensor([[True, True, False], [True, True, True]])
    context, block = 9, 4
    mask = block_mask(anchors, keep, context, block, window, causal=causal)
    every = product(range(2), range(3), range(block), range(context + 3 * block))
    for b, n, row, key in every:
        anchor, (own, at) = int(anchors[b, n]), divmod(key - context, block)
        if key < context:
            expected = bool(keep[b, n]) and anchor - (window or context) <= key < anchor
        else:
            expected = own == n and (not causal or at <= row)
        assert bool(mask[b, n * block + row, key]) == expected, (b, n, row, key)


def test_anchors_are_drawn_without_replacement_in_order_and_uniformly():
    valid = torch.tensor([[True, False, True, True, False, True], [False] * 6])
    seen = torch.zeros(6)
    for seed in range(2000):
        anchors, keep = sample_anchors(valid, 2, [seed, seed])
        chosen = anchors[0][keep[0]].tolist()
        assert chosen == sorted(set(chosen)) and len(chosen) == 2 and not keep[1].any()
        seen[chosen] += 1
    assert not seen[~valid[0]].any()
    assert (seen[valid[0]] / 2000 - 0.5).abs().max() < 0.05
    anchors, keep = sample_anchors(valid, 9, [0, 0])  # more than there are
    assert anchors[0][keep[0]].tolist() == [0, 2, 3, 5]
    anchors, keep = sample_anchors(valid[1:], 3, [0])
    assert anchors.shape == (1, 1) and not keep.any()
