"""The kernel of adjusted logits against its torch reference, bit by bit."""

from __future__ import annotations

import itertools

import pytest
import torch

from sglang_hyperdflash.draft.adjust import NEUTRAL, adjust_rows, adjust_rows_reference
from tests.unit.triton_ops.gate_help import DEVICE, MANY
from triton_ops import adjust_kernel

NAMES = ("counts", "slots", "penalties", "end_ids", "earliest", "bias")
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
PENALTIES = (
    (0.3, 0.0, 1.0),
    (0.0, 0.7, 1.0),
    (0.0, 0.0, 1.3),
    (0.0, 0.0, 0.6),
    (-0.4, 0.2, 1.1),
    NEUTRAL,
)


def arguments(
    bs: int,
    block: int,
    vocabulary: int,
    *,
    dtype: torch.dtype = torch.float32,
    changes: str = "penalties end_ids bias",
    bias_dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict[str, torch.Tensor | None]:
    """The operator's arguments in their order; without ``changes`` nothing is adjusted."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(bs, block, vocabulary, generator=g) * 4
    logits[torch.rand(logits.shape, generator=g) < 0.05] = float("-inf")
    logits[torch.rand(logits.shape, generator=g) < 0.02] = float("nan")
    logits[torch.rand(logits.shape, generator=g) < 0.02] = -0.0
    tokens = torch.randint(0, vocabulary, (bs, block), generator=g)
    tokens[:, 2::3] = tokens[:, 1:2]  # some are drafted twice in a block
    start = torch.randint(0, 5000, (bs, 1), generator=g)
    known = dict.fromkeys(NAMES)
    if "penalties" in changes:
        known["counts"] = torch.randint(0, 3, (bs + 3, vocabulary), generator=g, dtype=torch.int32)
        known["slots"] = torch.randperm(bs + 3, generator=g)[:bs]
        known["penalties"] = torch.tensor([PENALTIES[b % 6] for b in range(bs)])
    if "end_ids" in changes:
        ends = torch.randint(0, vocabulary, (bs, 3), generator=g)
        ends[torch.rand(ends.shape, generator=g) < 0.4] = -1
        # Before the block, within it and after it.
        known["end_ids"], known["earliest"] = ends, start[:, 0] + torch.arange(bs) % (block + 2)
    if "bias" in changes:
        bias = torch.randn(bs, vocabulary, generator=g)
        bias[torch.rand(bias.shape, generator=g) < 0.1] = float("-inf")
        bias[::3] = 0.0
        known["bias"] = bias.to(bias_dtype)
    positions = start + torch.arange(block)
    return {
        "logits": logits.to(dtype),
        "block_tokens": tokens,
        "positions": positions,
        **known,
    }


def adjusted(known: dict[str, torch.Tensor | None]) -> torch.Tensor:
    """The kernel's logits, after the comparison with the reference's."""
    expected = known["logits"].clone()
    adjust_rows_reference(expected, *list(known.values())[1:])
    placed = [None if t is None else t.to(DEVICE, copy=True) for t in known.values()]
    assert adjust_kernel.launch(*placed) is None
    found, integers = placed[0].cpu(), INTEGERS[expected.dtype]
    broken = expected.isnan()
    assert torch.equal(found.isnan(), broken)
    bits = [t.masked_fill(broken, 0).view(integers) for t in (found, expected)]
    assert torch.equal(*bits)
    return found


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("vocabulary", [1, 7, 1024, 1025, 2500])
def test_logits_have_the_references_bits(vocabulary, dtype):
    adjusted(arguments(7, 4, vocabulary, dtype=dtype))


CHANGES = ("penalties", "end_ids", "bias")


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize(
    "changes", [" ".join(c) for n in range(4) for c in itertools.combinations(CHANGES, n)]
)
def test_every_change_alone_and_together(changes, dtype):
    known = arguments(8, 3, 300, dtype=dtype, changes=changes, seed=1)
    same = torch.equal(adjusted(known).nan_to_num(), known["logits"].nan_to_num())
    assert same == (changes == "")


@pytest.mark.parametrize(("bs", "block"), [(1, 1), (1, 10), (5, 2), (MANY, 2)])
def test_batches_and_blocks_of_every_size(bs, block):
    adjusted(arguments(bs, block, 40, dtype=torch.bfloat16, seed=2))


@pytest.mark.parametrize("bias_dtype", INTEGERS)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_a_bias_is_rounded_to_the_logits_dtype_first(dtype, bias_dtype):
    adjusted(arguments(4, 3, 200, dtype=dtype, changes="bias", bias_dtype=bias_dtype, seed=4))


def test_requests_that_change_nothing_read_no_counts_and_keep_their_bits():
    known = arguments(4, 3, 1500, dtype=torch.bfloat16, changes="penalties end_ids", seed=5)
    known["penalties"][1:3] = torch.tensor(NEUTRAL)
    known["slots"][1:3] = 1 << 40  # no such row
    known["end_ids"][1] = -1
    known["earliest"][2] = 0
    found, before = adjusted(known).view(torch.int16), known["logits"].view(torch.int16)
    assert torch.equal(found[1:3], before[1:3])
    assert not torch.equal(found[0], before[0])


def test_a_token_that_is_drafted_twice_counts_twice_after_the_second():
    known = arguments(1, 4, 10, changes="penalties")
    known["logits"].fill_(2.0)
    known["counts"].zero_()
    known["block_tokens"] = torch.tensor([[5, 3, 3, 1]])  # the anchor is not generated here
    known["penalties"] = torch.tensor([[0.5, 0.0, 1.0]])
    expected = torch.full((4, 10), 2.0)
    expected[1:, 3], expected[2:, 3], expected[3, 1] = 1.5, 1.0, 1.5
    assert torch.equal(adjusted(known)[0], expected)


def test_an_end_token_comes_as_soon_as_the_minimum_is_out():
    known = arguments(1, 4, 10, changes="end_ids")
    known["positions"] = torch.tensor([[7, 8, 9, 10]])
    known["end_ids"], known["earliest"] = torch.tensor([[4, -1]]), torch.tensor([10])
    known["logits"] = torch.zeros(1, 4, 10)
    expected = torch.zeros(4, 10)
    expected[:2, 4] = float("-inf")
    assert torch.equal(adjusted(known)[0], expected)


def test_no_logits_are_nothing_to_do():
    known = arguments(2, 3, 9)
    known["logits"] = known["logits"][:0]
    adjust_kernel.launch(*known.values())


def test_the_operator_fakes_and_dispatches():
    known = arguments(3, 2, 9)
    known["logits"].nan_to_num_()
    torch.library.opcheck(adjust_rows.default, tuple(known.values()))


def test_rows_of_a_padded_vocabulary_are_adjusted_where_they_lie():
    """SGLang cuts an LM head's padding off a view, whose rows are further apart than long."""
    given = arguments(3, 4, 57)
    padded = torch.full((3, 4, 64), 7.0, device=DEVICE)
    padded[..., :57] = given["logits"]
    expected, rest = given["logits"].clone(), list(given.values())[1:]
    adjust_rows_reference(expected, *rest)
    adjust_kernel.launch(padded[..., :57], *rest)
    torch.testing.assert_close(padded[..., :57], expected, rtol=0, atol=0, equal_nan=True)
    assert (padded[..., 57:] == 7.0).all()


def test_logits_in_columns_are_refused():
    given = arguments(2, 3, 5)
    columns = given["logits"].transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="unit column stride"):
        adjust_kernel.launch(columns, *list(given.values())[1:])


def test_tables_of_another_vocabulary_are_refused():
    given = arguments(2, 2, 50) | {"bias": torch.zeros(2, 64, device=DEVICE)}
    with pytest.raises(ValueError, match=r"expected rows of 50 tokens, found \(2, 64\)"):
        adjust_kernel.launch(*given.values())
