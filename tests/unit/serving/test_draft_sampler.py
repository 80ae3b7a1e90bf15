"""The draft head in the graph, with a dependency head: static buffers, greedy drafts, ranks."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sglang_hyperdflash.draft.dependency import DependencyHead
from sglang_hyperdflash.draft.filters import Sampling
from sglang_hyperdflash.draft.propose import Candidates, propose, propose_greedy
from sglang_hyperdflash.serving import draft_sampler, sampled_worker
from sglang_hyperdflash.serving.draft_sampler import check_candidates
from sglang_hyperdflash.serving.draft_temperature import DraftTemperature
from sglang_hyperdflash.serving.exact import Draws, weights_of
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

V, D, R, K, BLOCK, MOST = 50, 12, 4, 9, 4, 5


@pytest.fixture
def lm_head():
    torch.manual_seed(0)
    weight = torch.randn(V, D)

    def topk(hidden, _head, k):
        values, ids = (hidden @ weight.T).topk(k, dim=-1)
        return ids, values, None

    with mock.patch.object(draft_sampler, "candidate_topk", topk):
        yield weight


@pytest.fixture
def worker():
    torch.manual_seed(1)
    head = DependencyHead(V, D, R, "residual").requires_grad_(False)
    for parameter in head.parameters():
        parameter.copy_(torch.randn_like(parameter))
    worker = SimpleNamespace(
        block_size=BLOCK,
        num_candidates=K,
        device="cpu",
        dependency=head,
        batch_size=3,
        requests=SimpleNamespace(greedy=True),
        drawn=[],
    )
    worker.draw_drafts = lambda found: worker.drawn.append(found)
    worker.agree = lambda drafts: drafts
    return worker


def replay(sampler, bs: int):
    """What a graph's replay does for a batch: the same call on other rows."""
    hidden, ids = torch.randn(bs * BLOCK, D), torch.randint(0, V, (bs * BLOCK,))
    sampler(hidden, ids)
    rows = hidden.view(bs, BLOCK, D)[:, 1:].reshape(-1, D)
    anchor = ids.view(bs, BLOCK)[:, 0]
    found = draft_sampler.candidates_of(rows, BLOCK - 1, None, K, sampler.head)
    return found, anchor


def test_greedy_drafts_come_out_of_the_graph_and_buffers_stay_where_they_are(worker, lm_head):
    sampler = draft_sampler.CandidateSampler(worker, None, MOST)
    buffers = (sampler.ids, sampler.scores, sampler.gates, sampler.first)
    places = [buffer.data_ptr() for buffer in buffers]
    changed = 0
    for bs in (MOST, 3, 1):
        found, anchor = replay(sampler, bs)
        drafts = propose_greedy(found, anchor, worker.dependency)
        assert torch.equal(sampler.out[: bs * (BLOCK - 1)].view(bs, -1), drafts)
        changed += int((drafts != propose_greedy(found, anchor, None)).sum())
    assert changed, "the head moved no draft: the test says nothing"
    assert [buffer.data_ptr() for buffer in buffers] == places
    assert not worker.drawn


def test_a_sampled_round_draws_from_the_rows_of_its_own_batch(worker, lm_head):
    sampler = draft_sampler.CandidateSampler(worker, None, MOST)
    replay(sampler, MOST)
    found, _ = replay(sampler, 3)
    worker.requests.greedy = False
    assert sampler.out is None
    for name in ("ids", "scores", "gates"):
        assert torch.equal(getattr(worker.drawn[0], name), getattr(found, name)), name


def test_nothing_in_a_drafted_block_waits_for_the_device(worker, lm_head):
    """A CUDA graph, or a round in flight, allows no read by the host: torch's meta device has none.

    Tensors without data stand for the device's; what would read one raises.
    """
    found = Candidates(
        torch.zeros(3, BLOCK - 1, K, dtype=torch.int64, device="meta"),
        torch.zeros(3, BLOCK - 1, K, device="meta"),
        torch.zeros(3, BLOCK - 1, R, device="meta"),
    )
    head = worker.dependency.to("meta")
    anchor = torch.zeros(3, dtype=torch.int64, device="meta")
    assert propose_greedy(found, anchor, head).shape == (3, BLOCK - 1)
    ones = torch.ones(3, device="meta")
    for filters in (False, True):
        sampling = Sampling(ones, anchor, ones, ones, filters, filters, filters, filters)
        positions = torch.zeros(3, BLOCK - 1, dtype=torch.int64, device="meta")
        proposal = propose(found, anchor, head, sampling, anchor, positions, ones)
        assert proposal.q.shape == (3, BLOCK - 1, K)
    with pytest.raises(RuntimeError, match="meta"):
        bool(anchor.any())


def test_a_rank_of_many_drafts_what_one_rank_does(worker, lm_head):
    """Each rank has half of the LM head and the whole tables; candidates are gathered."""
    hidden, ids = torch.randn(3 * BLOCK, D), torch.randint(0, V, (3 * BLOCK,))
    whole = draft_sampler.CandidateSampler(worker, None, 3)
    whole(hidden, ids)

    def sharded(rows, _head, k):
        parts = [(rows @ lm_head[half].T).topk(k, dim=-1) for half in (slice(0, 30), slice(30, V))]
        values = torch.cat([part.values for part in parts], -1)
        found = torch.cat([parts[0].indices, parts[1].indices + 30], -1)
        values, chosen = values.topk(k, dim=-1)
        return found.gather(-1, chosen), values, None

    with mock.patch.object(draft_sampler, "candidate_topk", sharded):
        rank = draft_sampler.CandidateSampler(worker, None, 3)
        rank(hidden, ids)
    assert torch.equal(rank.out, whole.out)
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


def eager_worker(head, anchors: torch.Tensor, greedy: bool, ranks: Ranks | None = None):
    """A worker between its draft pass and its verification, without a server."""
    worker = object.__new__(sampled_worker.SampledWorker)
    bs = len(anchors)
    worker._tp_sync, worker.device = ranks or Ranks(), "cpu"
    worker.dependency, worker.num_candidates, worker.block_size = head, K, BLOCK
    worker._draft_block_ids_buf = torch.cat([anchors.unsqueeze(1), torch.ones(bs, 3).long()], 1)
    worker._contexts, worker.draft_temperature = torch.arange(bs) + 20, DraftTemperature("cpu")
    worker._block_pos_offsets = torch.arange(BLOCK)
    draws = Draws(torch.arange(bs) + 7, torch.ones(bs).bool())
    worker.requests = SimpleNamespace(
        reqs=[None] * bs,
        greedy=greedy,
        draws=draws,
        penalties=None,
        ends=None,
    )
    worker._info = SimpleNamespace(logit_bias=None)
    return worker


@pytest.mark.parametrize("greedy", [True, False])
def test_eager_rounds_draft_through_the_head(worker, lm_head, greedy):
    """Where no graph is: on a CPU, and for batches larger than any captured one."""
    head, anchors, rows = worker.dependency, torch.tensor([3, 9]), torch.randn(2 * (BLOCK - 1), D)
    eager = eager_worker(head, anchors, greedy)
    ones = torch.ones(2)
    sampling = Sampling(ones, torch.full((2,), 1 << 30), ones, torch.zeros(2))
    with (
        mock.patch.object(sampled_worker, "supports_candidates", lambda lm_head: True),
        mock.patch.object(sampled_worker, "sampling_of", lambda info: sampling),
    ):
        drafts = eager._greedy_sample_from_vocab_parallel_head(hidden_states=rows, lm_head=None)
    found = draft_sampler.candidates_of(rows, BLOCK - 1, None, K, head)
    if greedy:
        expected = propose_greedy(found, anchors, head)
    else:
        positions = (eager._contexts - 1).unsqueeze(1) + torch.arange(BLOCK - 1)
        seeds = eager.requests.draws.seeds
        expected = propose(found, anchors, head, sampling, seeds, positions, ones).tokens
        assert torch.equal(eager._proposal.tokens, expected)
    assert torch.equal(drafts.view(2, -1), expected)


@pytest.mark.parametrize("greedy", [True, False])
def test_ranks_that_sum_differently_verify_the_same_block(worker, lm_head, greedy):
    """Last bits of a gate, or of what is learnt from them, may differ; drafted tokens may not."""
    head, anchors, rows = worker.dependency, torch.tensor([3, 9]), torch.randn(2 * (BLOCK - 1), D)
    found = draft_sampler.candidates_of(rows, BLOCK - 1, None, K, head)
    other = Candidates(found.ids, found.scores.flip(-1), found.gates)
    ones = torch.ones(2)
    sampling = Sampling(ones, torch.full((2,), 1 << 30), ones, torch.zeros(2))
    with mock.patch.object(sampled_worker, "sampling_of", lambda info: sampling):
        ranks, drafts, alone = Ranks(), [], []
        for candidates in (found, other):
            each = eager_worker(head, anchors, greedy, ranks)
            if greedy:
                sampler = draft_sampler.CandidateSampler(each, None, 2)
                sampler.first.copy_(propose_greedy(candidates, anchors, head).view(-1))
                alone.append(sampler.first.clone())
                drafts.append(sampler.out)
            else:
                drafts.append(each.draw_drafts(candidates))
                assert torch.equal(each._proposal.tokens.view(-1), drafts[-1])
                alone.append(eager_worker(head, anchors, greedy).draw_drafts(candidates))
    assert torch.equal(*drafts) and not torch.equal(*alone)


def test_filters_on_cuda_do_not_depend_on_the_order_of_thread_blocks(monkeypatch):
    """FlashInfer's default adds in the order of arrival: ranks and runs would differ."""
    from sglang.kernels.ops.sampling import renorm

    asked = []

    def kernel(probs, limit, is_deterministic=False):
        asked.append(is_deterministic)
        return probs.clone()

    for name in ("top_k_renorm_prob", "top_p_renorm_prob"):
        monkeypatch.setattr(renorm, name, kernel)
    monkeypatch.setattr(sampled_worker, "is_cuda", lambda: True)
    ones = torch.ones(2)
    sampling = Sampling(ones, torch.full((2,), 3), 0.5 * ones, torch.zeros(2), True, True)
    weights_of(torch.randn(2, V), sampling, sampled_worker.renorm_kernels())
    assert asked == [True, True]
    monkeypatch.undo()
    assert sampled_worker.renorm_kernels() is None


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


def test_a_head_without_candidates_is_left_out_and_said(worker, caplog):
    bare = object.__new__(sampled_worker.SampledWorker)
    bare.draft_model = SimpleNamespace(dependency=worker.dependency)
    with caplog.at_level("WARNING"):
        assert bare._usable_dependency(SimpleNamespace(weight=None)) is None
    assert "the dependency head is not used" in caplog.text
    bare.draft_model = SimpleNamespace(dependency=None)
    assert bare._usable_dependency(None) is None


def test_more_candidates_than_a_rank_has_tokens_are_refused():
    part = SimpleNamespace(shard_indices=SimpleNamespace(num_org_elements=100))
    check_candidates(100, part)
    check_candidates(101, SimpleNamespace())
    with pytest.raises(HyperDFlashConfigError, match=r"scores 101 candidates.*has 100 tokens"):
        check_candidates(101, part)
