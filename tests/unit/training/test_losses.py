"""Rows of logits: hits, memory, and products with the LM head."""

import pytest
import torch

from sglang_hyperdflash.draft.dependency import DependencyHead
from sglang_hyperdflash.training.losses import row_losses
from sglang_hyperdflash.training.vocabulary import bf16_products, vocabulary_logits


@pytest.mark.parametrize(("term", "form"), [("kl", "residual"), ("selector", "product")])
def test_hits_are_of_the_dependency_head_and_logits_live_for_one_chunk(term, form):
    """Values and gradients are compared in ``test_trainer.py``."""
    torch.manual_seed(3)
    table, dependency = torch.nn.Linear(6, 13, bias=False), DependencyHead(13, 6, 4, form)
    for parameter in dependency.parameters():
        parameter.data.normal_()
    hidden, sizes = torch.randn(11, 6, requires_grad=True), []
    labels, previous = torch.randint(0, 13, (2, 11))
    u = table(hidden)
    s = u + dependency.over_vocabulary(previous, hidden)
    if term == "selector":
        s = s.masked_fill(u < u.topk(3).values[:, -1:], -torch.inf)
    assert (s.argmax(-1) != u.argmax(-1)).any()
    labels[:6] = s[:6].argmax(-1)

    def head(states):
        sizes.append(len(states))
        return table(states)

    options = {"early": torch.ones(11).bool(), "teacher": torch.randn(11, 6), "temperature": 1.0}
    options |= {"term": term, "dependency": dependency, "previous": previous, "top_k": 3}
    for rows in (11, 0):
        few = {name: x[:rows] for name, x in options.items() if isinstance(x, torch.Tensor)}
        losses = row_losses(hidden[:rows], labels[:rows], head, **options | few, chunk=4)
        assert losses.hits.equal((s.argmax(-1) == labels)[:rows])
        assert len(losses.ce) == rows
        forward = len(sizes)
        if rows:
            losses.ce.sum().backward()
            assert max(sizes) <= 4 and len(sizes) > forward  # computed again, not kept


def pair(*shape: int):
    torch.manual_seed(0)
    head = torch.nn.Linear(64, 300, bias=False).requires_grad_(False)
    with torch.no_grad():
        head.weight.normal_()
    return head, torch.randn(*shape, 64, requires_grad=True)


def test_a_cpu_and_fp32_stay_exact():
    head, states = pair(2, 5)
    with bf16_products(torch.device("cpu"), True):
        logits = vocabulary_logits(head, states)
    assert torch.equal(logits, head(states))
    half = torch.nn.Linear(64, 300, bias=False, dtype=torch.bfloat16)
    assert torch.equal(vocabulary_logits(half, states), states @ half.weight.float().T)


@pytest.mark.parametrize("shape", [(2, 5), (0,), (2, 0)])
def test_logits_and_gradient_are_bf16_products_without_another_rounding(monkeypatch, shape):
    plain, (head, states), gradient = torch.mm, pair(*shape), torch.randn(*shape, 300)

    def mm(a, b, *, out_dtype):
        """To fp32, as on a GPU: bf16 operands, fp32 sums."""
        assert a.dtype == b.dtype == torch.bfloat16 and out_dtype == torch.float32
        with torch.autocast("cpu", enabled=False):
            return plain(a.float(), b.float())

    monkeypatch.setattr(torch, "mm", mm)
    with torch.autocast("cpu", torch.bfloat16):
        logits = vocabulary_logits(head, states)
    logits.backward(gradient)
    rounded = states.detach().bfloat16().float()
    weight = head.weight.bfloat16().float()
    torch.testing.assert_close(logits, rounded @ weight.T)
    assert logits.dtype == torch.float32
    assert (logits.bfloat16() != logits).sum() >= 0.9 * logits.numel()
    torch.testing.assert_close(states.grad, gradient.bfloat16().float() @ weight)
