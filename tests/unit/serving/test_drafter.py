"""The draft head in the graph, with a dependency head: static buffers, greedy drafts, ranks."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sglang_hyperdflash.draft.dependency import DependencyHead
from sglang_hyperdflash.draft.filters import Sampling
from sglang_hyperdflash.draft.propose import Draws, propose, propose_greedy
from sglang_hyperdflash.serving.batch import Block
from sglang_hyperdflash.serving.drafting import candidates as candidates_module
from sglang_hyperdflash.serving.drafting import draft_step as draft_step_module
from sglang_hyperdflash.serving.drafting.candidates import CandidateBuffers, candidates_of
from sglang_hyperdflash.serving.drafting.draft_step import DraftStep
from sglang_hyperdflash.serving.verification import verifier as verifier_module
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

V, D, R, K, BLOCK, MOST = 50, 12, 4, 9, 4, 5
WEIGHT = torch.randn(V, D, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def lm_head(monkeypatch):
    def topk(hidden, _head, k):
        scores, ids = (hidden @ WEIGHT.T).topk(k, dim=-1)
        return ids, scores, None

    monkeypatch.setattr(candidates_module, "candidate_topk", topk)


@pytest.fixture
def head():
    torch.manual_seed(1)
    head = DependencyHead(V, D, R, "residual").requires_grad_(False)
    for parameter in head.parameters():
        parameter.copy_(torch.randn_like(parameter))
    return head


@pytest.mark.parametrize("headless", [False, True])
def test_drafts_come_out_of_the_graph_and_buffers_stay_where_they_are(head, headless):
    """A replay is the same call on other rows, of fewer requests maybe."""
    used = None if headless else head
    captured, changed = CandidateBuffers(BLOCK, K, None, used, MOST, "cpu"), 0
    tensors = [value for value in vars(captured).values() if isinstance(value, torch.Tensor)]
    before = [tensor.data_ptr() for tensor in tensors]
    for bs in (MOST, 3, 1):
        hidden, ids = torch.randn(bs * BLOCK, D), torch.randint(0, V, (bs * BLOCK,))
        captured(hidden, ids)
        rows = hidden.view(bs, BLOCK, D)[:, 1:]
        expected = candidates_of(rows, None, K, used)
        drafts = propose_greedy(expected, ids.view(bs, BLOCK)[:, 0], used)
        assert torch.equal(captured.greedy[:bs], drafts)
        changed += int((drafts != (rows @ WEIGHT.T).argmax(-1)).sum())
        for name in ("ids", "scores") if headless else ("ids", "scores", "gates"):
            # What a sampled round draws from.
            assert torch.equal(getattr(captured.of(bs), name), getattr(expected, name)), name
    assert (changed == 0) == headless, "the head moved no draft: the test says nothing"
    tensors = [value for value in vars(captured).values() if isinstance(value, torch.Tensor)]
    assert [tensor.data_ptr() for tensor in tensors] == before


class Ranks:
    """Rank 0's values on every rank; stands for ``SpecTpSync`` of ranks that run in turn."""

    def __init__(self) -> None:
        self.sent: torch.Tensor | None = None

    def sync(self, _site, values: torch.Tensor) -> torch.Tensor:
        assert values.is_contiguous()  # or NCCL refuses it
        if self.sent is None:
            self.sent = values.clone()
        return values.copy_(self.sent)


def drafted(head, rows, hidden=None, captured=None, ranks: Ranks | None = None) -> Block:
    """Two requests' block by the served function; a pass gives hidden rows or buffers."""
    drafter = object.__new__(DraftStep)
    drafter.runners = SimpleNamespace(tp_sync=ranks or Ranks(), draft_layout=None)
    drafter.head, drafter.candidates, drafter.lm_head = head, K, None
    drafter.draft_temperature = 1.0
    output = SimpleNamespace(hidden_states=hidden)
    out = SimpleNamespace(can_run_graph=captured is not None, logits_output=output)
    with (
        mock.patch.object(DraftStep, "_forward", lambda *inputs: out),
        mock.patch.object(draft_step_module, "draft_tp_context", lambda layout: nullcontext()),
    ):
        return drafter.draft(None, BLOCKS, None, rows, SimpleNamespace(draft_buffers=captured))


ANCHORS = torch.tensor([3, 9])
TOKENS = torch.cat([ANCHORS.unsqueeze(1), torch.ones(2, BLOCK - 1).long()], 1)
BLOCKS = Block(TOKENS, 19 + torch.arange(2).unsqueeze(1) + torch.arange(BLOCK), None, None)


def rows_of(greedy: bool) -> SimpleNamespace:
    ones, draws = torch.ones(2), Draws(torch.arange(2) + 7, torch.ones(2).bool())
    sampling = Sampling(ones, torch.full((2,), 1 << 30), ones, torch.zeros(2))
    return SimpleNamespace(argmax_only=greedy, changes=lambda: None, sampling=sampling, draws=draws)


@pytest.mark.parametrize("greedy", [True, False])
def test_eager_rounds_draft_through_the_head_as_graphs_do(head, greedy):
    """Where no graph is: on a CPU, and for batches larger than any captured one."""
    hidden, rows = torch.randn(2 * BLOCK, D), rows_of(greedy)
    found = drafted(head, rows, hidden)
    candidates = candidates_of(hidden.view(2, BLOCK, D)[:, 1:], None, K, head)
    if greedy:
        expected = propose_greedy(candidates, ANCHORS, head)
        assert found.proposal is None
    else:
        requests = rows.sampling, rows.draws, 1.0
        expected = propose(candidates, head, TOKENS, BLOCKS.positions, *requests).tokens
        assert torch.equal(found.proposal.tokens, expected)
    assert torch.equal(found.tokens[:, 1:], expected) and torch.equal(found.anchors, ANCHORS)
    captured = CandidateBuffers(BLOCK, K, None, head, 2, "cpu")
    captured(hidden, TOKENS.flatten())
    assert torch.equal(drafted(head, rows, captured=captured).tokens, found.tokens)


@pytest.mark.parametrize("greedy", [True, False])
def test_ranks_that_sum_differently_verify_the_same_block(head, greedy):
    """Last bits of a gate, or of what is learnt from them, may differ; drafted tokens may not."""
    hidden, rows, ranks = torch.randn(2 * BLOCK, D), rows_of(greedy), Ranks()
    together = [drafted(head, rows, h, ranks=ranks).tokens for h in (hidden, -hidden)]
    alone = [drafted(head, rows, h).tokens for h in (hidden, -hidden)]
    assert torch.equal(*together) and not torch.equal(*alone)


def test_filters_on_cuda_do_not_depend_on_the_order_of_thread_blocks(monkeypatch):
    """FlashInfer's default adds in the order of arrival: ranks and runs would differ."""
    from sglang.kernels.ops.sampling import renorm

    for name in ("top_k_renorm_prob", "top_p_renorm_prob"):
        monkeypatch.setattr(renorm, name, print)  # None without a GPU
    monkeypatch.setattr(verifier_module, "is_cuda", lambda: True)
    kernels = verifier_module.renorm_kernels()
    assert [kernel.keywords for kernel in kernels] == [{"is_deterministic": True}] * 2


def test_an_lm_head_without_enough_candidates_is_refused():
    def lm_head(dtype=torch.bfloat16, **changes):
        part = SimpleNamespace(num_org_elements=100)
        weight = torch.empty(1, dtype=dtype)
        return SimpleNamespace(**{"weight": weight, "shard_indices": part} | changes)

    candidates_module.check_head(lm_head(), 100)
    others = lm_head(torch.uint8), lm_head(weight=None), lm_head(shard_indices=None), None
    for head, candidates in ((lm_head(), 101), *((other, 1) for other in others)):
        with pytest.raises(HyperDFlashConfigError):
            candidates_module.check_head(head, candidates)
