"""Both verifications: their laws, and their identity with target-only decoding."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sglang_hyperdflash.draft.adjust import Adjustments
from sglang_hyperdflash.draft.propose import Candidates, Draws, propose
from sglang_hyperdflash.serving.batch import BatchRequests, GeneratedCounts, RequestState
from sglang_hyperdflash.serving.verification.exact import Committed
from tests.unit.serving.markov import DRAFTS, VOCAB, WHOLE, Markov, one, verified
from triton_ops import verification
from triton_ops.gumbel import block_seeds

SEEDS = torch.arange(20_000) * 7919 + 13
SETTINGS = {
    "temperature 1": {},
    "temperature 0.6, top-p": {"temperature": 0.6, "top_p": 0.8},
    "top-k": {"top_k": 4},
    "all of them": {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
}
# A model with its drafter, the draft temperature, and the widths of the rounds in turn. Where a
# target is flat, much is refused: what is drawn after a refusal decides the law.
CASES = {
    "whole blocks": (Markov(3), 1.0, WHOLE),
    "another width every round": (Markov(3), 1.0, (2, 1, *WHOLE)),
    "drafts that know each other": (Markov(3, linked=True), 1.0, WHOLE),
    "sharper drafts": (Markov(3), 0.5, WHOLE),
    "argmax drafts": (Markov(3), 0.0, WHOLE),
    "a poor drafter": (Markov(3, agreement=0.5), 1.0, WHOLE),
    "a flat target": (Markov(5, sure=0.5), 1.0, WHOLE),
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_without_a_seed_follow_the_targets_law(name):
    (model, t, widths), values = CASES[name], []
    for setting in SETTINGS.values():
        seeds = SEEDS if setting == {} else SEEDS[:8000]
        tokens, accepted = model.decode(one(**setting), seeds, False, 3, t, widths)
        values += model.p_values(tokens, one(**setting))
        assert accepted > 0.05, "no draft is accepted: the test says nothing"
    assert min(values) > 0.001 / len(values), sorted(values)[:4]


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_seeded_tokens_are_target_only_whatever_the_drafter_and_follow_its_law(setting):
    model, seeds = Markov(3), SEEDS[:300]
    expected, shares = model.alone(one(**setting), seeds, 20), {}
    for name, (drafted, t, widths) in CASES.items():
        if name == "a flat target":
            continue
        tokens, shares[name] = drafted.decode(one(**setting), seeds, True, 20, t, widths)
        assert torch.equal(tokens, expected), name
    linked, poor = shares["drafts that know each other"], shares["a poor drafter"]
    assert linked > 1.03 * shares["whole blocks"] > 1.1 * poor, shares
    values = model.p_values(model.alone(one(**setting), SEEDS, 3), one(**setting))
    assert min(values) > 0.001 / len(values), values


FREQUENCY, PRESENCE, REPETITION = 0.9, 0.5, 1.6


def penalised(logits: torch.Tensor, generated: torch.Tensor) -> torch.Tensor:
    """``logits [N, V]`` after ``generated [N, n]``, written down from the formulas."""
    counts = F.one_hot(generated, VOCAB).sum(1)
    x = logits - FREQUENCY * counts - PRESENCE * (counts > 0)
    scaled = torch.where(x < 0, x * REPETITION, x / REPETITION)
    return torch.where(counts > 0, scaled, x)


def requests_with_penalties(count: int) -> tuple[RequestState, BatchRequests]:
    """Requests without prompts, and the served state that counts their tokens."""
    penalties = torch.tensor([FREQUENCY, PRESENCE, REPETITION]).repeat(count, 1)
    changes = Adjustments(None, torch.arange(count), penalties)
    state = RequestState(SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCAB)), 0, "cpu")
    state.counts = GeneratedCounts(count, VOCAB, "cpu")
    given = changes, (0, count), SimpleNamespace(logit_bias=None), state.counts.table
    return state, BatchRequests([], [], None, False, *given)


@pytest.mark.parametrize("name", ["temperature 1", "all of them"])
@pytest.mark.parametrize("widths", [WHOLE, (2, 1, *WHOLE)], ids=["whole", "any"])
def test_penalised_tokens_follow_the_penalised_law(name, widths):
    """Those of requests with a seed are those of penalised target-only decoding."""
    model, sampling = Markov(3), one(**SETTINGS[name])

    def decoded(seeds: torch.Tensor, seeded: bool, tokens: int) -> torch.Tensor:
        requests = requests_with_penalties(len(seeds))
        result, accepted = model.decode(sampling, seeds, seeded, tokens, 1.0, widths, requests)
        assert accepted > (0.1 if seeded else 0.05)
        return result

    values = model.p_values(decoded(SEEDS[:8000], False, 3), sampling, penalised)
    assert min(values) > 0.0005, values
    tokens = decoded(SEEDS[:200], True, 30)
    assert torch.equal(tokens, model.alone(sampling, SEEDS[:200], 30, penalised))
    assert not torch.equal(tokens, model.alone(sampling, SEEDS[:200], 30)), "they change nothing"


def committed_of(committed: Committed) -> tuple[list[int], list[int]]:
    accepted = committed.accept_lens.long() - 1
    bonus = committed.tokens.gather(1, accepted.unsqueeze(1)).squeeze(1)
    return accepted.tolist(), bonus.tolist()


def test_seeded_and_unseeded_requests_in_one_batch_keep_their_own_verification():
    seeds, seeded = SEEDS[:40], torch.arange(40) % 2 == 0
    *given, _ = Markov(4).blocks(seeded & False)
    every = Draws(seeds, seeded), Draws(seeds, seeded | True, False), Draws(seeds, seeded & False)
    results = (torch.tensor(committed_of(verified(*given, draws))) for draws in every)
    mixed, coupled, rejecting = results
    assert torch.equal(mixed, torch.where(seeded, coupled, rejecting))
    assert not torch.equal(coupled, rejecting)


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
    given = Markov(8, linked=True).blocks(torch.zeros(400).bool())
    logits, _, positions, proposal, _, draws = given
    drawn_from = []

    def draw(left, *_):
        drawn_from.append(left.clone())
        return left.argmax(-1)

    with mock.patch.object(verification, "gumbel_argmax", draw):
        committed = verified(*given)
    q = torch.zeros(400, DRAFTS, VOCAB).scatter_(2, proposal.ids, proposal.q).double()
    p = logits.double().softmax(-1)
    seeds = block_seeds(draws.seeds, draws.client_seeded, positions[:, 0]).unsqueeze(1)
    u = verification.coins(seeds.expand(400, DRAFTS), positions[:, :-1])
    blocks = zip(p.tolist(), q.tolist(), proposal.tokens.tolist(), u.tolist(), strict=True)
    accepted, left = zip(*(by_the_book(*block) for block in blocks), strict=True)
    assert committed_of(committed)[0] == list(accepted)
    assert len(set(accepted)) == DRAFTS + 1
    left = torch.tensor(left, dtype=torch.float64)
    torch.testing.assert_close(drawn_from[-1].double(), left, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["greedy", "seeded", "unseeded"])
def test_a_block_ends_at_its_first_broken_row(kind):
    """All are sure of token 0, the argmax of what is all -inf too."""
    requests, width, inf = 6, DRAFTS + 1, float("inf")
    sampling = one(**{"top_k": 1} if kind == "greedy" else {}).repeated(requests)
    draws = Draws(SEEDS[:requests], torch.full((requests,), kind == "seeded"), kind == "unseeded")
    logits = torch.full((requests, width, VOCAB), -50.0)
    logits[:, :, 0] = 50.0
    logits[1, 0, 4], logits[2, 2], logits[3, 3, 1] = float("nan"), -inf, inf
    logits[4, 1, 4], logits[4, 2] = 150.0, float("nan")  # past the end of its block
    block, positions = torch.zeros(requests, width).long(), torch.arange(width).repeat(requests, 1)
    proposal = None
    if kind != "greedy":
        ids = torch.tensor([0, 5]).expand(requests, DRAFTS, 2).contiguous()
        candidates = Candidates(ids, torch.tensor([50.0, -50.0]).expand(ids.shape).contiguous())
        drafting = block[:, :1], positions, sampling, draws, 1.0
        proposal = propose(candidates, None, *drafting)
    committed = verified(logits, block, positions, proposal, sampling, draws)
    assert committed_of(committed) == ([3, 0, 2, 3, 1, 3], [0, VOCAB, VOCAB, VOCAB, 4, 0])
    assert committed.next_anchors.tolist() == [0, 0, 0, 0, 4, 0], "the next round may already run"
    # Each row as a block without drafts.
    rows = (each.reshape(-1, 1, *each.shape[2:]) for each in (logits, block, positions))
    draws = Draws(*(each.repeat_interleave(width) for each in (draws.seeds, draws.client_seeded)))
    committed = verified(*rows, None, sampling.repeated(width), draws)
    assert (committed.tokens == VOCAB).nonzero()[:, 0].tolist() == [4, 10, 15, 18]


@pytest.mark.parametrize(
    "broken",
    [np.s_[:, 1], np.s_[:], np.s_[:, 1, 5], None],
    ids=["a draft", "all", "a score", "head"],
)
def test_a_drafter_that_gives_nan_changes_no_law(broken):
    model = Markov(3, linked=broken is None)
    if broken is None:
        model.head.predecessor[::2] = float("nan")
    else:
        model.drafter[broken] = float("nan")
    tokens, _ = model.decode(one(), SEEDS[:8000], False, 3)
    assert min(model.p_values(tokens, one())) > 1e-4
