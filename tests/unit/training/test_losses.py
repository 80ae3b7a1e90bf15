"""Losses against eager one-number-at-a-time references, value and gradient."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from sglang_hyperdflash.training.losses import position_weights, row_losses


def log_softmax(row):
    top = max(row)
    total = math.log(sum(math.exp(v - top) for v in row)) + top
    return [v - total for v in row]


def inputs(rows=11, d=5, vocabulary=9, seed=0):
    g = torch.Generator().manual_seed(seed)
    head = torch.nn.Linear(d, vocabulary, bias=False).requires_grad_(False)
    hidden = torch.randn(rows, d, generator=g, requires_grad=True)
    labels = torch.randint(0, vocabulary, (rows,), generator=g)
    early = torch.rand(rows, generator=g) < 0.5
    return head, hidden, labels, early, torch.randn(int(early.sum()), d, generator=g)


def test_position_weights_are_w_k():
    expected = [math.exp(-(k - 1) / 4.0) for k in range(1, 7)]
    torch.testing.assert_close(position_weights(6, 4.0), torch.tensor(expected))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_rows_match_the_python_loop(temperature, chunk):
    head, hidden, labels, early, teacher = inputs()
    ce, kl, hits, _ = row_losses(
        hidden, labels, head, early=early, teacher=teacher, temperature=temperature, chunk=chunk
    )
    logits, taught = head(hidden).tolist(), head(teacher).tolist()
    for hit, row, label in zip(hits.tolist(), logits, labels.tolist(), strict=True):
        assert hit == (max(row) == row[label])
    for found, row, label in zip(ce.tolist(), logits, labels.tolist(), strict=True):
        assert found == pytest.approx(-log_softmax(row)[label], rel=1e-5)
    students = [row for row, is_early in zip(logits, early.tolist(), strict=True) if is_early]
    for found, student, target in zip(kl.tolist(), students, taught, strict=True):
        log_q = log_softmax([v / temperature for v in student])
        log_p = log_softmax([v / temperature for v in target])
        expected = sum(math.exp(p) * (p - q) for p, q in zip(log_p, log_q, strict=True))
        assert found == pytest.approx(expected, rel=1e-4)


def test_gradients_are_those_of_the_closed_forms():
    """dCE = q - onehot and dKL = (q - p) / T, times each row's weight, through the head."""
    head, hidden, labels, early, teacher = inputs()
    weights, temperature = torch.rand(len(labels)), 2.0
    ce, kl, *_ = row_losses(
        hidden, labels, head, early=early, teacher=teacher, temperature=temperature, chunk=3
    )
    ((weights * ce).sum() + 0.3 * kl.sum()).backward()
    with torch.no_grad():
        logits = head(hidden)
        gradient = logits.softmax(-1) - F.one_hot(labels, logits.shape[1])
        gradient *= weights.unsqueeze(-1)
        student = (logits[early] / temperature).softmax(-1)
        target = (head(teacher) / temperature).softmax(-1)
        gradient[early] += 0.3 / temperature * (student - target)
        expected = gradient @ head.weight
    torch.testing.assert_close(hidden.grad, expected, rtol=1e-4, atol=1e-6)


def test_no_more_than_a_chunk_of_logits_is_alive():
    head, hidden, labels, early, teacher = inputs(rows=64)
    sizes = []

    def recording(states):
        sizes.append(len(states))
        return head(states)

    ce, kl, *_ = row_losses(
        hidden, labels, recording, early=early, teacher=teacher, temperature=1.0, chunk=8
    )
    forward = len(sizes)
    (ce.sum() + kl.sum()).backward()
    assert max(sizes) == 8
    assert len(sizes) > forward, "the backward must compute the logits again, not keep them"


def test_equal_distributions_have_no_kl_and_no_rows_have_no_loss():
    head, hidden, labels, _, _ = inputs()
    every = torch.ones(len(labels), dtype=torch.bool)
    same = {"early": every, "teacher": hidden.detach(), "temperature": 1.0}
    assert row_losses(hidden, labels, head, **same)[1].abs().max() < 1e-6
    ce, kl, hits, _ = row_losses(
        hidden[:0], labels[:0], head, early=every[:0], teacher=hidden[:0], temperature=1.0
    )
    assert ce.shape == kl.shape == hits.shape == (0,)
