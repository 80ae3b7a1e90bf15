"""Bonus tokens and what is committed against the reference: in the interpreter, or on a GPU."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from sglang_hyperdflash.serving.verification.exact import unpack
from tests.unit.triton_ops.gate_help import MANY
from tests.unit.triton_ops.verify_help import (
    DEVICE,
    GREEDY,
    SEEDED,
    UNSEEDED,
    Round,
    make_round,
)
from triton_ops import finish_kernel, rows_kernel, verification
from triton_ops.gumbel import gumbel_argmax, gumbel_noise


def expected_of(arguments: tuple) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The reference's result, and the scores ``[bs, V]`` that it draws from."""
    scores = []

    def argmax(weights, seeds, positions):
        ids = torch.arange(weights.shape[-1], device=weights.device)
        scores.append(gumbel_noise(seeds, positions, ids).add_(weights.log()))
        return gumbel_argmax(weights, seeds, positions)

    with mock.patch.object(verification, "gumbel_argmax", argmax):
        found = verification.finish_reference(*arguments)
    return found, scores[0] if scores else None


def check(given: Round, correct: torch.Tensor, weight: torch.Tensor, draws: bool = True):
    """The kernels give what the reference does, or a token that ties; the committed."""
    arguments = given.of_finish(correct, weight, draws)
    expected, scores = expected_of(arguments)
    found = finish_kernel.launch(*arguments)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    bs, block = given.block_tokens.shape
    committed, wanted = (unpack(t, bs, block) for t in (found, expected))
    at = correct.long().unsqueeze(1)
    bonus, drawn = (c.tokens.gather(1, at) for c in (committed, wanted))
    for request in (bonus != drawn).squeeze(1).nonzero().flatten().tolist():
        assert given.by_block[request], "the target's own tokens are never near"
        row = scores[request]
        assert float(row.max() - row[bonus[request]]) < 1e-5
        # The rest must agree all the same.
        wanted.tokens[request, at[request]] = bonus[request]
        wanted.next_anchors[request] = bonus[request]
    assert torch.equal(found, expected)
    return committed


def any_lengths(given: Round, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted drafts and their weights, whatever the round would accept."""
    bs, block = given.block_tokens.shape
    g = torch.Generator().manual_seed(seed)
    correct = torch.randint(0, block, (bs,), generator=g).int()
    weight = torch.rand(bs, generator=g, dtype=torch.float64)
    weight[correct == 0] = 1.0
    return correct.to(DEVICE), weight.to(DEVICE)


@pytest.mark.parametrize("vocabulary", [1, 7, 1025, 3001])
@pytest.mark.parametrize("width", [1, 5, 64])
def test_commits_are_the_references(vocabulary, width):
    for drafts in (1, 2, 9):
        given = make_round(6, drafts, width, vocabulary, seed=drafts)
        check(given, *any_lengths(given, drafts))


@pytest.mark.parametrize("bs", [1, 2, MANY])
def test_batches_of_every_size(bs):
    given = make_round(bs, 7, 13, 29, seed=bs)
    check(given, *any_lengths(given, bs))


def test_every_length_of_every_kind():
    """As well as those the round accepts, with their weights."""
    for kinds in ((UNSEEDED,), (SEEDED,), (GREEDY,), (UNSEEDED, SEEDED, GREEDY)):
        given = make_round(6, 3, 6, 47, seed=1, kinds=kinds)
        for length in range(4):
            correct = torch.full((6,), length, dtype=torch.int32, device=DEVICE)
            check(given, correct, torch.linspace(0.01, 1, 6, device=DEVICE).double())
        correct, weight, _ = verification.accept_reference(*given.of_accept())
        check(given, correct, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("filtered", [False, True])
def test_logits_of_every_type_with_and_without_filters(dtype, filtered):
    given = make_round(9, 6, 20, 1333, seed=3, filtered=filtered, dtype=dtype)
    check(given, *any_lengths(given))


@pytest.mark.parametrize("programs", [1, 8, 10_000])
def test_any_number_of_shares_draws_the_same(programs, monkeypatch):
    """Also where a share has several tiles, and one candidate is the first or last of a tile."""
    monkeypatch.setattr(rows_kernel, "PROGRAMS", programs)
    given = make_round(3, 2, 5, 5 * 1024 + 17, seed=4, kinds=(UNSEEDED,))
    given.ids[:, :, :] = torch.tensor([0, 1023, 1024, 5 * 1024 - 1, 5 * 1024 + 16])
    # They have most of the mass, so what is left of them decides.
    given.logits.scatter_(1, given.ids[0, 0].expand(9, 5), 9.0)
    given = given.read_again()
    given.q.copy_(torch.tensor([0.1, 0.2, 0.3, 0.25, 0.15]))
    for length in range(3):
        correct = torch.full((3,), length, dtype=torch.int32, device=DEVICE)
        check(given, correct, torch.tensor([1.0, 0.9, 0.4], device=DEVICE).double())


def test_many_candidates():
    given = make_round(3, 2, 2048, 3001, seed=5)
    check(given, *any_lengths(given))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_broken_row_gives_no_token(value):
    """At every place of a block, of every kind of request."""
    given = make_round(12, 3, 6, 40, seed=1, kinds=(UNSEEDED, SEEDED, GREEDY))
    rows, place = given.logits.view(12, 4, 40), torch.arange(12, device=DEVICE) // 3
    if value == float("-inf"):
        rows[torch.arange(12), place] = value
    else:
        rows[torch.arange(12), place, 5] = value
    given = given.read_again()
    committed = check(given, place.int(), torch.ones(12, device=DEVICE).double())
    assert committed.tokens.gather(1, place.unsqueeze(1)).eq(40).all()
    assert not committed.next_anchors.any()
    # One row later, or earlier, it does not matter.
    check(given, (place - 1).clamp(min=0).int(), torch.ones(12, device=DEVICE).double())


def test_impossible_tokens_are_never_drawn():
    given = make_round(20, 3, 9, 33, seed=6, kinds=(UNSEEDED,))
    given.logits[torch.rand(given.logits.shape, device=DEVICE) < 0.7] = float("-inf")
    given.logits[:, 2] = 1.0
    given = given.read_again()
    correct, weight = any_lengths(given)
    bonus = check(given, correct, weight).next_anchors
    rows = torch.arange(20, device=DEVICE) * 4 + correct
    assert torch.isfinite(given.logits[rows, bonus]).all()


def test_one_hot_drafts():
    given = make_round(20, 5, 9, 33, seed=7, kinds=(UNSEEDED,))
    given.q.zero_().scatter_(2, given.choice.unsqueeze(2), 1.0)
    correct, weight = any_lengths(given)
    bonus = check(given, correct, weight).next_anchors
    rejected = correct < 5
    drafts = given.block_tokens[:, 1:].gather(1, correct.clamp(max=4).long().unsqueeze(1))
    assert (bonus != drafts.squeeze(1))[rejected].all()


@pytest.mark.parametrize("weight", [1.0, 0.25, 0.0])
def test_where_nothing_is_left_the_token_is_from_p(weight):
    """q takes all of p; powers of two, so that no bit is lost."""
    given = make_round(10, 2, 32, 32, seed=8, kinds=(UNSEEDED,))
    given.logits.fill_(-1.5)
    given.q.fill_(1 / 32)
    given = given.read_again()
    correct = torch.arange(10, device=DEVICE).remainder(3).int()
    check(given, correct, torch.full((10,), weight, device=DEVICE).double())


def test_mass_that_underflows_is_none():
    """Only the candidates have mass, q takes it, and the others' p is below every number."""
    given = make_round(8, 1, 4, 3001, seed=9, kinds=(UNSEEDED,))
    given.logits.uniform_(-900.0, -300.0)
    given.logits.view(8, 2, 3001)[:, 0].scatter_(1, given.ids[:, 0], 0.0)
    given.temperatures.fill_(1.0)
    given.q.fill_(0.25)
    given = given.read_again()
    correct = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    bonus = check(given, correct, torch.ones(8, device=DEVICE).double()).next_anchors
    assert (given.ids[:, 0] == bonus.unsqueeze(1)).any(1).all()


def test_temperatures_from_the_smallest_to_the_largest():
    given = make_round(18, 4, 12, 1060, seed=10, kinds=(UNSEEDED,))
    given.temperatures.copy_(torch.logspace(-5, 1, 18))
    given = given.read_again()
    check(given, *any_lengths(given))


@pytest.mark.parametrize("drafts", [0, 1, 6])
def test_without_draws_bonus_tokens_are_the_targets(drafts):
    """Rounds of width 1, and greedy ones: of them all that is known may be the rows' tokens."""
    given = make_round(31, drafts, 4, 25, seed=drafts).without_proposal()
    given.row_tokens[::5] = 25
    bare = replace(given, logits=None, kept=None, largest=None, total=None)
    for some in (given, bare):
        check(some, *any_lengths(given), draws=False)


def test_blocks_may_be_rows_of_a_wider_tensor():
    given = make_round(6, 3, 4, 25, seed=9, filtered=True)
    wide = torch.full((6, 11), -5, device=DEVICE)
    wide[:, 2:6] = given.block_tokens
    logits = torch.full((24, 40), float("nan"), device=DEVICE)
    logits[:, 5:30] = given.logits
    strided = replace(given, block_tokens=wide[:, 2:6], logits=logits[:, 5:30])
    lengths = any_lengths(given)
    found, expected = (vars(check(one, *lengths)) for one in (strided, given))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_every_id_lies_in_exactly_one_share():
    for rows in (1, 7, 64, 448, 1792):
        for vocabulary in (1, 1024, 2048, 129_280, 151_936):
            sizes = finish_kernel.BLOCK, finish_kernel.MAX_SHARES
            parts, tiles = finish_kernel.shares(rows, vocabulary, *sizes)
            share = tiles * finish_kernel.BLOCK
            assert parts < finish_kernel.MAX_PARTS
            assert (parts - 1) * share < vocabulary <= parts * share


def test_an_empty_batch_gives_an_empty_result():
    given = make_round(2, 3, 4, 25)
    none = {k: v[:0] for k, v in vars(given).items() if isinstance(v, torch.Tensor)}
    correct = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    arguments = replace(given, **none).of_finish(correct, correct.double())
    assert finish_kernel.launch(*arguments).shape == (0,)
