"""Losses of rows and products with the LM head, value and gradient, against the formulas."""

from __future__ import annotations

import pytest
import torch

from sglang_hyperdflash.draft.dependency import DependencyHead
from sglang_hyperdflash.training.losses import row_losses
from sglang_hyperdflash.training.vocabulary import bf16_products, vocabulary_logits

V, D, R, N = 13, 6, 4, 11


class Inputs:
    """Draft states, labels, teachers and heads of which nothing is zero."""

    def __init__(self, rows: int, form: str | None, early: bool) -> None:
        torch.manual_seed(3)
        self.head = torch.nn.Linear(D, V, bias=False).requires_grad_(False)
        self.dependency = form and DependencyHead(V, D, R, form)
        for parameter in self.dependency.parameters() if form else ():
            parameter.data.normal_()
        self.hidden = torch.randn(N, D)[:rows].requires_grad_()
        self.labels, self.previous = torch.randint(0, V, (2, N))[:, :rows]
        likeliest = self.head(self.hidden).topk(3).indices
        for i in range(0, rows, 2):  # some labels are among a selector's candidates
            self.labels[i] = likeliest[i, i % 3]
        self.early = (torch.rand(N) < 0.7)[:rows] if early else torch.zeros(rows).bool()
        self.teacher = torch.randn(N, D)[: int(self.early.sum())]
        self.weights = torch.rand(4, N)[:, :rows]

    def gradients(self, *losses: torch.Tensor) -> list[torch.Tensor]:
        """Of a sum with other weights for every row and loss."""
        heads = list(self.dependency.parameters()) if self.dependency else []
        total = sum((w[: len(x)] * x).sum() for w, x in zip(self.weights, losses, strict=False))
        return torch.autograd.grad(total, [self.hidden, *heads], allow_unused=True)


def one_row(each: Inputs, i: int, teacher, term: str, temperature: float, top_k: int):
    """CE, distance or None, hit and CE of u of a row, by the definitions."""
    h, label = each.hidden[i], int(each.labels[i])
    u = s = torch.stack([(h * row).sum() for row in each.head.weight])
    if each.dependency:
        a, b = each.dependency.predecessor[each.previous[i]], each.dependency.successor
        gate = each.dependency.gate.weight @ h + (each.dependency.form == "residual")
        s = u + torch.stack([(a * gate * row).sum() for row in b])
    own = torch.logsumexp(u, 0) - u[label]
    if term == "selector":
        ids = u.topk(top_k).indices.tolist()
        extra = torch.logsumexp(s[ids], 0) - s[label] if label in ids else 0.0
        return own + extra, None, ids[int(s[ids].argmax())] == label, None
    distance = None
    if teacher is not None:
        p = ((each.head.weight @ teacher) / temperature).softmax(0)
        q = (s / temperature).softmax(0)
        distance = ((p - q).abs() if term == "tv" else p * (p / q).log()).sum()
    return torch.logsumexp(s, 0) - s[label], distance, int(s.argmax()) == label, own


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize(
    ("term", "form", "temperature"),
    [
        ("kl", None, 1.0),
        ("kl", None, 2.0),
        ("kl", "residual", 1.0),
        ("tv", "residual", 1.0),
        ("selector", "product", 1.0),
    ],
)
def test_losses_and_gradients_are_those_of_the_formulas(term, form, temperature, chunk):
    each, sizes = Inputs(N, form, early=term != "selector"), []

    def head(states):
        sizes.append(len(states))
        return each.head(states)

    options = {"early": each.early, "teacher": each.teacher, "temperature": temperature}
    options |= {"chunk": chunk, "term": term, "dependency": each.dependency}
    options |= {"previous": each.previous if form else None, "top_k": 3, "own": True}
    ce, distance, hits, own = row_losses(each.hidden, each.labels, head, **options)
    forward = len(sizes)
    teachers = iter(each.teacher)
    every = [
        one_row(each, i, next(teachers) if each.early[i] else None, term, temperature, 3)
        for i in range(N)
    ]
    columns = [[row[k] for row in every if row[k] is not None] for k in (0, 1, 3)]
    expected = [torch.stack(column) for column in columns if column]
    assert hits.tolist() == [row[2] for row in every]
    if term == "selector":
        assert len(distance) == len(own) == 0
    losses = (ce, distance, own)[: len(expected)]
    for found, wanted in zip(losses, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    gradients = each.gradients(*losses), each.gradients(*expected)
    for found, wanted in zip(*gradients, strict=True):
        assert found.abs().sum() > 0
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert max(sizes) <= chunk and len(sizes) > forward  # logits are computed again, not kept


def test_no_rows_have_no_loss():
    each = Inputs(0, None, early=True)
    options = {"early": each.early, "teacher": each.teacher, "temperature": 1.0}
    assert [len(x) for x in row_losses(each.hidden, each.labels, each.head, **options)] == [0] * 4


# --- products with the LM head


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


@pytest.mark.parametrize("shape", [(2, 5), (0,), (2, 0)])
def test_logits_and_gradient_are_bf16_products_without_another_rounding(product_of_a_gpu, shape):
    head, states = pair(*shape)
    gradient = torch.randn(*shape, 300)
    with torch.autocast("cpu", torch.bfloat16):
        found = vocabulary_logits(head, states)
    found.backward(gradient)
    rounded = states.detach().bfloat16().float()
    weight = head.weight.bfloat16().float()
    torch.testing.assert_close(found, rounded @ weight.T)
    assert found.dtype == torch.float32
    assert (found.bfloat16() != found).sum() >= 0.9 * found.numel()
    torch.testing.assert_close(states.grad, gradient.bfloat16().float() @ weight)
