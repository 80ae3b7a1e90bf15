"""Products with the LM head inside and outside autocast."""

from __future__ import annotations

import pytest
import torch

from sglang_hyperdflash.training.vocabulary import bf16_products, vocabulary_logits


@pytest.fixture
def product_of_a_gpu(monkeypatch):
    """``torch.mm`` to fp32, which a CPU lacks: bf16 operands, fp32 sums."""
    plain = torch.mm

    def mm(a, b, *, out_dtype):
        assert a.dtype == b.dtype == torch.bfloat16 and out_dtype == torch.float32
        with torch.autocast("cpu", enabled=False):
            return plain(a.float(), b.float())

    monkeypatch.setattr(torch, "mm", mm)


def pair(*shape: int):
    torch.manual_seed(0)
    head = torch.nn.Linear(64, 300, bias=False).requires_grad_(False)
    with torch.no_grad():
        head.weight.normal_()
    return head, torch.randn(*shape, 64, requires_grad=True)


def test_a_cpu_and_fp32_stay_exact():
    head, states = pair(2, 5)
    with bf16_products(torch.device("cpu"), True):
        found = vocabulary_logits(head, states)
    assert torch.equal(found, head(states))
    half = torch.nn.Linear(64, 300, bias=False, dtype=torch.bfloat16)
    assert torch.equal(vocabulary_logits(half, states), states @ half.weight.float().T)


def test_logits_and_gradient_are_bf16_products_without_another_rounding(product_of_a_gpu):
    head, states = pair(2, 5)
    gradient = torch.randn(2, 5, 300)
    with torch.autocast("cpu", torch.bfloat16):
        found = vocabulary_logits(head, states)
    found.backward(gradient)
    rounded = states.detach().bfloat16().float()
    weight = head.weight.bfloat16().float()
    torch.testing.assert_close(found, rounded @ weight.T)
    assert found.dtype == torch.float32 and (found.bfloat16() != found).float().mean() > 0.9
    torch.testing.assert_close(states.grad, gradient.bfloat16().float() @ weight)


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_no_rows_have_no_logits(product_of_a_gpu, shape):
    head, states = pair(*shape)
    with torch.autocast("cpu", torch.bfloat16):
        found = vocabulary_logits(head, states)
    assert found.shape == (*shape, 300)
    found.sum().backward()
    assert states.grad.shape == states.shape
