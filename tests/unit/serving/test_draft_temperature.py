"""The draft temperature: learnt, or given."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from sglang_hyperdflash.draft.propose import DRAFT_TEMPERATURES, Proposal
from sglang_hyperdflash.serving.draft_temperature import (
    DraftTemperature,
    kept_shares,
    read_draft_temperature,
)
from sglang_hyperdflash.serving.exact import Verdict, walked_worth
from tests.unit.serving.markov import Linked, Markov, decode, one

SEEDS = torch.arange(500) * 7919 + 13


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("sure", [0.7, 6.0])
def test_a_learnt_draft_temperature_is_never_below_argmax_drafts_nor_below_q_itself(seeded, sure):
    model = Markov(5, sure=sure)
    seeds = SEEDS
    learnt = decode(model, one(), seeds, seeded, 24, DraftTemperature("cpu", 500))[1]
    fixed = [decode(model, one(), seeds, seeded, 24, t)[1] for t in (0.0, 1.0)]
    assert learnt > 0.97 * max(fixed), (learnt, fixed)


def test_whole_blocks_decide_what_is_learnt_of_requests_without_a_seed():
    """By the overlap of each row alone, what is chosen here keeps 5 % fewer drafts."""
    model = Linked(5, sure=3.0, agreement=0.6)
    learnt = decode(model, one(), SEEDS, False, 24, DraftTemperature("cpu", 500))[1]
    fixed = [decode(model, one(), SEEDS, False, 24, t)[1] for t in DRAFT_TEMPERATURES]
    assert learnt > 0.97 * max(fixed), (learnt, fixed)


def test_a_kept_share_is_the_mean_over_the_next_draft_of_what_the_prefix_is_then_worth():
    g = torch.Generator().manual_seed(3)
    bs, drafts, width = 40, 4, 5
    p = torch.rand(bs, drafts, width, generator=g).pow(3)
    p /= p.sum(-1, keepdim=True) + torch.rand(bs, drafts, 1, generator=g)  # others have the rest
    laws = torch.rand(bs, drafts, 2, width, generator=g).pow(2)
    laws /= laws.sum(-1, keepdim=True)
    laws[:9, 1, 1] = torch.eye(width)[laws[:9, 1, 1].argmax(-1)]  # a point
    choice = torch.randint(0, width, (bs, drafts, 1), generator=g)
    found, above = kept_shares(laws, p, choice), 0
    for i, k in itertools.product(range(2), range(drafts)):
        q, expected = laws[:, :, i], torch.zeros(bs, dtype=torch.float64)
        for token in range(width):
            path = choice.clone()
            path[:, k] = token
            worth = walked_worth(*(law.gather(2, path).squeeze(2) for law in (p, q)))
            expected += q[:, k, token].double() * worth[:, k + 1] / worth[:, k]
        torch.testing.assert_close(found[:, k, i], expected, rtol=1e-5, atol=1e-6)
        overlap = torch.minimum(p[:, k], q[:, k]).sum(-1)
        assert (found[:, k, i] >= overlap - 1e-6).all()
        above += int((found[:, k, i] > overlap + 1e-3).sum())
    assert above > bs  # a prefix of little worth is made up for


def test_every_reached_row_of_a_mixed_batch_counts_once_and_by_its_own_rule():
    """Greedy and broken requests teach nothing, seeded ones by what was emitted."""
    g = torch.Generator().manual_seed(8)
    bs, drafts, width = 6, 3, 4
    seeded = torch.tensor([True, False, True, False, True, False])
    sampling = one().repeated(bs)
    sampling.top_ks[2:4] = 1  # greedy
    ids = torch.stack([torch.randperm(9, generator=g)[:width] for _ in range(bs * drafts)])
    ids, scores = ids.view(bs, drafts, width), torch.randn(bs, drafts, width, generator=g) * 2
    choice = torch.randint(0, width, (bs, drafts, 1), generator=g)
    noise = torch.randn(bs, drafts, width, generator=g).double()
    drawn = Proposal(
        ids.gather(2, choice).squeeze(2), ids, scores.softmax(-1), choice, scores, noise
    )
    broken = torch.tensor([False, False, False, False, True, False])
    p = torch.rand(bs, drafts, width, generator=g) / width
    p[1, 2] = float("nan")  # never reached
    p[5, 0] = float("nan")  # a row that says nothing
    accepted = torch.tensor([1, 0, 3, 2, 2, 1], dtype=torch.int32)
    verdict = Verdict(accepted, torch.tensor([3, 1, 4, 1, 5, 7]), broken, p)
    slots = torch.tensor([4, 2, 9, 0, 1, 7])
    learner = DraftTemperature("cpu", 10, memory=20.0)
    learner.doubt[7] = 0.2
    kinds = {0: (1, 0), 1: (0, 0), 5: (0, 3)}  # seeded or not; of no doubt yet, of some
    gains, rows = torch.zeros_like(learner.gains), torch.zeros(2, 5)
    for b, kind in kinds.items():
        for k in range(int(accepted[b]) + 1):
            rows[kind] += 1
            emitted = drawn.tokens[b, k] if k < accepted[b] else verdict.bonus[b]
            laws = torch.stack([law_at(scores[b], t) for t in DRAFT_TEMPERATURES], 1)
            kept = kept_shares(laws.unsqueeze(0), p[b : b + 1], choice[b : b + 1])[0, k]
            said = ids[b, k, (noise[b, k] + laws[k].log()).argmax(-1)]
            gains[kind] += (said == emitted).double() if seeded[b] else kept.nan_to_num(nan=0.0)
    gains += learner.gains * torch.exp(-rows.double() / 20.0).unsqueeze(2)
    learner.learn(drawn, sampling, seeded, slots, verdict)
    assert rows.tolist() == [[1, 0, 0, 2, 0], [2, 0, 0, 0, 0]]
    torch.testing.assert_close(learner.rows.squeeze(2).round().float(), rows)
    torch.testing.assert_close(learner.gains, gains, rtol=1e-5, atol=1e-6)
    # How unsure the target was of every text that said something.
    unsure = 1.0 - p.amax(-1)
    doubt = torch.full((10,), -1.0)
    doubt[4], doubt[2] = unsure[0, :2].mean(), unsure[1, 0]
    doubt[7] = 0.5 * 0.2 + 0.5 * (1.0 + unsure[5, 1]) / 2  # no law: nothing is sure
    torch.testing.assert_close(learner.doubt, doubt)
    # The next round teaches the texts alone; the one behind it all, and all fades.
    learner.learn(drawn, sampling, seeded, slots, verdict)
    torch.testing.assert_close(learner.gains, gains, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(learner.doubt[4], doubt[4])
    before, learner.doubt[7] = learner.rows.clone(), 0.2
    learner.learn(drawn, sampling, seeded, slots, verdict)
    fade = learner.rows[0, 3].item(), learner.rows[0, 0].item()
    assert fade[0] == pytest.approx(before[0, 3].item() * math.exp(-2 / 20) + 2)
    assert fade[1] == before[0, 0].item(), "row 1's text is of another kind by now"
    learner.enter(torch.tensor([4, 5]))
    assert learner.doubt[4] == -1.0 < learner.doubt[2]


def test_a_text_is_of_a_kind_by_its_doubt_and_rounding_makes_none_unknown():
    learner = DraftTemperature("cpu", 6)
    learner.doubt = torch.tensor([-1.0, 0.0, 0.019, 0.02, 0.1, 1.0])
    assert learner._kind(torch.arange(6)).tolist() == [0, 1, 1, 2, 3, 4]
    p, reached = torch.full((1, 1, 2), 1.0000001), torch.ones(1, 1, dtype=torch.bool)
    learner._doubt(p, reached, torch.tensor([0]))
    assert learner._kind(torch.tensor([0])).item() == 1


def test_a_kind_that_was_hardly_met_goes_by_all_kinds():
    learner = DraftTemperature("cpu", 2)
    learner.doubt[:] = torch.tensor([0.0, 0.5])
    learner.gains[0, 1], learner.rows[0, 1] = (
        torch.tensor([90.0, 80, 70, 60]),
        100.0,
    )
    unseeded = torch.zeros(2, dtype=torch.bool)
    assert learner.of(unseeded, torch.arange(2)).tolist() == [0.0, 0.0]
    learner.gains[0, 4], learner.rows[0, 4] = (
        torch.tensor([40.0, 60, 50, 50]),
        100.0,
    )
    assert learner.of(unseeded, torch.arange(2)).tolist() == [0.0, 0.5]


def law_at(scores: torch.Tensor, t: float) -> torch.Tensor:
    """Laws of rows ``scores [D, K]`` at temperature 1."""
    if t == 0.0:
        return torch.eye(scores.shape[-1])[scores.argmax(-1)]
    return (scores / t).softmax(-1)


def test_the_candidates_of_a_whole_vocabulary_are_tried_at_one_draft_temperature_after_another():
    gains = []
    for at_once in (4, 1024):
        learner = DraftTemperature("cpu", 60)
        learner.AT_ONCE = at_once
        decode(Linked(5, sure=3.0), one(), SEEDS[:60], False, 12, learner)
        gains.append(learner.gains)
    torch.testing.assert_close(*gains)
    assert (gains[0] > 1e-3).any()


def test_one_server_drafts_argmaxes_of_sure_texts_and_draws_those_of_others():
    learner, slots = DraftTemperature("cpu", 60), torch.arange(60)
    unseeded = torch.zeros(60, dtype=torch.bool)
    models = (Markov(5, sure=0.7), Markov(5, sure=30.0, agreement=0.1))
    for turn in range(2):
        for model in models:
            learner.enter(slots)
            found = decode(model, one(), SEEDS[:60], False, 48, learner)[1]
            best = max(
                decode(model, one(), SEEDS[:60], False, 48, t)[1] for t in DRAFT_TEMPERATURES
            )
            t = learner.of(unseeded, slots).mean().item()
            assert t > 0.9 if model is models[0] else t < 0.75, (turn, t)
            # Once both are known, a turn of the traffic costs nothing.
            assert found > (0.95 if turn else 0.85) * best, (turn, t, found, best)


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
def test_a_given_draft_temperature_stays(t):
    model, seeds = Markov(5, sure=0.7), SEEDS[:50]
    given = DraftTemperature("cpu", 50, fixed=t)
    found, expected = (decode(model, one(), seeds, False, 24, s) for s in (given, t))
    assert torch.equal(found[0], expected[0])
    assert found[1] == expected[1]
    assert torch.equal(given.gains, DraftTemperature("cpu", 50).gains), "nothing is to be learnt"
    assert torch.equal(given.doubt, DraftTemperature("cpu", 50).doubt)


@pytest.mark.parametrize(
    ("text", "expected"), [("", None), ("adaptive", None), ("0", 0.0), (" 0.5 ", 0.5), ("1", 1.0)]
)
def test_the_draft_temperature_is_learnt_unless_it_is_given(text, expected):
    assert read_draft_temperature({"HYPERDFLASH_DRAFT_TEMPERATURE": text}) == expected
