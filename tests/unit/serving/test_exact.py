"""Both verifications: their laws, and their identity with target-only decoding."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sglang_hyperdflash.draft.adjust import Adjustments
from sglang_hyperdflash.draft.propose import Candidates, Draws, propose
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
from triton_ops.gumbel import block_seeds

SEEDS = torch.arange(20_000) * 7919 + 13
SETTINGS = {
    "temperature 1": {},
    "temperature 0.6, top-p": {"temperature": 0.6, "top_p": 0.8},
    "top-k": {"top_k": 4},
    "all of them": {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
}


def replaced_drafter(seed: int, agreement: float) -> Markov:
    """The target of ``Markov(seed)`` with another drafter."""
    model = Markov(seed, agreement=agreement)
    model.table = Markov(seed).table
    return model


# A model with its drafter, the draft temperature, and the widths of the rounds in turn. Where a
# target is flat, much is refused: what is drawn after a refusal decides the law.
WHOLE = (DRAFTS + 1,)
CASES = {
    "whole blocks": (Markov(3), 1.0, WHOLE),
    "another width every round": (Markov(3), 1.0, (2, 1, *WHOLE)),
    "drafts that know each other": (Linked(3), 1.0, WHOLE),
    "sharper drafts": (Markov(3), 0.5, WHOLE),
    "argmax drafts": (Markov(3), 0.0, WHOLE),
    "a poor drafter": (replaced_drafter(3, 0.5), 1.0, WHOLE),
    "a flat target": (Markov(5, sure=0.5), 1.0, WHOLE),
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


@pytest.mark.parametrize("name", CASES)
def test_tokens_without_a_seed_follow_the_targets_law(name):
    (model, t, widths), values = CASES[name], []
    for setting in SETTINGS.values():
        seeds = SEEDS if setting == {} else SEEDS[:8000]
        tokens, accepted = decode(
            model, one(**setting), seeds, False, 3, t, widths=itertools.cycle(widths)
        )
        values += p_values(tokens, model, setting)
        assert accepted > 0.05, "no draft is accepted: the test says nothing"
    assert min(values) > 0.001 / len(values), sorted(values)[:4]


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_seeded_tokens_are_target_only_whatever_the_drafter_and_follow_its_law(setting):
    model, seeds = Markov(3), SEEDS[:300]
    expected, shares = alone(model, one(**setting), seeds, 20), {}
    for name, (drafted, t, widths) in CASES.items():
        if name == "a flat target":
            continue
        tokens, shares[name] = decode(
            drafted, one(**setting), seeds, True, 20, t, widths=itertools.cycle(widths)
        )
        assert torch.equal(tokens, expected), name
    linked, poor = shares["drafts that know each other"], shares["a poor drafter"]
    assert linked > 1.03 * shares["whole blocks"] > 1.1 * poor, shares
    values = p_values(alone(model, one(**setting), SEEDS, 3), model, setting)
    assert min(values) > 0.001 / len(values), values


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
    every = Draws(seeds, seeded), Draws(seeds, seeded | True, False), Draws(seeds, seeded & False)
    mixed, coupled, rejecting = (
        torch.tensor(committed_of(verified(proposal, logits, block, sampling, draws, positions)[0]))
        for draws in every
    )
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
@pytest.mark.parametrize("drafted, accepted", [(1, 0), (2, 1)], ids=["impossible", "certain"])
def test_an_impossible_draft_is_never_accepted_and_a_certain_one_always(seeded, drafted, accepted):
    scores = torch.full((1, 1, 2), -60.0)
    scores[0, 0, drafted - 1] = 0.0
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
        Broken(slice(1, 2), slice(None)),
        Broken(slice(None), slice(None)),
        Broken(slice(1, 2), slice(WIDTH - 1, WIDTH)),
        BrokenHead(3),
    ],
    ids=["a draft", "all", "a score", "head"],
)
def test_a_drafter_that_gives_nan_changes_no_law(model):
    tokens, _ = decode(model, one(), SEEDS[:8000], False, 3)
    assert min(p_values(tokens, model, {})) > 1e-4


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
