"""Packed rows train on the blocks of unpacked ones, to the same gradient."""

from __future__ import annotations

import pytest
import torch

from sglang_hyperdflash.training.objective import Blocks, Objective
from sglang_hyperdflash.training.packing import first_fit, pack
from sglang_hyperdflash.training.samples import Rows, States
from tests.unit.training.test_trainer import cache, gradients, new_trainer, samples  # noqa: F401


def test_first_fit_keeps_every_sample_and_the_limit():
    lengths = [30, 5, 90, 10, 60, 120, 40]
    plan = first_fit(lengths, 100)
    assert sorted(i for row in plan for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 100 for row in plan if len(row) > 1)
    assert plan == [[5], [2, 3], [4, 6], [0, 1]]


def test_positions_and_blocks_move_with_their_sample():
    tokens = torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0]])
    rows = Rows(tokens, tokens > 1, torch.zeros_like(tokens))
    features = tokens.unsqueeze(-1).float()
    states = States(features, features, features[..., :0])
    anchors = torch.tensor([[1, 0], [0, 0]])
    keep = torch.tensor([[True, False], [True, False]])
    labels = torch.tensor([[[3], [9]], [[5], [9]]])
    blocks = Blocks(anchors, keep, labels, labels < 9, torch.full_like(anchors, 7))
    found, found_states, moved = pack([[0, 1]], [3, 2], rows, states, blocks)
    assert found.tokens.tolist() == [[1, 2, 3, 4, 5]]
    assert found.starts.tolist() == [[0, 0, 0, 3, 3]]
    assert found_states.residual.flatten().tolist() == [1, 2, 3, 4, 5]
    assert moved.anchors.tolist() == [[1, 3]] and moved.labels.tolist() == [[[3], [5]]]
    assert bool(moved.keep.all()) and bool(moved.supervised.all())


@pytest.mark.parametrize("limit", [10, 70, 200])
@pytest.mark.parametrize("teacher", ["gated", "mean"])
def test_packing_changes_no_gradient(target, cache, tmp_path, limit, teacher):  # noqa: F811
    objective = Objective(teacher=teacher)
    plain = gradients(new_trainer(target, cache, tmp_path / "a", objective=objective))
    packed = new_trainer(target, cache, tmp_path / "b", objective=objective, pack=limit)
    assert (gradients(packed) - plain).norm() < 1e-5 * plain.norm()


def test_a_batch_without_blocks_is_left_as_it_is():
    empty = torch.zeros(1, 3, dtype=torch.long)
    rows = Rows(empty, empty > 0, empty)
    blocks = Blocks.draw(rows, 4, 7, [0])
    states = States.without_layers(torch.zeros(1, 3, 8), torch.zeros(1, 3, 4))
    assert pack([[0]], [3], rows, states, blocks)[2] is blocks
