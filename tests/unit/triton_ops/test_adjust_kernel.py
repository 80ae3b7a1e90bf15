"""The kernel of adjusted logits against its torch reference, bit by bit."""

import pytest
import torch

from sglang_hyperdflash.draft.adjust import NEUTRAL, adjust_rows_reference
from tests.unit.triton_ops.gate_help import BF16, DEVICE, EVERYTHING, FP16, FP32, MANY, adjusting
from triton_ops import adjust_kernel

INTEGERS = {FP32: torch.int32, BF16: torch.int16, FP16: torch.int16}


def arguments(bs, block, vocabulary, dtype=FP32, changes=EVERYTHING, bias_dtype=FP32) -> dict:
    """The operator's arguments in their order; without ``changes`` nothing is adjusted."""
    g = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(bs, block, vocabulary, generator=g) * 4
    for value, share in ((float("-inf"), 0.05), (float("nan"), 0.02), (-0.0, 0.02)):
        logits[torch.rand(logits.shape, generator=g) < share] = value
    tokens = torch.randint(0, vocabulary, (bs, block), generator=g)
    tokens[:, 2::3] = tokens[:, 1:2]  # some are drafted twice in a block
    start = torch.randint(0, 5000, (bs, 1), generator=g)
    ends = torch.randint(0, vocabulary, (bs, 3), generator=g)
    known = {"logits": logits.to(dtype), "block_tokens": tokens}
    known["positions"] = start + torch.arange(block)
    return known | adjusting(changes, start, block, ends, vocabulary, g, bias_dtype)


def adjusted(known: dict) -> torch.Tensor:
    """The kernel's logits, after the comparison with the reference's.

    They lie as SGLang's, which cuts an LM head's padding off a view.
    """
    expected = known["logits"].clone()
    adjust_rows_reference(expected, *list(known.values())[1:])
    given = {n: None if t is None else t.to(DEVICE, copy=True) for n, t in known.items()}
    padded = torch.nn.functional.pad(given["logits"], (0, 7), value=7.0)
    given["logits"] = padded[..., :-7]
    adjust_kernel.launch(*given.values())
    assert (padded[..., -7:] == 7.0).all()
    result, broken = given["logits"].cpu(), expected.isnan()
    assert torch.equal(result.isnan(), broken)
    bits = [t.masked_fill(broken, 0).view(INTEGERS[t.dtype]) for t in (result, expected)]
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


def test_no_request_is_nothing_to_do_and_columns_and_other_vocabularies_are_refused():
    given = {n: t.to(DEVICE) for n, t in arguments(3, 4, 57).items()}
    adjust_kernel.launch(*(given | {"logits": given["logits"][:0]}).values())
    columns = given["logits"].transpose(1, 2).contiguous().transpose(1, 2)
    for change in ({"logits": columns}, {"bias": torch.zeros(3, 64, device=DEVICE)}):
        with pytest.raises(ValueError):
            adjust_kernel.launch(*(given | change).values())
