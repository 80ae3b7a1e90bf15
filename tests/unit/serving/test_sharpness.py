"""How sharp drafts are: learnt, or given."""

from __future__ import annotations

import pytest
import torch

from sglang_hyperdflash.serving.sharpness import Sharpness, read_sharpness
from tests.unit.serving.markov import Markov, decode, one

SEEDS = torch.arange(500) * 7919 + 13


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("sure", [0.7, 6.0])
def test_learnt_sharpness_is_never_below_argmax_drafts_nor_below_q_itself(seeded, sure):
    model = Markov(5, sure=sure)
    seeds = SEEDS
    learnt = decode(model, one(), seeds, seeded, 24, Sharpness("cpu"))[1]
    fixed = [decode(model, one(), seeds, seeded, 24, t)[1] for t in (0.0, 1.0)]
    assert learnt > 0.97 * max(fixed), (learnt, fixed)


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
