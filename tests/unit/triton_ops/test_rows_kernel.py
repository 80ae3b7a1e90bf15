"""Statistics of rows against their torch reference: in Triton's interpreter, or on a GPU."""

import pytest
import torch

from tests.unit.triton_ops.gate_help import BF16, DEVICE, FP16, FP32, MANY
from triton_ops import rows_kernel
from triton_ops.verification import row_statistics_reference

INF, NAN = float("inf"), float("nan")


def batch(bs: int, block: int, vocabulary: int, dtype: torch.dtype = FP32) -> dict:
    """The operator's arguments by name, up to ``kept``; rows lie in wider ones.

    Every third request is greedy; of the others every second has a seed of its own.
    """
    g, each = torch.Generator().manual_seed(bs + block + vocabulary), torch.arange(bs)
    logits = torch.randn(bs * block, vocabulary, generator=g).mul(3).to(dtype)
    given = {
        "logits": torch.nn.functional.pad(logits, (0, 50), value=NAN),
        "temperatures": torch.tensor([1.0, 1e-5, 10.0, 0.6, 0.01])[each % 5],
        "top_ks": torch.where(each % 3 == 2, 1, 50).int(),
        "seeded": each % 2 == 1,
        "seeds": torch.randint(-(2**63), 2**63 - 1, (bs,), generator=g),
        "positions": torch.randint(0, 2**33, (bs, block), generator=g),
    }
    given = {name: value.to(DEVICE) for name, value in given.items()}
    return given | {"logits": given["logits"][:, :vocabulary]}


def of_rows(given: dict, name: str) -> torch.Tensor:
    """What is the requests', for each of their rows."""
    return given[name].repeat_interleave(given["positions"].shape[1])


def half_kept(given: dict) -> torch.Tensor:
    """What a filter might keep: every second probability and the largest.

    Of greedy requests, which no filter binds, not the largest.
    """
    y = given["logits"].float() / of_rows(given, "temperatures").unsqueeze(-1)
    y = y.masked_fill(~y.isfinite(), -INF)
    passed = torch.rand(y.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE) < 0.5
    sampled = of_rows(given, "top_ks").unsqueeze(-1) > 1
    return y.softmax(-1) * torch.where(y == y.amax(-1, keepdim=True), sampled, passed)


def check(given: dict, kept: torch.Tensor | None = None, all_draw: bool = True) -> torch.Tensor:
    """The kernel's tokens, after a comparison of its results with the reference's."""
    result = rows_kernel.launch(**given, kept=kept, all_draw=all_draw)
    expected = row_statistics_reference(**given, kept=kept, all_draw=all_draw)
    assert [t.dtype for t in result] == [torch.int64, FP32, FP32]
    torch.testing.assert_close(result[0], expected[0], rtol=0, atol=0)
    # Sums of greedy requests are arbitrary, except that a broken row's are NaN.
    read = (of_rows(given, "top_ks") > 1) | expected[1].isnan()
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
    given = batch(bs, block, vocabulary, dtype)
    check(given, None, all_draw)
    kept = half_kept(given)
    tokens = check(given, kept, all_draw)
    sampled = of_rows(given, "top_ks") > 1
    drawn = sampled & (of_rows(given, "seeded") | all_draw)
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


@pytest.mark.heavy
def test_ties_broken_rows_and_forbidden_tokens_of_every_kind_of_request():
    given = batch(3 * len(CORNERS), 1, 2100)
    given["temperatures"].fill_(1.0)
    for rows, (fill, values, _) in zip(given["logits"].split(3), CORNERS, strict=True):
        if fill is not None:
            rows.fill_(fill)
        for token, value in values.items():
            rows[:, token] = value
    expected = torch.tensor([token for *_, token in CORNERS], device=DEVICE).repeat_interleave(3)
    assert ((check(given) == expected) | (expected == ANY)).all()
    check(given, half_kept(given))  # which may forbid the broken one


def test_one_kept_token_is_drawn_whatever_its_weight():
    given = batch(9, 1, 300)
    given["top_ks"].fill_(50)
    likeliest = given["logits"].argmax(-1, keepdim=True)
    weights = torch.tensor([1e-45, 1.0, 1e20], device=DEVICE).repeat(3).unsqueeze(1)
    kept = torch.zeros_like(given["logits"]).scatter(1, likeliest, weights)
    assert torch.equal(check(given, kept), likeliest.squeeze(1))


def test_logits_in_columns_are_refused():
    given = batch(3, 2, 100)
    given["logits"] = given["logits"].T.contiguous().T
    with pytest.raises(ValueError, match="stride"):
        rows_kernel.launch(**given, kept=None, all_draw=True)
