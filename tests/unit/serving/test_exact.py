"""Both verifications: their laws, their identity with target-only decoding, and what is wrong."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sglang_hyperdflash.draft import propose as propose_module
from sglang_hyperdflash.draft.adjust import Adjustments
from sglang_hyperdflash.draft.propose import (
    DRAFT_TEMPERATURES,
    Candidates,
    Draws,
    draft_distribution,
    draft_scale,
    propose,
)
from sglang_hyperdflash.serving.drafting.temperature import DraftTemperature
from sglang_hyperdflash.serving.verification.exact import (
    Committed,
    read_rows,
    unpack,
    verify_block,
    weights_of,
)
from tests.unit.serving.markov import DRAFTS, VOCAB, WIDTH, Linked, Markov, alone, decode, one, same
from tests.unit.statistics_help import chi_square_p_value
from triton_ops import verification
from triton_ops.gumbel import block_seeds, gumbel_noise

COUNT = 20_000
SEEDS = torch.arange(COUNT) * 7919 + 13
SETTINGS = {
    "temperature 1": {},
    "temperature 0.6": {"temperature": 0.6},
    "top-k 5": {"top_k": 5},
    "top-p 0.8": {"top_p": 0.8},
    "min-p 0.1": {"min_p": 0.1},
    "all of them": {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
}


def p_values(tokens: torch.Tensor, model: Markov, setting: dict) -> list[float]:
    """The laws of the first token, of the first two and of the second two."""
    sampling = same(one(**setting), VOCAB)
    step = weights_of(model.table.unsqueeze(1), sampling).squeeze(1)
    step = step / step.sum(-1, keepdim=True)
    first = step[0]
    pair = first.unsqueeze(1) * step
    second = (pair.sum(0).unsqueeze(1) * step).flatten()
    return [
        chi_square_p_value(tokens[:, 0], first),
        chi_square_p_value(tokens[:, 0] * VOCAB + tokens[:, 1], pair.flatten()),
        chi_square_p_value(tokens[:, 1] * VOCAB + tokens[:, 2], second),
    ]


@pytest.mark.parametrize("seeded", [False, True])
def test_tokens_follow_the_targets_law_at_every_setting_and_draft_temperature(seeded):
    model, values = Markov(3), []
    cases = [(setting, 1.0) for setting in SETTINGS.values()]
    cases += [(SETTINGS["all of them"], t) for t in DRAFT_TEMPERATURES[:-1]]
    for setting, t in cases:
        tokens, accepted = decode(model, one(**setting), SEEDS[:8000], seeded, 3, t)
        values += p_values(tokens, model, setting)
        assert accepted > 0.2  # drafts are accepted, or the test says nothing
    assert min(values) > 0.001 / len(values), sorted(values)[:4]


@pytest.mark.parametrize("seeded", [False, True])
def test_drafts_that_know_each_other_follow_the_targets_law_and_more_are_accepted(seeded):
    model, values, accepted = Linked(3), [], {}
    for setting in SETTINGS.values():
        tokens, linked = decode(model, one(**setting), SEEDS[:6000], seeded, 3)
        values += p_values(tokens, model, setting)
        accepted[str(setting)] = (
            linked,
            decode(Markov(3), one(**setting), SEEDS[:500], seeded, 3)[1],
        )
    assert min(values) > 0.001 / len(values), sorted(values)[:4]
    assert all(linked > 1.1 * apart for linked, apart in accepted.values()), accepted


@pytest.mark.parametrize("seeded", [False, True])
def test_tokens_follow_the_targets_law_when_every_round_has_another_width(seeded):
    model, values = Markov(3), []
    for setting in SETTINGS.values():
        widths = itertools.cycle((2, 1, DRAFTS + 1))
        tokens, accepted = decode(model, one(**setting), SEEDS[:8000], seeded, 3, widths=widths)
        values += p_values(tokens, model, setting)
        if seeded:
            assert torch.equal(tokens, alone(model, one(**setting), SEEDS[:8000], 3))
        assert accepted > 0.05
    assert min(values) > 0.001 / len(values), sorted(values)[:4]


def test_a_residual_drawn_with_the_drafts_own_noise_is_caught():
    """The control: a token drawn with what has decided the draft that it replaces is biased."""

    def with_drafts_noise(*inputs):
        with mock.patch.object(verification, "RESIDUAL_STREAM", 0):
            return original(*inputs)

    original = verification.residual_draw
    with mock.patch.object(verification, "residual_draw", with_drafts_noise):
        assert smallest(setting=SETTINGS["temperature 1"]) < 1e-9


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_seeded_tokens_are_target_only_whatever_the_drafter(setting):
    seeds = SEEDS[:100]
    outputs = [
        decode(replaced_drafter(7, agreement), one(**setting), seeds, True, 20, t)
        for agreement, t in ((1.0, 1.0), (1.0, 0.0), (0.5, 0.7), (0.0, 1.0))
    ]
    outputs.insert(1, decode(Linked(7), one(**setting), seeds, True, 20))
    expected = alone(Markov(7), one(**setting), seeds, 20)
    assert all(torch.equal(tokens, expected) for tokens, _ in outputs)
    # The drafters really differ.
    assert outputs[0][1] > 1.3 * outputs[-1][1]


def replaced_drafter(seed: int, agreement: float) -> Markov:
    model = Markov(seed, agreement=agreement)
    model.table = Markov(seed).table
    return model


def test_greedy_requests_are_argmax_beside_sampled_ones():
    model = Markov(1)
    seeds = SEEDS[:64]
    base = one(top_k=5)
    top_ks = torch.tensor([1, 5]).repeat(32)
    mixed = replace(same(base, 64), top_ks=top_ks)
    with mock.patch("tests.unit.serving.markov.same", lambda sampling, rows: mixed):
        tokens, _ = decode(model, base, seeds, True, 20)
        expected = alone(model, base, seeds, 20)
    assert torch.equal(tokens, expected)
    assert len({tuple(row) for row in tokens[::2].tolist()}) == 1
    assert len({tuple(row) for row in tokens[1::2].tolist()}) == 32


def blocks_of(model: Markov, count: int):
    """A round without a seed: its proposal, and all that verification is given with it."""
    seeds, anchor = SEEDS[:count], torch.zeros(count, 1, dtype=torch.long)
    positions = torch.arange(DRAFTS + 1).repeat(count, 1)
    sampling = same(one(), count)
    draws = Draws(seeds, torch.zeros(count, dtype=torch.bool))
    found = model.candidates(anchor.squeeze(1))
    proposal = propose(found, model.head, anchor, positions, sampling, draws, torch.ones(2))
    block = torch.cat([anchor, proposal.tokens], 1)
    return proposal, model.table[block].view(-1, VOCAB), block, sampling, draws, positions


def verified(proposal, logits, block, sampling, draws, positions) -> tuple[Committed, torch.Tensor]:
    """The served functions between final logits and what is committed; ``p`` with it."""
    kept = None
    if sampling.filters:
        kept = weights_of(logits.view(*block.shape, -1), sampling).flatten(0, 1)
    rows = read_rows(logits, kept, sampling, draws, positions, all_draw=False)
    given = block, positions, proposal, sampling, draws, logits.shape[-1]
    packed, p = verify_block(rows, *given)
    return unpack(packed, *block.shape), p


def committed_of(found: Committed) -> tuple[list[int], list[int]]:
    """Accepted drafts and bonus tokens."""
    last = (found.accept_lens.long() - 1).unsqueeze(1)
    return (found.accept_lens - 1).tolist(), found.tokens.gather(1, last).squeeze(1).tolist()


def test_seeded_and_unseeded_requests_in_one_batch_keep_their_own_verification():
    proposal, logits, block, sampling, _, positions = blocks_of(Markov(4), 40)
    seeds, seeded = SEEDS[:40], torch.arange(40) % 2 == 0
    found = [
        committed_of(verified(proposal, logits, block, sampling, draws, positions)[0])
        for draws in (
            Draws(seeds, seeded),
            Draws(seeds, torch.ones_like(seeded), False),
            Draws(seeds, torch.zeros_like(seeded)),
        )
    ]
    for mixed, coupled, rejecting in zip(*found, strict=True):
        expected = [c if own else r for own, c, r in zip(seeded, coupled, rejecting, strict=True)]
        assert mixed == expected
    assert found[1][1] != found[2][1]


def smallest(change=None, verify=verify_block, t=1.0, setting=None, model=None) -> float:
    setting = {"top_k": 4} if setting is None else setting
    model = Markov(3) if model is None else model
    tokens, _ = decode(model, one(**setting), SEEDS, False, 3, t, change, verify)
    return min(p_values(tokens, model, setting))


def test_a_q_that_was_not_truncated_as_it_was_drawn_is_caught():
    def untruncated(proposal):
        q = proposal.scores.softmax(-1)
        return replace(proposal, q=q)

    assert smallest(untruncated) < 1e-9
    assert smallest() > 1e-5


def test_a_residual_without_the_subtraction_is_caught():
    def from_p(p, ids, q, *inputs):
        return original(p, ids, torch.zeros_like(q), *inputs)

    original = verification.residual_draw
    with mock.patch.object(verification, "residual_draw", from_p):
        assert smallest() < 1e-9


def test_a_residual_that_forgets_what_the_prefix_is_worth_is_caught():
    def of_a_coin_each(p, ids, q, correct_drafts, worth, *inputs):
        return original(p, ids, q, correct_drafts, torch.ones_like(worth), *inputs)

    original = verification.residual_draw
    with mock.patch.object(verification, "residual_draw", of_a_coin_each):
        assert smallest(setting={}, model=Markov(3, agreement=0.5)) < 1e-9


def test_noise_of_refused_drafts_that_comes_again_is_caught():
    """They decided how many were accepted: what they were drawn with is no longer random."""
    same_noise = {"block_seeds": lambda seeds, seeded, start: seeds}
    with (
        mock.patch.multiple(verification, **same_noise),
        mock.patch.multiple(propose_module, **same_noise),
    ):
        assert smallest(setting={}, model=Markov(5, sure=0.5)) < 1e-9
    assert smallest(setting={}, model=Markov(5, sure=0.5)) > 1e-5


def by_the_book(p, q, tokens, coins) -> tuple[int, list[float]]:
    """Algorithm 2 of 2403.10444 for one block: drafts accepted, and the next token's weights.

    p: laws of D + 1 rows over the vocabulary, q: of D rows.
    """
    worth, accepted, left = 1.0, 0, [max(a - b, 0.0) for a, b in zip(p[0], q[0], strict=True)]
    for k, token in enumerate(tokens, 1):
        worth = min(worth * p[k - 1][token] / q[k - 1][token], 1.0)
        if k < len(tokens):
            rest = [max(worth * a - b, 0.0) for a, b in zip(p[k], q[k], strict=True)]
            chance = sum(rest) / (sum(rest) + 1.0 - worth)
        else:
            rest, chance = p[k], worth
        if coins[k - 1] < chance:
            accepted, left = k, rest
    return accepted, left


def test_a_block_is_verified_by_the_book():
    proposal, logits, block, sampling, draws, positions = blocks_of(Linked(8), 400)
    drawn_from = []

    def draw(left, *_):
        drawn_from.append(left.clone())
        return left.argmax(-1)

    with mock.patch.object(verification, "gumbel_argmax", draw):
        committed, _ = verified(proposal, logits, block, sampling, draws, positions)
    q = torch.zeros(400, DRAFTS, VOCAB).scatter_(2, proposal.ids, proposal.q).double()
    p = logits.view(400, DRAFTS + 1, VOCAB).double().softmax(-1)
    own = block_seeds(draws.seeds, draws.seeded, positions[:, 0]).unsqueeze(1)
    u = verification.coins(own.expand(400, DRAFTS), positions[:, :-1])
    found = [
        by_the_book(*(values[i].tolist() for values in (p, q, proposal.tokens, u)))
        for i in range(400)
    ]
    accepted = committed_of(committed)[0]
    assert accepted == [accepted for accepted, _ in found]
    assert len(set(accepted)) == DRAFTS + 1
    left = torch.tensor([weights for _, weights in found], dtype=torch.float64)
    torch.testing.assert_close(drawn_from[-1].double(), left, rtol=1e-4, atol=1e-6)


def test_a_block_is_worth_more_than_a_coin_for_each_draft():
    proposal, *given = blocks_of(Linked(8), 20_000)
    committed, p = verified(proposal, *given)
    p, q = (t.gather(2, proposal.choice.unsqueeze(2)).squeeze(2) for t in (p, proposal.q))
    each = (p / q).clamp(max=1.0).cumprod(1).sum(1)  # expected, without coins
    assert (committed.accept_lens - 1).double().mean() > 1.03 * each.double().mean()


def test_coins_of_the_drafts_own_noise_are_caught():
    """The trap of coupled noise under the rejection rule."""
    drafts = []

    def remember(proposal):
        drafts.append(proposal.tokens)
        return proposal

    def own_noise(seeds, positions):
        flat = seeds.reshape(-1), positions.reshape(-1), drafts[-1].reshape(-1, 1)
        return torch.exp(-torch.exp(-gumbel_noise(*flat))).view(seeds.shape)

    with mock.patch.object(verification, "coins", own_noise):
        assert smallest(remember) < 1e-9


def test_argmax_verification_is_caught():
    def argmax(rows, block, positions, proposal, sampling, draws, vocabulary):
        greedy = replace(sampling, top_ks=torch.ones_like(sampling.top_ks))
        rows = read_rows(rows.logits, rows.kept, greedy, draws, positions, all_draw=False)
        return verify_block(rows, block, positions, proposal, greedy, draws, vocabulary)

    assert smallest(verify=argmax) < 1e-9


def sure_blocks(scores: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor, seeded: bool):
    """Verified blocks ``[bs, D]`` of one candidate each that has all the drafter's mass."""
    bs, drafts, _ = ids.shape
    anchor = torch.zeros(bs, 1, dtype=torch.long)
    positions = torch.arange(drafts + 1).repeat(bs, 1)
    sampling, draws = same(one(), bs), Draws(SEEDS[:bs], torch.full((bs,), seeded), not seeded)
    found = Candidates(ids, scores)
    proposal = propose(found, None, anchor, positions, sampling, draws, torch.ones(2))
    block = torch.cat([anchor, proposal.tokens], 1)
    return verified(proposal, logits.flatten(0, 1), block, sampling, draws, positions)[0]


@pytest.mark.parametrize("seeded", [True, False])
def test_a_block_ends_at_its_first_broken_row(seeded):
    sure = torch.full((6, DRAFTS, 2), -50.0)
    sure[..., 0] = 50.0
    ids = torch.tensor([3, 5]).expand(6, DRAFTS, 2).contiguous()
    logits = torch.full((6, DRAFTS + 1, VOCAB), -50.0)
    logits[:, :, 3] = 50.0
    logits[1, 0, 4], logits[2, 2], logits[3, 3, 0] = float("nan"), float("-inf"), float("inf")
    committed = sure_blocks(sure, ids, logits, seeded)
    accepted, bonus = committed_of(committed)
    assert accepted == [3, 0, 2, 3, 3, 3]
    assert bonus == [3, VOCAB, VOCAB, VOCAB, 3, 3]
    assert committed.next_anchors.tolist() == [3, 0, 0, 0, 3, 3]


@pytest.mark.parametrize("seeded", [True, False])
def test_an_impossible_draft_is_never_accepted_and_a_certain_one_always(seeded):
    for drafted, accepted in ((1, 0), (2, 1)):
        scores = torch.tensor([[[0.0, 0.0]]])
        scores[0, 0, drafted - 1] = 60.0
        logits = torch.full((1, 2, 4), float("-inf"))
        logits[:, :, 2] = 0.0
        committed = sure_blocks(scores, torch.tensor([[[1, 2]]]), logits, seeded)
        assert committed_of(committed) == ([accepted], [2])


class Broken(Markov):
    """A drafter that gives NaN: for one draft of a block, or for all, in one score or in a row."""

    def __init__(self, drafts: slice, scores: slice) -> None:
        super().__init__(3)
        self.where = drafts, scores

    def candidates(self, anchor, drafts=DRAFTS):
        found = super().candidates(anchor, drafts)
        found.scores[:, self.where[0], self.where[1]] = float("nan")
        return found


class BrokenHead(Linked):
    """A dependency head that gives NaN after half of the vocabulary."""

    @property
    def head(self):
        found = super().head
        found.predecessor[::2] = float("nan")
        return found


@pytest.mark.parametrize(
    "model",
    [
        *(Broken(slice(k, k + 1), slice(None)) for k in range(DRAFTS)),
        Broken(slice(None), slice(None)),
        Broken(slice(1, 2), slice(WIDTH - 1, WIDTH)),
        BrokenHead(3),
    ],
    ids=["first", "second", "third", "all", "one score", "head"],
)
def test_a_drafter_that_gives_nan_changes_no_law(model):
    tokens, _ = decode(model, one(), SEEDS[:8000], False, 3)
    assert min(p_values(tokens, model, {})) > 1e-4


def test_the_draft_temperature_does_not_look_past_the_first_rejection():
    proposal, logits, block, sampling, draws, positions = blocks_of(Markov(6), 3)
    committed, p = verified(proposal, logits, block, sampling, draws, positions)
    committed = replace(committed, accept_lens=torch.tensor([1, 2, 2], dtype=torch.int32))
    before, after = DraftTemperature("cpu"), DraftTemperature("cpu")
    before.learn(proposal, p, committed, positions, sampling, draws, VOCAB)
    p = p.clone()
    p[0, 1:], p[1:, 2:] = 0.123, 0.456
    scores = proposal.scores.clone()
    scores[0, 1:] = 0.0
    changed = replace(proposal, scores=scores)
    after.learn(changed, p, committed, positions, sampling, draws, VOCAB)
    assert torch.equal(before.accepted, after.accepted)


def test_a_head_and_penalties_see_the_drafts_before_them():
    ids = torch.arange(VOCAB).expand(2, DRAFTS, VOCAB).contiguous()
    gates = torch.ones(2, DRAFTS, VOCAB)
    candidates = Candidates(ids, torch.zeros(2, DRAFTS, VOCAB), gates)
    after = torch.eye(VOCAB).roll(1, 1) * 100.0  # the token after the one before
    head = SimpleNamespace(predecessor=after, successor=torch.eye(VOCAB))
    anchor, positions = torch.tensor([[2], [5]]), torch.zeros(2, DRAFTS + 1, dtype=torch.long)
    draws = Draws(SEEDS[:2], torch.zeros(2, dtype=torch.bool))
    arguments = anchor, positions, same(one(), 2), draws, torch.ones(2)
    assert propose(candidates, head, *arguments).tokens.tolist() == [[3, 4, 5], [6, 7, 8]]
    # The second request may draft no token twice, and neither what it has generated once.
    counts = torch.zeros(2, VOCAB, dtype=torch.int32)
    counts[1, 9] = 1
    penalties = torch.tensor([[0.0, 0.0, 1.0], [0.0, 1e4, 1.0]])
    ahead = Candidates(ids, torch.zeros(2, DRAFTS, VOCAB))
    ahead.scores[:, :, [4, 9]] = torch.tensor([200.0, 300.0])
    ahead.scores[:, :, 1] = 100.0
    changes = Adjustments(counts, torch.arange(2), penalties)
    found = propose(ahead, None, *arguments, changes)
    assert found.tokens.tolist() == [[9, 9, 9], [4, 1, found.tokens[1, 2]]]
    assert found.tokens[1, 2] not in (1, 4, 9)
    # Neutral adjustments change nothing: the walk gives what the vectorised form gives.
    neutral = Adjustments(counts, torch.arange(2), penalties[:1].repeat(2, 1))
    walked, flat = (propose(ahead, None, *arguments, c) for c in (neutral, Adjustments()))
    for name in ("tokens", "q", "choice", "scores"):
        assert torch.equal(getattr(walked, name), getattr(flat, name)), name


def test_q_is_normalised_and_a_point_where_it_must_be():
    scores = torch.randn(5, 7)
    sampling = replace(same(one(top_p=0.9), 5), top_ks=torch.tensor([1, 3, 1 << 30, 9, 2]))
    sampling = replace(sampling, need_top_k=True)
    scale = draft_scale(sampling, torch.tensor([1.0, 1.0, 0.5, 0.0, 0.7]))
    q = draft_distribution(scores, sampling, *scale)
    torch.testing.assert_close(q.sum(-1), torch.ones(5))
    assert q.max(-1).values[[0, 3]].tolist() == [1.0, 1.0]
    assert ((q > 0).sum(-1) <= torch.tensor([1, 3, 7, 1, 2])).all()
