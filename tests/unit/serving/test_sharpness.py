"""How sharp drafts are: learnt, or given."""

from __future__ import annotations

import pytest
import torch

from sglang_hyperdflash.draft.propose import SHARPNESS
from sglang_hyperdflash.serving.exact import walked_worth
from sglang_hyperdflash.serving.sharpness import Sharpness, kept_shares, read_sharpness
from tests.unit.serving.markov import Linked, Markov, decode, one

SEEDS = torch.arange(500) * 7919 + 13


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("sure", [0.7, 6.0])
def test_learnt_sharpness_is_never_below_argmax_drafts_nor_below_q_itself(seeded, sure):
    model = Markov(5, sure=sure)
    seeds = SEEDS
    learnt = decode(model, one(), seeds, seeded, 24, Sharpness("cpu"))[1]
    fixed = [decode(model, one(), seeds, seeded, 24, t)[1] for t in (0.0, 1.0)]
    assert learnt > 0.97 * max(fixed), (learnt, fixed)


def test_whole_blocks_decide_what_is_learnt_of_requests_without_a_seed():
    """By the overlap of each row alone, 0.7 is chosen here, which keeps 5 % fewer drafts."""
    model = Linked(5, sure=3.0, agreement=0.6)
    learnt = decode(model, one(), SEEDS, False, 24, Sharpness("cpu"))[1]
    fixed = [decode(model, one(), SEEDS, False, 24, t)[1] for t in SHARPNESS]
    assert learnt > 0.97 * max(fixed), (learnt, fixed)


def test_a_kept_share_is_the_mean_over_the_next_draft_of_what_the_prefix_is_then_worth():
    g = torch.Generator().manual_seed(3)
    bs, drafts, width = 40, 4, 5
    p = torch.rand(bs, drafts, width, generator=g).pow(3)
    p /= p.sum(-1, keepdim=True) + torch.rand(bs, drafts, 1, generator=g)  # others have the rest
    q = torch.rand(bs, drafts, width, generator=g).pow(2)
    q /= q.sum(-1, keepdim=True)
    q[:9, 1] = torch.eye(width)[q[:9, 1].argmax(-1)]  # a point
    choice = torch.randint(0, width, (bs, drafts, 1), generator=g)
    found, above = kept_shares(q, p, choice), 0
    for k in range(drafts):
        expected = torch.zeros(bs, dtype=torch.float64)
        for token in range(width):
            path = choice.clone()
            path[:, k] = token
            worth = walked_worth(*(law.gather(2, path).squeeze(2) for law in (p, q)))
            expected += q[:, k, token].double() * worth[:, k + 1] / worth[:, k]
        torch.testing.assert_close(found[:, k], expected, rtol=1e-5, atol=1e-6)
        overlap = torch.minimum(p[:, k], q[:, k]).sum(-1)
        assert (found[:, k] >= overlap - 1e-6).all()
        above += int((found[:, k] > overlap + 1e-3).sum())
    assert above > bs  # a prefix of little worth is made up for


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
def test_a_given_sharpness_stays(t):
    model, seeds = Markov(5, sure=0.7), SEEDS[:50]
    given = Sharpness("cpu", fixed=t)
    found, expected = (decode(model, one(), seeds, False, 24, s) for s in (given, t))
    assert torch.equal(found[0], expected[0])
    assert found[1] == expected[1]
    assert not any(given.due() for _ in range(9)), "nothing is to be learnt"


@pytest.mark.parametrize(
    ("text", "expected"), [("", None), ("adaptive", None), ("0", 0.0), (" 0.5 ", 0.5), ("1", 1.0)]
)
def test_sharpness_is_learnt_unless_it_is_given(text, expected):
    assert read_sharpness({"HYPERDFLASH_SHARPNESS": text}) == expected


def test_one_round_of_four_is_learnt_from_the_first_among_them():
    sharpness = Sharpness("cpu")
    assert [sharpness.due() for _ in range(9)] == [True, *[False] * 3, True, *[False] * 3, True]


def test_what_was_learnt_fades_with_the_rows_that_came_behind():
    """A server whose traffic turns chooses anew; a batch of many requests is as many rows."""
    unseeded = torch.zeros(1, dtype=torch.bool)
    for count, memory in ((1, 30.0), (60, 3e3)):
        sharpness = Sharpness("cpu", memory=memory)
        decode(Markov(5, sure=0.7), one(), SEEDS[:count], False, 180, sharpness)
        flat = sharpness.of(unseeded).item()
        sure = Markov(5, sure=30.0, agreement=0.1)
        decode(sure, one(), SEEDS[:count], False, 144, sharpness)
        assert sharpness.of(unseeded).item() < flat == 1.0, (count, flat)
