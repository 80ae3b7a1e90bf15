"""Verification alone: exact distributions over a million draws, against plain-Python references."""

from __future__ import annotations

import pytest
import torch

from cpu_engine.rivals.eagle_ops import accept_sampled, draw
from tests.target_probabilities import target_probabilities
from tests.unit.statistics_help import chi_square_p_value

VOCAB, BLOCK = 12, 4
PARAMETERS = {
    "temperature 1": {},
    "temperature 0.6": {"temperature": 0.6},
    "top-k 5": {"top_k": 5},
    "top-p 0.8": {"top_p": 0.8},
    "min-p 0.1": {"min_p": 0.1},
    "all of them": {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
}


def python_distribution(logits, temperature=1.0, top_k=None, top_p=None, min_p=None):
    """SGLang's joint top-k, top-p and min-p, one token at a time."""
    scaled = torch.tensor(logits, dtype=torch.float64) / temperature
    probs = scaled.softmax(0).tolist()
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    kept, before = {}, 0.0
    for rank, token in enumerate(order):
        if (
            (top_k is None or rank < top_k)
            and (top_p is None or before <= top_p)
            and (min_p is None or probs[token] >= min_p * probs[order[0]])
        ):
            kept[token] = probs[token]
        before += probs[token]
    total = sum(kept.values())
    return [kept.get(token, 0.0) / total for token in range(len(probs))]


def as_rows(value, rows):
    return None if value is None else torch.full((rows,), value)


def probabilities(logits, parameters):
    rows = len(logits)
    return target_probabilities(
        logits,
        torch.full((rows,), parameters.get("temperature", 1.0)),
        as_rows(parameters.get("top_k"), rows),
        as_rows(parameters.get("top_p"), rows),
        as_rows(parameters.get("min_p"), rows),
    )


@pytest.mark.parametrize("name", PARAMETERS)
def test_target_probabilities_match_the_python_loop(name):
    logits = torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    found = probabilities(logits, PARAMETERS[name])
    expected = [python_distribution(row.tolist(), **PARAMETERS[name]) for row in logits]
    torch.testing.assert_close(found.double(), torch.tensor(expected).double(), atol=1e-6, rtol=0)


def test_top_p_after_top_k_is_a_share_of_the_kept_mass():
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    arguments = (logits, torch.ones(1), torch.tensor([2]), torch.tensor([0.5]))
    joint = target_probabilities(*arguments)
    sequential = target_probabilities(*arguments, top_p_after_top_k=True)
    torch.testing.assert_close(joint, torch.tensor([[4 / 7, 3 / 7, 0, 0]]))
    torch.testing.assert_close(sequential, torch.tensor([[1.0, 0, 0, 0]]))


def test_sorting_only_the_leading_columns_changes_nothing():
    logits = torch.randn(30, VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    top_ks, top_ps = torch.arange(1, 31).clamp(max=5), torch.full((30,), 0.9)
    arguments = (logits, torch.ones(30), top_ks, top_ps, torch.full((30,), 0.02))
    torch.testing.assert_close(
        target_probabilities(*arguments, max_top_k=5), target_probabilities(*arguments)
    )


def test_a_greedy_row_in_a_mixed_batch_is_its_argmax():
    logits = torch.randn(2, VOCAB)
    probs = target_probabilities(logits, torch.ones(2), torch.tensor([1, 1 << 30]))
    assert probs[0, logits[0].argmax()] == 1.0
    torch.testing.assert_close(probs[1], logits[1].softmax(-1))


def emitted(accept, candidates, probs, rounds, generator):
    """Run ``rounds`` verifications of one chain; return the emitted blocks ``[rounds, B]``."""
    block = candidates.numel()
    chains = candidates.expand(rounds, block)
    coins = torch.rand(rounds, block - 1, generator=generator)
    length, bonus = accept(
        chains,
        probs.expand(rounds, *probs.shape),
        coins,
        torch.rand(rounds, generator=generator),
    )
    out = torch.full((rounds, block), -1)
    for k in range(block):
        drafted = chains[:, min(k + 1, block - 1)]
        out[:, k] = torch.where(length > k, drafted, torch.where(length == k, bonus, -1))
    return out


def argmax_accept(candidates, probs, coins, bonus_coins):
    """What SGLang does without its CUDA kernel: greedy verification of a sampled request."""
    predicted = probs.argmax(-1)
    length = (candidates[:, 1:] == predicted[:, :-1]).int().cumprod(1).sum(1)
    return length, predicted.gather(1, length.long().unsqueeze(1)).squeeze(1)


def law_p_values(accept, parameters, rounds, seed):
    """p-values of the first token's law and of the second's given an accepted first draft."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(BLOCK, VOCAB, generator=generator) * 1.5
    probs = probabilities(logits, parameters)
    # Likely drafts, so that every length up to a full block occurs often.
    candidates = torch.cat([torch.tensor([0]), probs[:-1].argmax(-1)])
    blocks = emitted(accept, candidates, probs, rounds, generator)
    values = [chi_square_p_value(blocks[:, 0], probs[0])]
    for k in range(1, BLOCK):
        reached = (blocks[:, :k] == candidates[1 : k + 1]).all(1)
        values.append(chi_square_p_value(blocks[reached, k], probs[k]))
    return values


def test_a_million_verifications_follow_the_targets_distribution():
    rounds = 1_000_000 // len(PARAMETERS)
    values = [
        value
        for i, parameters in enumerate(PARAMETERS.values())
        for value in law_p_values(accept_sampled, parameters, rounds, seed=i)
    ]
    assert min(values) > 0.001 / len(values), values


def test_argmax_verification_fails_the_same_test():
    values = law_p_values(argmax_accept, PARAMETERS["temperature 1"], 20_000, seed=0)
    assert min(values) < 1e-12


def test_an_impossible_draft_is_never_accepted_even_with_a_zero_coin():
    probs = torch.zeros(1, 2, 3)
    probs[:, :, 1] = 1.0
    length, bonus = accept_sampled(torch.tensor([[0, 2]]), probs, torch.zeros(1, 1), torch.zeros(1))
    assert length.tolist() == [0]
    assert bonus.tolist() == [1]


def test_a_certain_draft_is_always_accepted():
    probs = torch.zeros(1, 2, 3)
    probs[0, 0, 2] = 1.0
    probs[0, 1, 1] = 1.0
    coin = torch.tensor([[1.0 - 2**-24]])
    length, bonus = accept_sampled(torch.tensor([[0, 2]]), probs, coin, torch.zeros(1))
    assert (length.tolist(), bonus.tolist()) == ([1], [1])


def test_broken_rows_never_raise():
    weights = torch.tensor([[float("nan"), 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    found = draw(weights, torch.tensor([0.5, 0.5, 1.0]))
    assert found.tolist() == [1, 0, 1]
