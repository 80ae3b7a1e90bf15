"""Statistics of rows against their torch reference: in Triton's interpreter, or on a GPU."""

import pytest
import torch

from tests.unit.triton_ops.gate_help import DEVICE, MANY
from triton_ops import rows_kernel
from triton_ops.verification import row_statistics_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INF, NAN = float("inf"), float("nan")
TEMPERATURES = (1.0, 1e-5, 10.0, 0.6, 0.01)


def batch(bs: int, block: int, vocabulary: int, dtype: torch.dtype = FP32) -> list:
    """``[logits, temperatures, top_ks, seeded, seeds, positions]``; rows lie in wider ones.

    Every third request is greedy; of the others every second has a seed of its own.
    """
    generator = torch.Generator().manual_seed(bs + block + vocabulary)
    logits = torch.randn(bs * block, vocabulary, generator=generator).mul(3).to(dtype)
    each = torch.arange(bs)
    seeds = torch.randint(-(2**63), 2**63 - 1, (bs,), generator=generator)
    positions = torch.randint(0, 2**33, (bs, block), generator=generator)
    temperatures = torch.tensor(TEMPERATURES)[each % len(TEMPERATURES)]
    top_ks = torch.where(each % 3 == 2, 1, 50).int()
    requests = [t.to(DEVICE) for t in (temperatures, top_ks, each % 2 == 1, seeds, positions)]
    wide = torch.nn.functional.pad(logits, (0, 50), value=NAN).to(DEVICE)
    return [wide[:, :vocabulary], *requests]


def half_kept(inputs: list) -> torch.Tensor:
    """What a filter might keep: every second probability and the largest.

    Of greedy requests, which no filter binds, not the largest.
    """
    block = inputs[5].shape[1]
    y = inputs[0].float() / inputs[1].repeat_interleave(block).unsqueeze(-1)
    y = y.masked_fill(~y.isfinite(), -INF)
    passed = torch.rand(y.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE) < 0.5
    largest = y == y.amax(-1, keepdim=True)
    sampled = (inputs[2] > 1).repeat_interleave(block).unsqueeze(-1)
    return y.softmax(-1) * torch.where(largest, sampled, passed)


def check(inputs: list, kept: torch.Tensor | None = None, all_draw: bool = True) -> torch.Tensor:
    """The kernel's tokens, after a comparison of its results with the reference's."""
    result = rows_kernel.launch(*inputs, kept, all_draw)
    expected = row_statistics_reference(*inputs, kept, all_draw)
    assert [t.dtype for t in result] == [torch.int64, FP32, FP32]
    torch.testing.assert_close(result[0], expected[0], rtol=0, atol=0)
    # Sums of greedy requests are arbitrary, except that a broken row's are NaN.
    read = (inputs[2] > 1).repeat_interleave(inputs[5].shape[1]) | expected[1].isnan()
    for values, wanted, rtol in zip(result[1:], expected[1:], (0, 2e-6), strict=True):
        torch.testing.assert_close(values[read], wanted[read], rtol=rtol, atol=0, equal_nan=True)
    return result[0]


@pytest.mark.parametrize("all_draw", [False, True])
@pytest.mark.parametrize(
    ("bs", "block", "vocabulary", "dtype"),
    [
        (0, 2, 7, FP32),
        (6, 2, 1, FP32),
        (6, 1, 1025, FP16),
        (6, 1, 3001, BF16),
        (1, 10, 2048, FP32),
        (MANY, 1, 7, FP32),
    ],
)
def test_rows_are_the_references(bs, block, vocabulary, dtype, all_draw):
    inputs = batch(bs, block, vocabulary, dtype)
    check(inputs, None, all_draw)
    kept = half_kept(inputs)
    tokens = check(inputs, kept, all_draw)
    sampled = (inputs[2] > 1).repeat_interleave(block)
    drawn = sampled & (inputs[3].repeat_interleave(block) | all_draw)
    passed = kept.gather(1, tokens.unsqueeze(1)).squeeze(1) > 0
    assert passed[drawn].all() and not passed[~sampled].any()


ANY = -1
# What fills a row, None for noise; values by id; the token.
CORNERS = [
    # So large, the noise is lost in the score: ties within a tile, between lanes, between shares.
    (0.0, {2099: 1e25, 2049: 1e25}, 2049),
    (0.0, {17: 1e25, 1041: 1e25, 2050: 1e25}, 17),
    (0.0, {2047: 1e25, 2048: 1e25}, 2047),
    (1e25, {}, 0),
    # One broken logit, or nothing finite.
    (None, {0: NAN}, 2100),
    (None, {1030: INF}, 2100),
    (None, {2099: NAN}, 2100),
    (-INF, {}, 2100),
    (-INF, {5: NAN}, 2100),
    (-INF, {5: INF}, 2100),
    # As a grammar forbids tokens: a whole share of them.
    (-INF, {2097: 1.0}, 2097),
    (-INF, {2096: 1.0, 2097: 2.0}, ANY),
    (1e-3, {7: 2e-3}, ANY),
]


def test_ties_broken_rows_and_forbidden_tokens_of_every_kind_of_request():
    inputs = batch(3 * len(CORNERS), 1, 2100)
    inputs[1].fill_(1.0)
    for corner, (fill, values, _) in enumerate(CORNERS):
        for row in inputs[0][3 * corner : 3 * corner + 3]:
            if fill is not None:
                row.fill_(fill)
            for token, value in values.items():
                row[token] = value
    expected = torch.tensor([token for *_, token in CORNERS], device=DEVICE).repeat_interleave(3)
    assert ((check(inputs) == expected) | (expected == ANY)).all()
    check(inputs, half_kept(inputs))  # which may forbid the broken one


def test_one_kept_token_is_drawn_whatever_its_weight():
    inputs = batch(9, 1, 300)
    inputs[2].fill_(50)
    likeliest = inputs[0].argmax(-1, keepdim=True)
    weights = torch.tensor([1e-45, 1.0, 1e20], device=DEVICE).repeat(3).unsqueeze(1)
    kept = torch.zeros_like(inputs[0]).scatter(1, likeliest, weights)
    assert torch.equal(check(inputs, kept), likeliest.squeeze(1))


def test_logits_in_columns_are_refused():
    logits, *rest = batch(3, 2, 100)
    with pytest.raises(ValueError, match="stride"):
        rows_kernel.launch(logits.T.contiguous().T, *rest, None, True)
