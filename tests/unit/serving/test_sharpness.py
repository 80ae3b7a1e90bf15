"""How sharp drafts are: learnt, or given."""

from __future__ import annotations

import pytest
import torch

from sglang_hyperdflash.draft.propose import SHARPNESS, Proposal
from sglang_hyperdflash.serving.exact import Verdict, walked_worth
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
    """By the overlap of each row alone, what is chosen here keeps 5 % fewer drafts."""
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
    expected = torch.zeros(2, len(SHARPNESS), dtype=torch.float64)
    rows = [0, 0]
    for b in (0, 1, 5):
        for k in range(int(accepted[b]) + 1):
            rows[int(seeded[b])] += 1
            emitted = drawn.tokens[b, k] if k < accepted[b] else verdict.bonus[b]
            for i, t in enumerate(SHARPNESS):
                q = torch.eye(width)[scores[b, k].argmax()]
                if t:
                    q = (scores[b, k] / t).softmax(-1)
                if seeded[b]:
                    said = ids[b, k, (noise[b, k] + q.log()).argmax()]
                    expected[1, i] += float(said == emitted)
                    continue
                every = torch.stack(
                    [
                        torch.eye(width)[x.argmax()] if not t else (x / t).softmax(-1)
                        for x in scores[b]
                    ]
                )
                share = kept_shares(every.unsqueeze(0), p[b : b + 1], choice[b : b + 1])[0, k]
                expected[0, i] += share.nan_to_num(nan=0.0)
    sharpness, start = Sharpness("cpu", memory=20.0), torch.tensor([[0, 0, 0, 1e-3]] * 2).double()
    sharpness.learn(drawn, sampling, seeded, verdict)
    fade = torch.exp(-torch.tensor(rows).double() / 20.0).unsqueeze(1)
    assert rows == [3, 2]
    torch.testing.assert_close(sharpness.gains, start * fade + expected, rtol=1e-5, atol=1e-6)
    # A round of one class leaves the other as it is.
    before = sharpness.gains.clone()
    sharpness.learn(drawn, sampling, torch.zeros_like(seeded), verdict)
    assert torch.equal(before[1], sharpness.gains[1])
    assert not torch.equal(before[0], sharpness.gains[0])


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
