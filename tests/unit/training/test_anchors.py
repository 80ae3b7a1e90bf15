"""Anchors, labels and the block mask against plain Python loops."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from sglang_hyperdflash.training.anchors import (
    anchor_positions,
    block_labels,
    block_mask,
    sample_anchors,
)


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


def test_anchor_and_first_draft_must_be_answer_tokens():
    mask = torch.tensor([[False, True, True, False, True], [True, True, True, True, True]])
    assert anchor_positions(mask)[:, :4].tolist() == (mask[:, :4] & mask[:, 1:]).tolist()
    assert not anchor_positions(mask)[:, 4].any()


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


def test_a_row_s_anchors_do_not_depend_on_its_batch():
    valid = torch.rand(3, 40, generator=torch.Generator().manual_seed(0)) < 0.5
    together, keep = sample_anchors(valid, 5, [7, 8, 9])
    padded = torch.nn.functional.pad(valid[1:2], (0, 11))
    assert together[1].tolist() == sample_anchors(padded, 5, [8])[0][0].tolist() and keep.all()


def test_labels_stop_at_the_first_token_outside_the_answer():
    tokens = torch.arange(100, 110).unsqueeze(0)
    loss_mask = torch.ones(1, 10, dtype=torch.bool)
    loss_mask[0, 5] = False
    anchors = [2, 6, 8]
    labels, supervised = block_labels(tokens, loss_mask, torch.tensor([anchors]), 5)
    assert supervised[0].sum(-1).tolist() == [2, 3, 1]
    for n, anchor in enumerate(anchors):
        found = labels[0, n][supervised[0, n]].tolist()
        assert found == [100 + anchor + k for k in range(1, len(found) + 1)]
        assert supervised[0, n, : len(found)].all()
