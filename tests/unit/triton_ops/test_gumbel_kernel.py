"""The fused draw against its torch reference: in Triton's interpreter, or on a GPU."""

from __future__ import annotations

import pytest
import torch

from triton_ops import gumbel_kernel
from triton_ops.gumbel import gumbel_argmax_reference
from triton_ops.gumbel_op import gumbel_argmax, gumbel_argmax_op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(rows: int, vocabulary: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(rows, vocabulary, generator=generator).mul(2).softmax(-1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    positions = torch.randint(0, 2**31, (rows,), generator=generator)
    return (t.to(DEVICE) for t in (weights, seeds, positions))


@pytest.mark.parametrize("vocabulary", [1, 7, 1024, 1025, 3001])
def test_draws_are_the_references(vocabulary):
    weights, seeds, positions = inputs(6, vocabulary)
    found = gumbel_kernel.launch(weights, seeds, positions, None)
    assert torch.equal(found, gumbel_argmax_reference(weights, seeds, positions))


def test_filtered_rows_never_draw_a_zero_weight():
    weights, seeds, positions = inputs(16, 2500)
    weights[:, ::2] = 0.0
    weights[3] = 0.0
    weights[3, 2049] = 1e-30
    found = gumbel_kernel.launch(weights, seeds, positions, None)
    assert torch.equal(found, gumbel_argmax_reference(weights, seeds, positions))
    assert int(found[3]) == 2049


def test_rows_choose_what_is_drawn_from():
    weights, seeds, positions = inputs(5, 1500)
    rows = torch.tensor([4, 0, 4, 2, 1], device=DEVICE)
    found = gumbel_kernel.launch(weights, seeds, positions, rows)
    assert torch.equal(found, gumbel_argmax_reference(weights, seeds, positions, rows))


def test_broken_and_empty_rows_give_an_index():
    weights, seeds, positions = inputs(3, 1100)
    weights[0], weights[1] = float("nan"), 0.0
    found = gumbel_kernel.launch(weights, seeds, positions, None)
    assert ((found >= 0) & (found < 1100)).all()
    assert len(gumbel_kernel.launch(weights[:0], seeds[:0], positions[:0], None)) == 0


def test_every_id_lies_in_exactly_one_share():
    for rows in (1, 7, 448, 1792):
        for vocabulary in (1, 1024, 2048, 129_280, 151_936):
            parts, share = gumbel_kernel.shares(rows, vocabulary)
            assert parts <= gumbel_kernel.MAX_SHARES
            assert (parts - 1) * share < vocabulary <= parts * share


def test_the_operator_checks_fakes_and_dispatches():
    weights, seeds, positions = inputs(4, 40)
    expected = gumbel_argmax_reference(weights, seeds, positions)
    assert torch.equal(gumbel_argmax(weights, seeds, positions), expected)
    torch.library.opcheck(gumbel_argmax_op, (weights, seeds, positions, None))
    torch.library.opcheck(gumbel_argmax_op, (weights, seeds[:2], positions[:2], seeds[:2] * 0))
    with pytest.raises(TypeError, match=r"weights must be float32, found torch\.bfloat16"):
        gumbel_argmax(weights.bfloat16(), seeds, positions)
    with pytest.raises(ValueError, match=r"seeds must be contiguous \[4\], found \(3,\)"):
        gumbel_argmax(weights, seeds[:3], positions)
    with pytest.raises(ValueError, match="unit column stride"):
        gumbel_argmax(weights.T.contiguous().T, seeds, positions)
    with pytest.raises(TypeError, match=r"positions must be int64"):
        gumbel_argmax(weights, seeds, positions.int())
