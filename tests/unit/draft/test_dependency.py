"""The dependency head: its formula, its start, its place in propose."""

import pytest
import torch

from sglang_hyperdflash.draft.dependency import DependencyHead
from sglang_hyperdflash.draft.filters import Sampling
from sglang_hyperdflash.draft.propose import Candidates, Draws, propose, propose_greedy

V, D, R, K = 40, 12, 5, 9


def trained(form: str = "residual") -> DependencyHead:
    torch.manual_seed(1)
    head = DependencyHead(V, D, R, form).requires_grad_(False)
    for parameter in head.parameters():
        parameter.normal_()
    return head


def candidates(head: DependencyHead) -> Candidates:
    scores, ids = torch.randn(6, 4, V).topk(K)
    return Candidates(ids, scores, head.gates(torch.randn(6, 4, D)))


@pytest.mark.parametrize("form", ["residual", "product"])
def test_scores_are_those_of_the_formula(form):
    head, hidden, previous = trained(form), torch.randn(3, D), torch.tensor([7, 0, 39])
    whole = head.over_vocabulary(previous, hidden)
    gates = hidden @ head.gate.weight.T + (form == "residual")
    expected = (head.predecessor[previous] * gates) @ head.successor.T
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-5)
    # Some candidates, and all in whatever order.
    permuted = torch.stack([torch.randperm(V) for _ in range(3)])
    for ids in (torch.randint(0, V, (3, K)), permuted):
        scores = head(previous, head.gates(hidden), ids)
        torch.testing.assert_close(scores, whole.gather(1, ids))


@pytest.mark.parametrize("form", ["residual", "product"])
def test_a_new_head_adds_nothing_and_can_learn(form):
    head = DependencyHead(V, D, R, form)
    scores = head.over_vocabulary(torch.arange(8), torch.randn(8, D))
    assert scores.abs().max() == 0 and 0.01 < head.predecessor.std() < 0.03
    scores[:, 3].sum().backward()
    assert head.successor.grad.abs().sum() > 0


def test_greedy_and_sampled_requests_of_a_batch_draft_as_they_would_alone():
    head, anchor, ones = trained(), torch.arange(6), torch.ones(6)
    some = candidates(head)
    top_ks = torch.tensor([1, 1 << 30, 1, 5, 1, 1 << 30])
    positions = torch.arange(5).repeat(6, 1) + 30

    def drafted(rows: slice):
        given = Candidates(some.ids[rows], some.scores[rows], some.gates[rows])
        sampling = Sampling(ones[rows], top_ks[rows], ones[rows], 0 * ones[rows], need_top_k=True)
        draws = Draws((torch.arange(6) + 100)[rows], (torch.arange(6) % 2 == 1)[rows])
        block = anchor[rows].unsqueeze(1)
        return propose(given, head, block, positions[rows], sampling, draws, 1.0)

    mixed, greedy = drafted(slice(None)), top_ks == 1
    assert torch.equal(mixed.tokens[greedy], propose_greedy(some, anchor, head)[greedy])
    assert torch.equal(mixed.q[greedy].amax(-1), torch.ones(3, 4))
    torch.testing.assert_close(mixed.q.sum(-1), torch.ones(6, 4))
    alone = drafted(slice(1, 2))
    assert torch.equal(alone.tokens[0], mixed.tokens[1])
    # Every draft is drawn from its own distribution: the head has seen the draft before it.
    extra = head(alone.tokens[:, 0], some.gates[1:2, 1], some.ids[1:2, 1])[0]
    torch.testing.assert_close(alone.q[0, 1], (some.scores[1, 1] + extra).softmax(-1))
