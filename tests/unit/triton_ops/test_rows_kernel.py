"""Statistics of rows against their torch reference: in Triton's interpreter, or on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.unit.triton_ops.gate_help import MANY
from tests.unit.triton_ops.specialised import compilations
from triton_ops import rows_kernel
from triton_ops.verification import row_statistics, row_statistics_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TEMPERATURES = (1.0, 1e-5, 10.0, 0.6, 0.01)
INF, NAN = float("inf"), float("nan")


def batch(bs: int, block: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> list:
    """``[logits, temperatures, top_ks, seeded, seeds, positions]``; every third request greedy.

    Of the others every second has a seed of its own.
    """
    generator = torch.Generator().manual_seed(bs + block + vocabulary)
    logits = torch.randn(bs * block, vocabulary, generator=generator).mul(3).to(dtype)
    each = torch.arange(bs)
    seeds = torch.randint(-(2**63), 2**63 - 1, (bs,), generator=generator)
    positions = torch.randint(0, 2**33, (bs, block), generator=generator)
    temperatures = torch.tensor(TEMPERATURES)[each % len(TEMPERATURES)]
    top_ks = torch.where(each % 3 == 2, 1, 50).int()
    tensors = (logits, temperatures, top_ks, each % 2 == 1, seeds, positions)
    return [t.to(DEVICE) for t in tensors]


def requests_of_every_kind(vocabulary: int, block: int = 1) -> list:
    """One without a seed, one with one, one greedy, at temperature 1."""
    inputs = batch(3, block, vocabulary)
    inputs[1].fill_(1.0)
    return inputs


def half_kept(inputs: list) -> torch.Tensor:
    """What a filter might keep: every second probability or so, and the largest."""
    y = inputs[0].float() / inputs[1].repeat_interleave(inputs[5].shape[1]).unsqueeze(-1)
    y = y.masked_fill(~y.isfinite(), -INF)
    passed = torch.rand(y.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE) < 0.5
    return y.softmax(-1) * (passed | (y == y.amax(-1, keepdim=True)))


def check(
    inputs: list, kept: torch.Tensor | None = None, all_draw: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The kernel's results, after a comparison with the reference's."""
    found = rows_kernel.launch(*inputs, kept, all_draw)
    expected = row_statistics_reference(*inputs, kept, all_draw)
    assert [t.dtype for t in found] == [torch.int64, torch.float32, torch.float32]
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
    # Sums of greedy requests are arbitrary, except that a broken row's are NaN.
    read = (inputs[2] > 1).repeat_interleave(inputs[5].shape[1]) | expected[1].isnan()
    torch.testing.assert_close(found[1][read], expected[1][read], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found[2][read], expected[2][read], rtol=2e-6, atol=0, equal_nan=True)
    return found


@pytest.mark.parametrize("all_draw", [False, True])
@pytest.mark.parametrize("vocabulary", [1, 7, 1024, 1025, 3001])
def test_every_kind_of_request_is_the_references(vocabulary, all_draw):
    tokens, *_ = check(batch(6, 2, vocabulary), all_draw=all_draw)
    assert ((tokens >= 0) & (tokens < vocabulary)).all()


@pytest.mark.parametrize(
    ("bs", "block", "vocabulary"),
    [(1, 1, 6000), (1, 10, 2049), (7, 9, 40), (MANY, 2, 5)],
)
def test_batches_of_every_size(bs, block, vocabulary):
    check(batch(bs, block, vocabulary), all_draw=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_are_read_as_they_are(dtype):
    check(batch(6, 2, 2500, dtype), all_draw=True)


def test_every_temperature_and_any_magnitude():
    for scale in (1e-3, 30.0, 1e4):
        inputs = batch(10, 1, 1500)
        inputs[2].fill_(50)
        inputs[0] *= scale
        check(inputs, all_draw=True)


def test_ties_go_to_the_lowest_id():
    inputs = requests_of_every_kind(5000)
    inputs[0].fill_(2.0)
    assert int(check(inputs)[0][2]) == 0
    for ids in ([4999, 2049], [17, 1041, 3000], [2047, 2048]):
        # So large, the noise is lost in the score: drawn rows have ties, too.
        inputs[0].fill_(0.0)
        inputs[0][:, ids] = 1e25
        assert check(inputs, all_draw=True)[0].tolist() == [min(ids)] * 3


@pytest.mark.parametrize("at", [0, 1030, 2999])
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_row_with_one_broken_logit_is_broken(value, at):
    inputs = requests_of_every_kind(3000, block=2)
    inputs[0][1::2, at] = value
    for filtered in (None, half_kept(inputs)):  # which forbids the broken one
        tokens, largest, total = check(inputs, filtered, all_draw=True)
        assert (tokens[1::2] == 3000).all() and (tokens[::2] < 3000).all()
        assert largest[1::2].isnan().all() and total[1::2].isnan().all()


def test_rows_with_nothing_finite_are_broken():
    for pattern in ([-INF], [NAN], [INF], [-INF, NAN], [-INF, INF], [NAN, INF]):
        inputs = requests_of_every_kind(2100)
        inputs[0][:] = torch.tensor(pattern, device=DEVICE).repeat(2100)[:2100]
        assert (check(inputs)[0] == 2100).all()


def test_forbidden_logits_are_no_break():
    inputs = requests_of_every_kind(5000)
    inputs[0][:, :4500] = -INF  # as a grammar forbids tokens: whole shares of them
    tokens, _, total = check(inputs, all_draw=True)
    assert (tokens >= 4500).all() and total[:2].isfinite().all()


@pytest.mark.parametrize("all_draw", [False, True])
@pytest.mark.parametrize("vocabulary", [1, 7, 1025, 2500])
def test_filters_bind_all_but_greedy_requests(vocabulary, all_draw):
    inputs = batch(6, 2, vocabulary)
    inputs[3].fill_(not all_draw)
    kept = half_kept(inputs)
    greedy = (inputs[2] <= 1).repeat_interleave(2)
    kept[greedy] = kept[greedy].scatter(1, inputs[0][greedy].argmax(-1, keepdim=True), 0.0)
    tokens, *_ = check(inputs, kept, all_draw)
    assert torch.equal(kept.gather(1, tokens.unsqueeze(1)).squeeze(1) > 0, ~greedy)


def test_one_kept_token_is_drawn_whatever_its_weight():
    inputs = requests_of_every_kind(2500)
    likeliest = inputs[0].argmax(-1, keepdim=True)
    for weight in (1e-45, 1.0, 1e20):
        kept = torch.zeros_like(inputs[0]).scatter(1, likeliest, weight)
        tokens, _, total = check(inputs, kept, all_draw=True)
        assert torch.equal(tokens, likeliest.squeeze(1))
        assert total[:2].tolist() == [1.0, 1.0]


def test_rows_lie_in_wider_ones():
    inputs = batch(3, 2, 1100)
    wide = torch.full((6, 1500), NAN, device=DEVICE)
    wide[:, :1100] = inputs[0]
    inputs[0] = wide[:, :1100]
    check(inputs, half_kept(inputs), all_draw=True)


def test_every_bit_of_a_seed_and_the_low_ones_of_a_position_count():
    inputs = batch(8, 1, 300)
    inputs[0][:] = 0.0
    inputs[1].fill_(1.0)
    inputs[2].fill_(50)
    inputs[3].fill_(True)
    seeds = [0, 1, -1, 2**32, -(2**63), 2**63 - 1, 0, 0]
    inputs[4] = torch.tensor(seeds, device=DEVICE)
    inputs[5] = torch.tensor([[5]] * 6 + [[6], [5 + 2**32]], device=DEVICE)
    tokens = check(inputs)[0].tolist()
    assert len(set(tokens[:7])) == 7 and tokens[7] == tokens[0]


def test_only_who_draws_gets_a_token():
    inputs = requests_of_every_kind(900)
    drawn, silent = check(inputs, all_draw=True)[0], check(inputs)[0]
    assert silent.tolist() == [0, *drawn[1:].tolist()]
    inputs[3].fill_(True)  # one's own seed is another stream
    assert int(check(inputs)[0][0]) != int(drawn[0])


def test_no_request_asks():
    inputs = batch(1, 2, 40)
    empty = [t[:0] for t in inputs]
    assert [len(t) for t in rows_kernel.launch(*empty, None, True)] == [0, 0, 0]


def test_logits_in_columns_are_refused():
    logits, *rest = batch(2, 3, 40)
    with pytest.raises(ValueError, match="unit column stride"):
        rows_kernel.launch(logits.T.contiguous().T, *rest, None, True)


def test_every_id_lies_in_exactly_one_share():
    for rows in (1, 7, 448, 1792):
        for vocabulary in (1, 1024, 2048, 129_280, 151_936):
            parts, tiles = rows_kernel.shares(rows, vocabulary)
            share = tiles * rows_kernel.TILE
            assert parts <= rows_kernel.MAX_SHARES
            assert (parts - 1) * share < vocabulary <= parts * share


def test_the_operator_fakes_and_dispatches():
    inputs = batch(4, 2, 40)
    for kept in (None, half_kept(inputs)):
        arguments = (*inputs, kept, True)
        expected = row_statistics_reference(*arguments)
        for found, wanted in zip(row_statistics(*arguments), expected, strict=True):
            torch.testing.assert_close(found, wanted)
        torch.library.opcheck(row_statistics.default, arguments)


LAUNCHES = """
from triton_ops import rows_kernel

record("share", rows_kernel._share_kernel)
record("best", rows_kernel._best_kernel)
for bs, (block, skipped) in itertools.product(
    (1, 7, 64, 100, 256, 448, 700, 1792), ((1, 0), (7, 1), (16, 2))
):
    def new(*shape, dtype=torch.float32):  # a batch's tensors may start anywhere
        return torch.empty(bs + skipped, *shape, dtype=dtype)[skipped:]

    logits = torch.empty(bs * block, 129_280, device="meta")
    requests = new(), new(dtype=torch.int32), new(dtype=torch.bool), new(dtype=torch.int64)
    rows_kernel.launch(logits, *requests, new(block, dtype=torch.int64), None, False)
"""


def test_no_batch_size_needs_a_compilation_of_its_own():
    assert compilations(LAUNCHES) == {"share": 1, "best": 1}
