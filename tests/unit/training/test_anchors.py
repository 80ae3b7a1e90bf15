"""Anchors, labels and the block mask against plain Python loops."""

from __future__ import annotations

import torch

from sglang_hyperdflash.training.anchors import (
    anchor_positions,
    block_labels,
    block_mask,
    sample_anchors,
)


def test_mask_is_strictly_before_the_anchor_and_the_own_block():
    anchors = torch.tensor([[2, 5, 0], [1, 3, 7]])
    keep = torch.tensor([[True, True, False], [True, True, True]])
    context, block = 9, 4
    mask = block_mask(anchors, keep, context, block)
    for b in range(2):
        for n in range(3):
            for row in range(block):
                query = n * block + row
                for key in range(context + 3 * block):
                    if key < context:
                        expected = bool(keep[b, n]) and key < int(anchors[b, n])
                    else:
                        expected = (key - context) // block == n
                    assert bool(mask[b, query, key]) == expected, (b, query, key)


def test_a_window_hides_what_lies_further_back():
    anchors, keep = torch.tensor([[2, 6, 9]]), torch.ones(1, 3, dtype=torch.bool)
    context, block, window = 10, 3, 4
    mask = block_mask(anchors, keep, context, block, window)
    for n, anchor in enumerate(anchors[0].tolist()):
        for row in range(block):
            seen = [key for key in range(context) if mask[0, n * block + row, key]]
            assert seen == list(range(max(0, anchor - window), anchor))


def test_every_mask_row_sees_something():
    anchors, keep = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, dtype=torch.bool)
    assert block_mask(anchors, keep, 5, 7).any(-1).all()


def test_anchor_and_first_draft_must_be_answer_tokens():
    loss_mask = torch.tensor([[False, True, True, False, True], [True, True, True, True, True]])
    found = anchor_positions(loss_mask)
    for b in range(2):
        for s in range(5):
            expected = s + 1 < 5 and bool(loss_mask[b, s]) and bool(loss_mask[b, s + 1])
            assert bool(found[b, s]) == expected


def test_anchors_are_drawn_without_replacement_in_order_and_uniformly():
    valid = torch.tensor([[True, False, True, True, False, True], [False] * 6])
    seen = torch.zeros(6)
    for seed in range(2000):
        anchors, keep = sample_anchors(valid, 2, [seed, seed])
        chosen = anchors[0][keep[0]].tolist()
        assert chosen == sorted(set(chosen))
        assert len(chosen) == 2
        assert not keep[1].any()
        for anchor in chosen:
            assert valid[0, anchor]
            seen[anchor] += 1
    assert (seen[valid[0]] / 2000 - 0.5).abs().max() < 0.05


def test_fewer_valid_positions_than_anchors_are_all_taken():
    valid = torch.tensor([[False, True, False, True]])
    anchors, keep = sample_anchors(valid, 4, [0])
    assert anchors[0][keep[0]].tolist() == [1, 3]


def test_a_rows_anchors_do_not_depend_on_its_batch():
    valid = torch.rand(3, 40, generator=torch.Generator().manual_seed(0)) < 0.5
    together, keep = sample_anchors(valid, 5, [7, 8, 9])
    padded = torch.nn.functional.pad(valid[1:2], (0, 11))
    alone, _ = sample_anchors(padded, 5, [8])
    assert together[1].tolist() == alone[0].tolist()
    assert keep.all()


def test_no_valid_position_gives_an_empty_block():
    anchors, keep = sample_anchors(torch.zeros(2, 5, dtype=torch.bool), 3, [0, 1])
    assert anchors.shape == (2, 1)
    assert not keep.any()


def test_labels_stop_at_the_first_token_outside_the_answer():
    tokens = torch.arange(100, 110).unsqueeze(0)
    loss_mask = torch.ones(1, 10, dtype=torch.bool)
    loss_mask[0, 5] = False
    anchors = torch.tensor([[2, 6, 8]])
    labels, supervised = block_labels(tokens, loss_mask, anchors, 5)
    for n, anchor in enumerate([2, 6, 8]):
        live = True
        for k in range(1, 5):
            at = anchor + k
            live = live and at < 10 and bool(loss_mask[0, at])
            assert bool(supervised[0, n, k - 1]) == live
            if live:
                assert int(labels[0, n, k - 1]) == 100 + at
