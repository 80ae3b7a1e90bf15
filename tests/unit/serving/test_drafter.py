"""The draft head in the graph, with a dependency head: static buffers, greedy drafts, ranks."""

from __future__ import annotations

import ast
import importlib.util
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sglang_hyperdflash.draft.dependency import DependencyHead
from sglang_hyperdflash.draft.filters import Sampling
from sglang_hyperdflash.draft.propose import Draws, propose, propose_greedy
from sglang_hyperdflash.serving.batch import Block
from sglang_hyperdflash.serving.drafting import candidates as candidates_module
from sglang_hyperdflash.serving.drafting import drafter as drafter_module
from sglang_hyperdflash.serving.drafting.candidates import (
    CandidateBuffers,
    candidates_of,
    check_head,
)
from sglang_hyperdflash.serving.drafting.drafter import Drafter
from sglang_hyperdflash.serving.drafting.temperature import DraftTemperature
from sglang_hyperdflash.serving.verification import verifier as verifier_module
from sglang_hyperdflash.serving.verification.exact import weights_of
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

V, D, R, K, BLOCK, MOST = 50, 12, 4, 9, 4, 5


@pytest.fixture
def lm_head():
    torch.manual_seed(0)
    weight = torch.randn(V, D)

    def topk(hidden, _head, k):
        values, ids = (hidden @ weight.T).topk(k, dim=-1)
        return ids, values, None

    with mock.patch.object(candidates_module, "candidate_topk", topk):
        yield weight


@pytest.fixture
def head():
    torch.manual_seed(1)
    head = DependencyHead(V, D, R, "residual").requires_grad_(False)
    for parameter in head.parameters():
        parameter.copy_(torch.randn_like(parameter))
    return head


def buffers(head, most: int = MOST) -> CandidateBuffers:
    return CandidateBuffers(BLOCK, K, None, head, most, "cpu")


def replay(captured: CandidateBuffers, bs: int):
    """What a graph's replay does for a batch: the same call on other rows."""
    hidden, ids = torch.randn(bs * BLOCK, D), torch.randint(0, V, (bs * BLOCK,))
    captured(hidden, ids)
    found = candidates_of(hidden.view(bs, BLOCK, D)[:, 1:], None, K, captured.head)
    return found, ids.view(bs, BLOCK)[:, 0]


def test_greedy_drafts_come_out_of_the_graph_and_buffers_stay_where_they_are(head, lm_head):
    captured = buffers(head)
    tensors = (captured.ids, captured.scores, captured.gates, captured.greedy)
    places = [tensor.data_ptr() for tensor in tensors]
    changed = 0
    for bs in (MOST, 3, 1):
        found, anchor = replay(captured, bs)
        drafts = propose_greedy(found, anchor, head)
        assert torch.equal(captured.greedy[:bs], drafts)
        changed += int((drafts != propose_greedy(found, anchor, None)).sum())
    assert changed, "the head moved no draft: the test says nothing"
    assert [tensor.data_ptr() for tensor in tensors] == places


def test_a_sampled_round_draws_from_the_rows_of_its_own_batch(head, lm_head):
    captured = buffers(head)
    replay(captured, MOST)
    found, _ = replay(captured, 3)
    read = captured.of(3)
    for name in ("ids", "scores", "gates"):
        assert torch.equal(getattr(read, name), getattr(found, name)), name


def test_without_a_head_greedy_drafts_are_argmaxes_the_lowest_id_among_equals():
    logits = torch.randn(6, 30)
    logits[2, [4, 9]] = 9.0

    def topk(hidden, lm_head, k):
        values, ids = logits.topk(k, dim=-1)
        if ids[2, 0] == 4:  # the other order of the tie
            ids[2, :2] = ids[2, :2].flip(0)
        return ids, values, None

    captured = CandidateBuffers(4, 8, None, None, 5, "cpu")
    with mock.patch.object(candidates_module, "candidate_topk", topk):
        captured(torch.zeros(8, 16), torch.zeros(8, dtype=torch.int64))
    assert torch.equal(captured.greedy[:2].flatten(), logits.argmax(-1))
    found = captured.of(2)
    assert torch.equal(logits.view(2, 3, 30).gather(2, found.ids), found.scores)
    assert found.scores.shape == (2, 3, 8) and found.gates is None


def test_a_rank_of_many_drafts_what_one_rank_does(head, lm_head):
    """Each rank has half of the LM head and the whole tables; candidates are gathered."""
    hidden, ids = torch.randn(3 * BLOCK, D), torch.randint(0, V, (3 * BLOCK,))
    whole = buffers(head, 3)
    whole(hidden, ids)

    def sharded(rows, _head, k):
        parts = [(rows @ lm_head[half].T).topk(k, dim=-1) for half in (slice(0, 30), slice(30, V))]
        values = torch.cat([part.values for part in parts], -1)
        found = torch.cat([parts[0].indices, parts[1].indices + 30], -1)
        values, chosen = values.topk(k, dim=-1)
        return found.gather(-1, chosen), values, None

    with mock.patch.object(candidates_module, "candidate_topk", sharded):
        rank = buffers(head, 3)
        rank(hidden, ids)
    assert torch.equal(rank.greedy, whole.greedy)
    assert torch.equal(rank.ids, whole.ids)


class Ranks:
    """Rank 0's values on every rank; stands for ``SpecTpSync`` of ranks that run in turn."""

    def __init__(self) -> None:
        self.sent: torch.Tensor | None = None

    def sync(self, _site, values: torch.Tensor) -> torch.Tensor:
        assert values.is_contiguous()  # or NCCL refuses it
        if self.sent is None:
            self.sent = values.clone()
        return values.copy_(self.sent)


def drafter_of(head, ranks: Ranks | None = None) -> Drafter:
    """A drafter after its pass, without a server."""
    found = object.__new__(Drafter)
    found.worker = SimpleNamespace(_tp_sync=ranks or Ranks(), draft_parallel_layout=None)
    found.head, found.candidates, found.lm_head = head, K, None
    found.draft_temperature = DraftTemperature("cpu")
    return found


def block_of(anchors: torch.Tensor) -> Block:
    tokens = torch.cat([anchors.unsqueeze(1), torch.ones(len(anchors), BLOCK - 1).long()], 1)
    positions = 19 + torch.arange(len(anchors)).unsqueeze(1) + torch.arange(BLOCK)
    return Block(tokens, positions, None, None)


def rows_of(bs: int, greedy: bool) -> SimpleNamespace:
    ones, draws = torch.ones(bs), Draws(torch.arange(bs) + 7, torch.ones(bs).bool())
    return SimpleNamespace(
        argmax_only=greedy,
        changes=lambda: None,
        sampling=Sampling(ones, torch.full((bs,), 1 << 30), ones, torch.zeros(bs)),
        draws=draws,
    )


def drafted(drafter: Drafter, block: Block, rows, hidden=None, captured=None) -> Block:
    """The served function, with what its pass gives: hidden rows, or a graph's buffers."""
    output = SimpleNamespace(hidden_states=hidden)
    out = SimpleNamespace(can_run_graph=captured is not None, logits_output=output)
    lane = SimpleNamespace(candidates=captured)
    with (
        mock.patch.object(Drafter, "_forward", lambda *inputs: out),
        mock.patch.object(drafter_module, "draft_tp_context", lambda layout: nullcontext()),
    ):
        return drafter.draft(None, block, None, rows, lane)


@pytest.mark.parametrize("greedy", [True, False])
def test_eager_rounds_draft_through_the_head(head, lm_head, greedy):
    """Where no graph is: on a CPU, and for batches larger than any captured one."""
    anchors, hidden = torch.tensor([3, 9]), torch.randn(2 * BLOCK, D)
    block, rows = block_of(anchors), rows_of(2, greedy)
    found = drafted(drafter_of(head), block, rows, hidden)
    candidates = candidates_of(hidden.view(2, BLOCK, D)[:, 1:], None, K, head)
    if greedy:
        expected = propose_greedy(candidates, anchors, head)
        assert found.proposal is None
    else:
        requests, ones = (rows.sampling, rows.draws), torch.ones(2)
        expected = propose(candidates, head, block.tokens, block.positions, *requests, ones).tokens
        assert torch.equal(found.proposal.tokens, expected)
    assert torch.equal(found.tokens[:, 1:], expected)
    assert torch.equal(found.anchors, anchors)
    # A graph's buffers give the same.
    captured = buffers(head, 2)
    captured(hidden, block.tokens.flatten())
    again = drafted(drafter_of(head), block, rows, captured=captured)
    assert torch.equal(again.tokens, found.tokens)


@pytest.mark.parametrize("greedy", [True, False])
def test_ranks_that_sum_differently_verify_the_same_block(head, lm_head, greedy):
    """Last bits of a gate, or of what is learnt from them, may differ; drafted tokens may not."""
    anchors, hidden = torch.tensor([3, 9]), torch.randn(2 * BLOCK, D)
    block, rows = block_of(anchors), rows_of(2, greedy)
    ranks, found, alone = Ranks(), [], []
    for change in (1.0, -1.0):
        own = change * hidden
        found.append(drafted(drafter_of(head, ranks), block, rows, own).tokens)
        alone.append(drafted(drafter_of(head), block, rows, own).tokens)
    assert torch.equal(*found) and not torch.equal(*alone)


def test_filters_on_cuda_do_not_depend_on_the_order_of_thread_blocks(monkeypatch):
    """FlashInfer's default adds in the order of arrival: ranks and runs would differ."""
    from sglang.kernels.ops.sampling import renorm

    asked = []

    def kernel(probs, limit, is_deterministic=False):
        asked.append(is_deterministic)
        return probs.clone()

    for name in ("top_k_renorm_prob", "top_p_renorm_prob"):
        monkeypatch.setattr(renorm, name, kernel)
    monkeypatch.setattr(verifier_module, "is_cuda", lambda: True)
    ones = torch.ones(2)
    sampling = Sampling(ones, torch.full((2,), 3), 0.5 * ones, torch.zeros(2), True, True)
    weights_of(torch.randn(2, 3, V), sampling, verifier_module.renorm_kernels())
    assert asked == [True, True]
    monkeypatch.undo()
    assert verifier_module.renorm_kernels() is None


def test_flashinfer_has_deterministic_filters():
    """Read, not imported: the package takes half a minute."""
    path = Path(importlib.util.find_spec("flashinfer").origin).with_name("sampling.py")
    functions = {
        node.name: [argument.arg for argument in node.args.args]
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    for name in ("top_k_renorm_probs", "top_p_renorm_probs"):
        assert functions[name][2] == "is_deterministic"


def test_an_lm_head_without_enough_candidates_is_refused():
    def lm_head(dtype=torch.bfloat16, **changes):
        part = SimpleNamespace(num_org_elements=100)
        return SimpleNamespace(
            **{"weight": torch.empty(1, dtype=dtype), "shard_indices": part} | changes
        )

    check_head(lm_head(), 100)
    with pytest.raises(HyperDFlashConfigError, match=r"scores 101 candidates.*has 100 tokens"):
        check_head(lm_head(), 101)
    for other in (lm_head(torch.uint8), lm_head(weight=None), lm_head(shard_indices=None), None):
        with pytest.raises(HyperDFlashConfigError, match="expected a target whose LM head"):
            check_head(other, 1)
