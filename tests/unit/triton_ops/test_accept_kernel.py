"""Acceptance in one launch against its reference: in Triton's interpreter, or on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.unit.triton_ops.gate_help import MANY
from tests.unit.triton_ops.verify_help import (
    DEVICE,
    GREEDY,
    SEEDED,
    UNSEEDED,
    Round,
    make_round,
    smallest_margin,
)
from triton_ops import accept_kernel
from triton_ops.verification import accept_reference


def check(given: Round, margin: float = 1e-6) -> torch.Tensor:
    """The kernel gives what the reference does; the accepted lengths."""
    found = accept_kernel.launch(*given.of_accept())
    expected = accept_reference(*given.of_accept())
    # p differs in its last bits, and h by as much: no coin may lie between the two.
    assert smallest_margin(given, expected[2]) > margin
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    assert found[0].tolist() == expected[0].tolist()
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(found[2], expected[2], rtol=1e-5, atol=1e-30, equal_nan=True)
    return found[0]


@pytest.mark.parametrize("vocabulary", [1, 7, 1025, 3001])
@pytest.mark.parametrize("width", [1, 5, 64])
def test_acceptance_is_the_references(vocabulary, width):
    for drafts in (1, 2, 9):
        check(make_round(5, drafts, width, vocabulary, seed=drafts))


@pytest.mark.parametrize("bs", [1, 2, 63, MANY])
def test_batches_of_every_size(bs):
    lengths = check(make_round(bs, 7, 13, 29, seed=bs))
    if bs > 60:
        assert sorted(set(lengths.tolist())) == list(range(8))


@pytest.mark.parametrize("kinds", [(GREEDY,), (SEEDED,), (UNSEEDED,), (GREEDY, SEEDED)])
def test_batches_of_one_kind(kinds):
    lengths = check(make_round(24, 5, 8, 50, kinds=kinds))
    assert len(set(lengths.tolist())) > 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("filtered", [False, True])
def test_logits_of_every_type_with_and_without_filters(dtype, filtered):
    check(make_round(9, 6, 20, 333, seed=3, filtered=filtered, dtype=dtype))


def test_a_wide_drafter_is_walked_in_pieces():
    check(make_round(4, 9, 700, 3001, seed=1, filtered=True))
    check(make_round(3, 1, 2048, 3001, seed=2))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_block_ends_at_its_first_broken_row(value):
    """At every place: a request for each row of a block, then one with all of them broken."""
    drafts = 4
    given = make_round(2 * drafts + 4, drafts, 6, 40, seed=1, kinds=(UNSEEDED, UNSEEDED, SEEDED))
    rows = given.logits.view(-1, drafts + 1, 40)
    for place in range(drafts + 1):
        for request in (place, drafts + 1 + place):
            if value == float("-inf"):
                rows[request, place] = value
            else:
                rows[request, place, 3] = value
    rows[-1, 1:, 7] = value if value != float("-inf") else float("nan")
    given = given.read_again()
    lengths = check(given)
    for place in range(drafts + 1):
        assert int(lengths[place]) <= place and int(lengths[drafts + 1 + place]) <= place
    assert int(lengths[-1]) <= 1


def test_impossible_tokens_and_zero_probabilities():
    given = make_round(20, 5, 9, 33, seed=4)
    given.logits[torch.rand(given.logits.shape, device=DEVICE) < 0.3] = float("-inf")
    given.logits[:, 2] = 1.0
    given = given.read_again()
    given.q[:, :, 3] = 0.0  # also of some drafts
    check(given)


def test_a_draft_the_target_gives_no_mass_is_never_accepted():
    given = make_round(20, 3, 5, 17, seed=5, kinds=(UNSEEDED,), filtered=True)
    rows = given.kept.view(20, 4, 17)
    rows[:, 0].scatter_(1, given.block_tokens[:, 1:2], 0.0)
    given.kept[:, 16] = 0.5
    rows[:, 0].scatter_(1, given.block_tokens[:, 1:2], 0.0)
    assert not check(given.read_again()).any()


def test_one_hot_drafts():
    given = make_round(20, 5, 9, 33, seed=6)
    given.q.zero_().scatter_(2, given.choice.unsqueeze(2), 1.0)
    assert len(set(check(given).tolist())) > 2


def test_a_draft_from_the_targets_own_distribution_is_always_accepted():
    """q equal to p, all of it: h is 0 / 0, or w; powers of two, so that no bit is lost."""
    given = make_round(12, 4, 16, 16, seed=7, kinds=(UNSEEDED,))
    given.logits.fill_(0.5)
    given.q.fill_(1 / 16)
    assert check(given.read_again()).tolist() == [4] * 12


def test_temperatures_from_the_smallest_to_the_largest():
    given = make_round(18, 4, 12, 60, seed=8)
    given.temperatures.copy_(torch.logspace(-5, 1, 18))
    check(given.read_again())


@pytest.mark.parametrize("drafts", [0, 1, 6])
def test_without_a_proposal_drafts_must_be_the_targets(drafts):
    """Rounds of width 1, and greedy ones: of them all that is known may be the rows' tokens."""
    given = make_round(30, drafts, 4, 25, seed=drafts).without_proposal()
    lengths = check(given)
    bare = replace(given, logits=None, kept=None, largest=None, total=None)
    assert torch.equal(check(bare), lengths)
    assert drafts == 0 or len(set(lengths.tolist())) > 1


def test_blocks_may_be_rows_of_a_wider_tensor():
    given = make_round(6, 3, 4, 25, seed=9)
    wide = torch.full((6, 11), -5, device=DEVICE)
    wide[:, 2:6] = given.block_tokens
    logits = torch.full((24, 40), float("nan"), device=DEVICE)
    logits[:, 5:30] = given.logits
    strided = replace(given, block_tokens=wide[:, 2:6], logits=logits[:, 5:30])
    assert torch.equal(check(strided), check(given))


def test_an_empty_batch_gives_empty_results():
    given = make_round(2, 3, 4, 25)
    none = {k: v[:0] for k, v in vars(given).items() if isinstance(v, torch.Tensor)}
    found = accept_kernel.launch(*replace(given, **none).of_accept())
    assert [tuple(t.shape) for t in found] == [(0,), (0,), (0, 3, 4)]
