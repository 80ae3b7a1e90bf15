"""The kernel of adjusted logits against its torch reference, bit by bit."""

from __future__ import annotations

import pytest
import torch

from sglang_hyperdflash.draft.adjust import NEUTRAL, adjust_rows_reference
from tests.unit.triton_ops.gate_help import DEVICE, MANY
from triton_ops import adjust_kernel

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INTEGERS = {FP32: torch.int32, BF16: torch.int16, FP16: torch.int16}
NAMES = ("counts", "slots", "penalties", "end_ids", "earliest", "bias")
EVERYTHING = "penalties end_ids bias"
PENALTIES = [(0.3, 0.0, 1.0), (0.0, 0.7, 1.0), (0.0, 0.0, 1.3), (0.0, 0.0, 0.6)]
PENALTIES += [(-0.4, 0.2, 1.1), NEUTRAL]
Known = dict[str, torch.Tensor | None]


def arguments(
    bs: int,
    block: int,
    vocabulary: int,
    dtype: torch.dtype = FP32,
    changes: str = EVERYTHING,
    bias_dtype: torch.dtype = FP32,
) -> Known:
    """The operator's arguments in their order; without ``changes`` nothing is adjusted."""
    g = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(bs, block, vocabulary, generator=g) * 4
    for value, share in ((float("-inf"), 0.05), (float("nan"), 0.02), (-0.0, 0.02)):
        logits[torch.rand(logits.shape, generator=g) < share] = value
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
    given = {"logits": logits.to(dtype), "block_tokens": tokens}
    return given | {"positions": start + torch.arange(block)} | known


def adjusted(known: Known) -> torch.Tensor:
    """The kernel's logits, after the comparison with the reference's."""
    expected = known["logits"].clone()
    adjust_rows_reference(expected, *list(known.values())[1:])
    placed = [None if t is None else t.to(DEVICE, copy=True) for t in known.values()]
    assert adjust_kernel.launch(*placed) is None
    result, integers = placed[0].cpu(), INTEGERS[expected.dtype]
    broken = expected.isnan()
    assert torch.equal(result.isnan(), broken)
    bits = [t.masked_fill(broken, 0).view(integers) for t in (result, expected)]
    assert torch.equal(*bits)
    return result


@pytest.mark.parametrize(
    "sizes",  # requests, block, vocabulary; dtype; changes and the bias's dtype
    [
        (1, 1, 1, FP16),
        (6, 4, 7, FP32),
        (6, 4, 1025, BF16),
        (2, 10, 2100, FP16),
        (5, 2, 1024, FP32),
        (MANY, 2, 40, BF16),
        (6, 3, 300, BF16, ""),
        (6, 3, 300, BF16, "penalties"),
        (6, 3, 300, FP32, "end_ids"),
        (6, 3, 300, BF16, "bias"),  # is rounded to the logits' dtype first
        (6, 3, 300, FP16, "penalties bias"),
        (6, 3, 300, FP32, "end_ids bias", BF16),
        (6, 3, 300, BF16, "bias", FP16),
    ],
)
def test_logits_have_the_references_bits(sizes):
    known = arguments(*sizes)
    same = torch.equal(adjusted(known).nan_to_num(), known["logits"].nan_to_num())
    assert sizes[0] == 1 or same == ("" in sizes)


def test_requests_that_change_nothing_read_no_counts_and_keep_their_bits():
    known = arguments(4, 3, 300, BF16, "penalties end_ids")
    known["penalties"][1:3] = torch.tensor(NEUTRAL)
    known["slots"][1:3] = 1 << 40  # no such row
    known["end_ids"][1] = -1
    known["earliest"][2] = 0
    result, before = adjusted(known).view(torch.int16), known["logits"].view(torch.int16)
    assert torch.equal(result[1:3], before[1:3])
    assert not torch.equal(result[0], before[0])


def test_padded_rows_are_adjusted_where_they_lie_and_what_does_not_fit_is_refused():
    """SGLang cuts an LM head's padding off a view, whose rows are further apart than long."""
    given = {n: t.to(DEVICE) for n, t in arguments(3, 4, 57).items()}
    padded = torch.full((3, 4, 64), 7.0, device=DEVICE)
    padded[..., :57] = given["logits"]
    expected = given["logits"].clone()
    adjust_rows_reference(expected, *list(given.values())[1:])
    adjust_kernel.launch(*(given | {"logits": padded[..., :57]}).values())
    torch.testing.assert_close(padded[..., :57], expected, rtol=0, atol=0, equal_nan=True)
    assert (padded[..., 57:] == 7.0).all()
    adjust_kernel.launch(*(given | {"logits": expected[:0]}).values())  # nothing to do
    columns = expected.transpose(1, 2).contiguous().transpose(1, 2)
    for change in ({"logits": columns}, {"bias": torch.zeros(3, 64, device=DEVICE)}):
        with pytest.raises(ValueError):
            adjust_kernel.launch(*(given | change).values())
