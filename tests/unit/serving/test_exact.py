"""Both verifications: their laws, their identity with target-only decoding, and what is wrong."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sglang_hyperdflash.draft.filters import Sampling
from sglang_hyperdflash.draft.propose import (
    DRAFT_TEMPERATURES,
    Candidates,
    draft_distribution,
    propose,
)
from sglang_hyperdflash.serving import batch as batch_module
from sglang_hyperdflash.serving.batch import BatchRequests
from sglang_hyperdflash.serving.drafting.temperature import DraftTemperature
from sglang_hyperdflash.serving.verification import exact, prefill
from sglang_hyperdflash.serving.verification.exact import Draws, verify_block, weights_of
from sglang_hyperdflash.serving.verification.verifier import Committed, Verifier
from tests.unit.serving.markov import DRAFTS, VOCAB, WIDTH, Linked, Markov, alone, decode, one, same
from tests.unit.statistics_help import chi_square_p_value

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
    step = weights_of(model.table, sampling)
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
        with mock.patch.object(exact, "RESIDUAL_STREAM", 0):
            return original(*inputs)

    original = exact._residual_draw
    with mock.patch.object(exact, "_residual_draw", with_drafts_noise):
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
    """A round without a seed: its proposal, and all that verification is given beside it."""
    seeds, anchor = SEEDS[:count], torch.zeros(count, dtype=torch.long)
    positions = torch.arange(DRAFTS + 1).expand(count, -1)
    sampling = same(one(), count)
    proposal = propose(
        *(model.candidates(anchor), anchor, model.head, sampling, seeds, positions[:, :-1]),
        torch.ones(count),
    )
    logits = model.table[torch.cat([anchor.unsqueeze(1), proposal.tokens], 1)].view(-1, VOCAB)
    weights = weights_of(logits, sampling.repeated(DRAFTS + 1))
    draws = Draws(seeds, torch.zeros(count, dtype=torch.bool), False, True)
    return proposal, logits, weights, sampling, draws, positions


def test_a_batch_without_greedy_requests_needs_no_argmax():
    proposal, logits, weights, sampling, draws, positions = blocks_of(Markov(4), 40)
    told = replace(draws, any_greedy=False)
    verdicts = [
        verify_block(proposal, logits, weights, sampling, one, positions) for one in (draws, told)
    ]
    for name in ("correct_drafts", "bonus", "broken"):
        assert torch.equal(*(getattr(verdict, name) for verdict in verdicts)), name


def test_seeded_and_unseeded_requests_in_one_batch_keep_their_own_verification():
    proposal, logits, weights, sampling, _, positions = blocks_of(Markov(4), 40)
    seeds, seeded = SEEDS[:40], torch.arange(40) % 2 == 0
    verdicts = [
        verify_block(proposal, logits, weights, sampling, draws, positions)
        for draws in (
            Draws(seeds, seeded),
            Draws(seeds, torch.ones_like(seeded), True, False),
            Draws(seeds, torch.zeros_like(seeded), False, True),
        )
    ]
    for name in ("correct_drafts", "bonus"):
        mixed, coupled, rejecting = (getattr(v, name) for v in verdicts)
        assert torch.equal(mixed, torch.where(seeded, coupled, rejecting))
    assert not torch.equal(verdicts[1].bonus, verdicts[2].bonus)


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
    def from_p(proposal, *inputs):
        return original(replace(proposal, q=torch.zeros_like(proposal.q)), *inputs)

    original = exact._residual_draw
    with mock.patch.object(exact, "_residual_draw", from_p):
        assert smallest() < 1e-9


def test_a_residual_that_forgets_what_the_prefix_is_worth_is_caught():
    def of_a_coin_each(proposal, weights, worth, *inputs):
        return original(proposal, weights, torch.ones_like(worth), *inputs)

    original = exact._residual_draw
    with mock.patch.object(exact, "_residual_draw", of_a_coin_each):
        assert smallest(setting={}, model=Markov(3, agreement=0.5)) < 1e-9


def test_noise_of_refused_drafts_that_comes_again_is_caught():
    """They decided how many were accepted: what they were drawn with is no longer random."""
    with mock.patch.object(Draws, "of_block", lambda draws, start: draws):
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
    proposal, logits, weights, sampling, draws, positions = blocks_of(Linked(8), 400)
    drawn_from = []

    def draw(left, *_):
        drawn_from.append(left.clone())
        return left.argmax(-1)

    with mock.patch.object(exact, "gumbel_argmax", draw):
        verdict = verify_block(proposal, logits, weights, sampling, draws, positions)
    q = torch.zeros(400, DRAFTS, VOCAB).scatter_(2, proposal.ids, proposal.q).double()
    p = weights.view(400, DRAFTS + 1, VOCAB).double()
    u = exact.coins(draws.seeds.unsqueeze(1).expand(400, DRAFTS), positions[:, :-1])
    found = [
        by_the_book(*(values[i].tolist() for values in (p, q, proposal.tokens, u)))
        for i in range(400)
    ]
    assert verdict.correct_drafts.tolist() == [accepted for accepted, _ in found]
    assert len(set(verdict.correct_drafts.tolist())) == DRAFTS + 1
    left = torch.tensor([weights for _, weights in found], dtype=torch.float64)
    torch.testing.assert_close(drawn_from[-1].double(), left, rtol=1e-4, atol=1e-6)


def test_a_block_is_worth_more_than_a_coin_for_each_draft():
    proposal, *given = blocks_of(Linked(8), 20_000)
    verdict = verify_block(proposal, *given)
    p, q = (t.gather(2, proposal.choice).squeeze(2) for t in (verdict.p, proposal.q))
    each = (p / q).clamp(max=1.0).cumprod(1).sum(1)  # expected, without coins
    assert verdict.correct_drafts.double().mean() > 1.03 * each.double().mean()


def test_coins_of_the_drafts_own_noise_are_caught():
    """The trap of coupled noise under the rejection rule."""
    noise = []

    def remember(proposal):
        drawn = proposal.noise.gather(2, proposal.choice).squeeze(2)
        noise.append(torch.exp(-torch.exp(-drawn)))
        return proposal

    with mock.patch.object(exact, "coins", lambda seeds, positions: noise[-1]):
        assert smallest(remember) < 1e-9


def test_argmax_verification_is_caught():
    def argmax(proposal, logits, weights, sampling, draws, positions):
        greedy = replace(sampling, top_ks=torch.ones_like(sampling.top_ks))
        return verify_block(proposal, logits, weights, greedy, draws, positions)

    assert smallest(verify=argmax) < 1e-9


def test_a_block_ends_at_its_first_broken_row():
    model, sampling = Markov(2), same(one(), 6)
    seeds, anchor = SEEDS[:6], torch.zeros(6, dtype=torch.long)
    positions = torch.arange(DRAFTS + 1).expand(6, -1)
    sure = torch.full((6, DRAFTS, 2), -50.0)
    sure[..., 0] = 50.0
    ids = torch.tensor([3, 5]).expand(6, DRAFTS, 2).contiguous()
    proposal = propose(
        Candidates(ids, sure), anchor, None, sampling, seeds, positions[:, :-1], torch.ones(6)
    )
    logits = torch.full((6, DRAFTS + 1, VOCAB), -50.0)
    logits[:, :, 3] = 50.0
    logits[1, 0, 4], logits[2, 2], logits[3, 3, 0] = float("nan"), float("-inf"), float("inf")
    for seeded in (True, False):
        draws = Draws(seeds, torch.full((6,), seeded), seeded, not seeded)
        flat = logits.view(-1, VOCAB)
        weights = weights_of(flat, sampling.repeated(DRAFTS + 1))
        verdict = verify_block(proposal, flat, weights, sampling, draws, positions)
        assert verdict.correct_drafts.tolist() == [3, 0, 2, 3, 3, 3]
        assert verdict.broken.tolist() == [False, True, True, True, False, False]
        assert verdict.bonus.tolist() == [3, 0, 0, 0, 3, 3]
    assert model.table.isfinite().all()


def test_an_impossible_draft_is_never_accepted_and_a_certain_one_always():
    ids = torch.tensor([[[1, 2]]])
    positions, seeds = torch.tensor([[5, 6]]), torch.tensor([3])
    anchor = torch.zeros(1, dtype=torch.long)
    for drafted, accepted in ((1, 0), (2, 1)):
        scores = torch.tensor([[[0.0, 0.0]]])
        scores[0, 0, drafted - 1] = 60.0
        proposal = propose(
            Candidates(ids, scores), anchor, None, one(), seeds, positions[:, :1], torch.ones(1)
        )
        logits = torch.full((2, 4), float("-inf"))
        logits[:, 2] = 0.0
        for seeded in (True, False):
            draws = Draws(seeds, torch.tensor([seeded]), seeded, not seeded)
            weights = weights_of(logits, one())
            verdict = verify_block(proposal, logits, weights, one(), draws, positions)
            assert verdict.correct_drafts.tolist() == [accepted]
            assert verdict.bonus.tolist() == [2]


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
    """A dependency head that gives NaN behind half of the vocabulary."""

    def head(self, previous, gates, ids):
        unusable = (previous % 2 == 0).unsqueeze(-1)
        return super().head(previous, gates, ids).masked_fill(unusable, float("nan"))


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
    proposal, logits, weights, sampling, draws, positions = blocks_of(Markov(6), 3)
    verdict = verify_block(proposal, logits, weights, sampling, draws, positions)
    verdict = replace(verdict, correct_drafts=torch.tensor([0, 1, 1], dtype=torch.int32))
    before, after = DraftTemperature("cpu"), DraftTemperature("cpu")
    before.learn(proposal, sampling, draws.seeded, verdict)
    p = verdict.p.clone()
    p[0, 1:], p[1:, 2:] = 0.123, 0.456
    scores = proposal.scores.clone()
    scores[0, 1:] = 0.0
    changed = replace(proposal, scores=scores), sampling, draws.seeded
    after.learn(*changed, replace(verdict, p=p))
    assert torch.equal(before.accepted, after.accepted)


def test_a_head_and_an_adjustment_see_the_drafts_before_them():
    seen = []

    def head(previous, gates, ids):
        return (ids == (previous.unsqueeze(1) + 1) % VOCAB) * 100.0

    def adjust(k, ids, scores, so_far):
        seen.append((k, so_far.tolist()))
        return scores.masked_fill(ids == 9, float("-inf"))

    ids = torch.arange(VOCAB).expand(2, DRAFTS, VOCAB)
    candidates = Candidates(ids, torch.zeros(2, DRAFTS, VOCAB), torch.zeros(2, DRAFTS, 4))
    anchor = torch.tensor([2, 5])
    positions = torch.zeros(2, DRAFTS, dtype=torch.long)
    arguments = (same(one(), 2), SEEDS[:2], positions, torch.ones(2))
    proposal = propose(candidates, anchor, head, *arguments, adjust)
    assert proposal.tokens.tolist() == [[3, 4, 5], [6, 7, 8]]
    assert seen == [(0, [[], []]), (1, [[3], [6]]), (2, [[3, 4], [6, 7]])]
    # Without either, the loop gives what the vectorised form gives.
    looped = propose(candidates, anchor, None, *arguments, lambda k, ids, scores, so_far: scores)
    flat = propose(candidates, anchor, None, *arguments)
    for name in ("tokens", "q", "choice", "scores", "noise"):
        assert torch.equal(getattr(looped, name), getattr(flat, name)), name


def test_q_is_normalised_and_a_point_where_it_must_be():
    scores = torch.randn(5, 7)
    sampling = replace(same(one(top_p=0.9), 5), top_ks=torch.tensor([1, 3, 1 << 30, 9, 2]))
    sampling = replace(sampling, need_top_k=True)
    q = draft_distribution(scores, sampling, torch.tensor([1.0, 1.0, 0.5, 0.0, 0.7]))
    torch.testing.assert_close(q.sum(-1), torch.ones(5))
    assert q.max(-1).values[[0, 3]].tolist() == [1.0, 1.0]
    assert ((q > 0).sum(-1) <= torch.tensor([1, 3, 7, 1, 2])).all()


def sampled(monkeypatch, backend: str, **values) -> SimpleNamespace:
    """SGLang's ``SamplingBatchInfo`` of a server with this sampling backend."""
    kernel = SimpleNamespace(sampling_backend=backend)
    monkeypatch.setattr(batch_module, "get_exec", lambda: SimpleNamespace(kernel=kernel))
    given = {
        "is_all_greedy": False,
        "need_top_k_sampling": True,
        "need_top_p_sampling": True,
        "need_min_p_sampling": False,
        "sampling_mask_batch_indices": torch.tensor([0]),
        "sampling_support_logprobs_capture_indices": None,
    }
    return SimpleNamespace(**given | values)


def sampling_of(info: SimpleNamespace) -> Sampling:
    """As a batch's requests have it."""
    return BatchRequests([], [], None, False, None, None, (0, 1), info).sampling


def test_a_sampling_mask_holds_what_is_drawn_from(monkeypatch):
    """Both shares are of the whole mass; SGLang's function takes top-p of what top-k has left."""
    info = sampled(
        monkeypatch,
        "pytorch",
        temperatures=torch.ones(1, 1),
        top_ks=torch.tensor([2]),
        top_ps=torch.tensor([0.5]),
        min_ps=torch.zeros(1),
        sampling_mask_top_ks=[2],
    )
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().repeat(3, 1)
    verifier = object.__new__(Verifier)
    verifier.vocabulary = 4
    verifier.renorm = None
    rows = SimpleNamespace(info=info, sampling=sampling_of(info), all_greedy=False)
    committed = Committed(torch.tensor([[0, 1, 0]]), torch.tensor([3]), torch.tensor([0]))
    output = SimpleNamespace(next_token_logits=logits)
    verifier.add_logprobs(SimpleNamespace(return_logprob=False), output, committed, rows)
    mask = output.sampling_mask_output
    drawn = weights_of(logits, rows.sampling.repeated(3))
    assert (drawn > 0).sum(-1).tolist() == [2, 2, 2]
    assert mask.lengths.tolist() == [[2, 2, 2]]
    expected = torch.tensor([[4 / 7, 3 / 7, 4 / 7]]).log()
    torch.testing.assert_close(mask.selected_logprobs, expected)


def test_a_prefill_s_sampling_mask_is_of_its_own_row_and_outlives_a_broken_one(monkeypatch):
    """SGLang's depends on another request's min-p, and its draw raises at a row of NaN."""
    info = sampled(
        monkeypatch,
        "flashinfer",
        temperatures=torch.ones(3, 1),
        top_ks=torch.tensor([2, 4, 4]),
        top_ps=torch.tensor([0.5, 1.0, 1.0]),
        min_ps=torch.tensor([0.0, 0.1, 0.0]),
        need_min_p_sampling=True,
    )
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).repeat(3, 1)
    probs[2] = torch.nan
    draws, verifier = SimpleNamespace(seeds=None), object.__new__(Verifier)
    verifier.renorm = None
    state = SimpleNamespace(current=SimpleNamespace(draws=draws, sampling=sampling_of(info)))
    sampler = prefill.PrefillSampler(None, state, verifier)
    sampler._greedy = torch.zeros(3, dtype=torch.int64)
    monkeypatch.setattr(prefill, "_sampler", sampler)
    given = None, None, probs, info, torch.arange(3), False
    drawn = set()
    for seed in range(200):
        draws.seeds = torch.tensor([seed, 1, 2])
        tokens, mask = prefill.draw_prefill(*given)
        drawn.add(int(tokens[0]))
        assert (mask.weights[0] > 0).tolist() == [True, True, False, False]
        assert mask.batch_rows.tolist() == [0]
    assert drawn == {0, 1}
    info.sampling_mask_batch_indices = None
    assert prefill.draw_prefill(*given)[1] is None
