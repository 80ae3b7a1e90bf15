"""The draft temperature: learnt, or given."""

import itertools

import pytest
import torch

from sglang_hyperdflash.draft.propose import DRAFT_TEMPERATURES
from sglang_hyperdflash.serving.drafting import temperature
from sglang_hyperdflash.serving.drafting.temperature import DraftTemperature
from tests.unit.serving.markov import DRAFTS, VOCAB, WIDTH, Markov, one, verified
from triton_ops.gumbel import block_seeds, gumbel_noise
from triton_ops.verification import weights_along

SEEDS = torch.arange(500) * 7919 + 13


@pytest.mark.parametrize("seeded, sure", [(False, 0.7), (True, 6.0)])
def test_a_learnt_draft_temperature_is_never_below_argmax_drafts_nor_below_q_itself(seeded, sure):
    model = Markov(5, sure=sure)
    learnt = model.decode(one(), SEEDS, seeded, 24, DraftTemperature("cpu"))[1]
    fixed = [model.decode(one(), SEEDS, seeded, 24, t)[1] for t in (0.0, 1.0)]
    assert learnt > 0.97 * max(fixed), (learnt, fixed)


def test_an_accepted_share_is_the_mean_over_the_next_draft_of_the_prefix_s_next_weight():
    g = torch.Generator().manual_seed(3)
    bs, drafts, width = 40, 4, 5
    p = torch.rand(bs, drafts, width, generator=g).pow(3)
    p /= p.sum(-1, keepdim=True) + torch.rand(bs, drafts, 1, generator=g)  # others have the rest
    both = torch.rand(bs, drafts, 2, width, generator=g).pow(2)
    both /= both.sum(-1, keepdim=True)
    both[:9, 1, 1] = torch.eye(width)[both[:9, 1, 1].argmax(-1)]  # a point
    choice = torch.randint(0, width, (bs, drafts), generator=g)
    shares, above = temperature.accepted_shares(both, p, choice), 0
    for i, k in itertools.product(range(2), range(drafts)):
        q, expected = both[:, :, i], torch.zeros(bs, dtype=torch.float64)
        for token in range(width):
            path = choice.clone()
            path[:, k] = token
            path = path.unsqueeze(2)
            weight = weights_along(*(each.gather(2, path).squeeze(2) for each in (p, q)))
            expected += q[:, k, token].double() * weight[:, k + 1] / weight[:, k]
        torch.testing.assert_close(shares[:, k, i], expected, rtol=1e-5, atol=1e-6)
        overlap = torch.minimum(p[:, k], q[:, k]).sum(-1)
        assert (shares[:, k, i] >= overlap - 1e-6).all()
        above += int((shares[:, k, i] > overlap + 1e-3).sum())
    assert above > bs  # a light prefix is made up for


def test_every_reached_row_counts_once_and_by_the_rule_of_its_request(monkeypatch):
    """Seeded ones by what was emitted. Every second round is learnt from; what was learnt fades."""
    seeded = torch.arange(40) % 3 == 0
    logits, block, positions, proposal, sampling, draws = Markov(5).blocks(seeded)
    committed, p = verified(logits, block, positions, proposal, sampling, draws)
    streams = block_seeds(draws.seeds, seeded, positions[:, 0]).repeat_interleave(DRAFTS)
    noise = gumbel_noise(streams, positions[:, :-1].reshape(-1), proposal.ids.view(-1, WIDTH))
    noise = noise.view(proposal.ids.shape)
    monkeypatch.setattr(temperature, "MEMORY", 20.0)
    learner = DraftTemperature("cpu")
    gains, rows = torch.zeros(2, len(DRAFT_TEMPERATURES), dtype=torch.float64), [0, 0]
    for b, kind in enumerate(seeded.int().tolist()):
        scores = (proposal.scores[b] / max(t, 1e-6) for t in DRAFT_TEMPERATURES)
        q = torch.stack([each.softmax(-1) for each in scores], 1)
        (share,) = temperature.accepted_shares(q[None], p[b, None], proposal.choice[b, None])
        for k in range(min(int(committed.accept_lens[b]), DRAFTS)):
            rows[kind] += 1
            drafted = proposal.ids[b, k, (noise[b, k] + q[k].log()).argmax(-1)]
            gains[kind] += (drafted == committed.tokens[b, k]).double() if kind else share[k]
    assert min(rows) > 14 and sum(rows) < 40 * DRAFTS
    fade = torch.exp(-torch.tensor(rows).double() / 20.0).unsqueeze(1)
    once = learner.accepted * fade + gains
    for expected in (once, once, once * fade + gains):
        learner.learn(proposal, p, committed, positions, sampling, draws, VOCAB)
        torch.testing.assert_close(learner.accepted, expected, rtol=1e-5, atol=1e-6)


def test_seeded_and_unseeded_requests_have_a_temperature_each():
    learner = DraftTemperature("cpu")
    assert learner.current.tolist() == [1.0, 1.0], "before the first round"
    best = torch.tensor([[4.0, 600, 500, 500], [900, 800, 700, 600]])
    learner.accepted[:] = best
    Markov(5).decode(one(), SEEDS[:2], False, 2, learner)
    assert learner.current.tolist() == [0.5, 0.0]
    learner.reset()
    assert learner.current.tolist() == [1.0, 1.0]


def test_the_draft_temperature_is_learnt_unless_it_is_given(monkeypatch):
    for text, expected in (("", None), ("adaptive", None), ("0", 0.0), (" 0.3 ", 0.3)):
        monkeypatch.setenv("HYPERDFLASH_DRAFT_TEMPERATURE", text)
        assert temperature.read_draft_temperature() == expected
    model, given = Markov(5, sure=0.7), DraftTemperature("cpu", fixed=0.3)
    fixed, same = (model.decode(one(), SEEDS[:50], False, 24, t) for t in (given, 0.3))
    assert torch.equal(fixed[0], same[0]) and fixed[1] == same[1]
    assert torch.equal(given.accepted, DraftTemperature("cpu").accepted), "nothing is learnt"
