"""Losses against eager one-number-at-a-time references, value and gradient."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_hyperdflash.training.losses import cross_entropy, kl_distillation, position_weights


def log_softmax(row):
    top = max(row)
    total = math.log(sum(math.exp(v - top) for v in row)) + top
    return [v - total for v in row]


def test_position_weights_are_eq_w_k():
    expected = [math.exp(-(k - 1) / 4.0) for k in range(1, 7)]
    torch.testing.assert_close(position_weights(6, 4.0), torch.tensor(expected))
    assert position_weights(6, None).tolist() == [1.0] * 6


def test_cross_entropy_value():
    logits, labels = torch.randn(5, 7), torch.tensor([0, 6, 3, 3, 1])
    weights = torch.rand(5)
    numerator, denominator = cross_entropy(logits, labels, weights)
    expected = sum(
        -log_softmax(logits[i].tolist())[int(labels[i])] * float(weights[i]) for i in range(5)
    )
    assert float(numerator) == pytest.approx(expected, rel=1e-5)
    assert float(denominator) == pytest.approx(float(weights.sum()))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_kl_value_and_gradient(temperature):
    """Eq. 2, with the closed-form gradient T/P * (q - p) of each row's student logits."""
    student = torch.randn(6, 9, requires_grad=True)
    teacher = torch.randn(6, 9)
    blocks, positions = 4, 2
    numerator, denominator = kl_distillation(student, teacher, blocks, temperature, positions)
    expected = 0.0
    for s, t in zip(student.tolist(), teacher.tolist(), strict=True):
        log_q = log_softmax([v / temperature for v in s])
        log_p = log_softmax([v / temperature for v in t])
        expected += sum(math.exp(p) * (p - q) for p, q in zip(log_p, log_q, strict=True))
    expected *= temperature**2 / positions
    assert float(numerator) == pytest.approx(expected, rel=1e-4)
    assert float(denominator) == blocks
    numerator.backward()
    gap = (student / temperature).softmax(-1) - (teacher / temperature).softmax(-1)
    torch.testing.assert_close(student.grad, (temperature / positions * gap).detach())


def test_kl_of_equal_distributions_is_zero():
    logits = torch.randn(3, 5)
    numerator, _ = kl_distillation(logits, logits + 3.0, 3, 1.0, 2)
    assert float(numerator) == pytest.approx(0.0, abs=1e-5)
