"""Penalised requests at temperature 1: tokens follow the penalised law, by the served code."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from sglang_hyperdflash.draft.adjust import Adjustments
from sglang_hyperdflash.draft.propose import Draws
from sglang_hyperdflash.serving.batch import BatchRequests, RequestState
from sglang_hyperdflash.serving.verification.exact import weights_of
from sglang_hyperdflash.serving.verification.penalties import GeneratedCounts
from tests.unit.serving.markov import DRAFTS, VOCAB, Markov, alone, decode, one, same
from tests.unit.statistics_help import chi_square_p_value

SEEDS = torch.arange(8000) * 7919 + 13
FREQUENCY, PRESENCE, REPETITION = 0.9, 0.5, 1.6
SETTINGS = {"temperature 1": {}, "all filters": {"top_k": 6, "top_p": 0.9, "min_p": 0.05}}


class Worker:
    """The served parts' state, of equal requests without prompts."""

    def __init__(self, count: int) -> None:
        at = torch.arange(count)
        penalties = torch.tensor([FREQUENCY, PRESENCE, REPETITION]).expand(count, 3)
        draws = Draws(at, at >= 0)
        own = Adjustments(None, at, penalties.contiguous())
        runner = SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCAB))
        self.request_state = RequestState(runner, 0, "cpu")
        self.request_state.counts = GeneratedCounts(count, VOCAB, "cpu")
        table, info = self.request_state.counts.table, SimpleNamespace(logit_bias=None)
        self.requests = BatchRequests([], [], draws, False, own, (0, count), info, table)

    def adjustments(self) -> Adjustments:
        return self.requests.changes()

    def count(self, tokens: torch.Tensor, lengths: torch.Tensor) -> None:
        self.request_state.count(self.requests, tokens, lengths)


def penalised(logits: torch.Tensor, generated: torch.Tensor) -> torch.Tensor:
    """``logits [N, V]`` after ``generated [N, n]``, written down from the formulas."""
    counts = F.one_hot(generated, VOCAB).sum(1)
    x = logits - FREQUENCY * counts - PRESENCE * (counts > 0)
    scaled = torch.where(x < 0, x * REPETITION, x / REPETITION)
    return torch.where(counts > 0, scaled, x)


def p_values(tokens: torch.Tensor, model: Markov, setting: dict) -> list[float]:
    """The laws of the first two tokens and of the second two; a third depends on both before it."""
    sampling = one(**setting)

    def step(*before: int) -> torch.Tensor:
        logits = model.table[before[-1] if before else 0].unsqueeze(0)
        logits = penalised(logits, torch.tensor([before], dtype=torch.long))
        weights = weights_of(logits.unsqueeze(1), same(sampling, 1))[0, 0]
        return weights / weights.sum()

    first = step()
    pair = torch.stack([first[a] * step(a) for a in range(VOCAB)])
    second = torch.zeros(VOCAB, VOCAB)
    for a, b in itertools.product(range(VOCAB), repeat=2):
        if pair[a, b] > 0:
            second[b] += pair[a, b] * step(a, b)
    return [
        chi_square_p_value(tokens[:, 0] * VOCAB + tokens[:, 1], pair.flatten()),
        chi_square_p_value(tokens[:, 1] * VOCAB + tokens[:, 2], second.flatten()),
    ]


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("widths", [(DRAFTS + 1,), (2, 1, DRAFTS + 1)], ids=["whole", "any"])
def test_penalised_tokens_follow_the_penalised_law(setting, widths):
    """Those of requests with a seed are those of penalised target-only decoding."""
    model, sampling = Markov(3), one(**setting)

    def decoded(seeds: torch.Tensor, seeded: bool, tokens: int) -> tuple[torch.Tensor, float]:
        turns, worker = itertools.cycle(widths), Worker(len(seeds))
        return decode(model, sampling, seeds, seeded, tokens, widths=turns, penalties=worker)

    tokens, accepted = decoded(SEEDS, False, 3)
    assert accepted > 0.05
    values = p_values(tokens, model, setting)
    assert min(values) > 0.001 / len(values), values
    tokens, accepted = decoded(SEEDS[:200], True, 30)
    assert accepted > 0.1
    assert torch.equal(tokens, alone(model, sampling, SEEDS[:200], 30, penalised))
    assert not torch.equal(tokens, alone(model, sampling, SEEDS[:200], 30)), "they change nothing"
