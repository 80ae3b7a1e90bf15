"""Drafts in training, held-out replay in chunks and over processes, and block attention."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from eval.algorithm import propose_block
from sglang_hyperdflash.training import replay as replay_module
from sglang_hyperdflash.training.anchors import dense_mask, visible
from sglang_hyperdflash.training.drafter import attend
from sglang_hyperdflash.training.replay import Replay
from sglang_hyperdflash.training.samples import Sample, States, collate
from tests.unit.training.conftest import FeatureCache, LargestTensor, answers
from tests.unit.training.streams import random_drafter


@pytest.fixture(scope="module")
def replay(target) -> Replay:
    return Replay(random_drafter(target), target)


@pytest.fixture(scope="module")
def source(target) -> FeatureCache:
    return FeatureCache(target, answers(18, 20, prompt=7), dtype=torch.float32)


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 8)])
@torch.no_grad()
def test_drafts_are_the_page_s_and_are_counted_as_a_server_would(target, causal, window):
    """Answers made of so many drafts a round; a block that their end cuts short does not count."""
    drafter = random_drafter(target, causal=causal, window=window)
    for layer in drafter.layers:
        layer.self_attn.v_proj.weight.normal_()  # or the context hardly counts
    replay, samples = Replay(drafter, target), []
    for rounds, prompt in zip(([3, 0, 6, 1, 6, 2], [6, 4, 0]), answers(7, 9), strict=True):
        tokens = list(prompt.tokens)
        for taken in rounds:
            drafts = propose_block(target, replay.drafter, tokens)
            other = 77 if taken == len(drafts) or drafts[taken] != 77 else 78
            tokens += [*drafts[:taken], other]
        tokens += propose_block(target, replay.drafter, tokens)[:5]
        samples.append(Sample.continuation(tokens, len(prompt.tokens) - 1))
    source, every = FeatureCache(target, samples, dtype=torch.float32), [3, 0, 6, 1, 6, 2, 6, 4, 0]
    assert replay.measure(source)[0].sum(0).tolist() == [every.count(taken) for taken in range(7)]
    scores = replay.evaluate(source)
    assert scores["tau"] == pytest.approx(1 + sum(every) / 9)
    rates = [sum(taken > k for taken in every) / 9 for k in range(6)]
    assert scores["position_acceptance"] == pytest.approx(rates, abs=1e-4)


@torch.no_grad()
def test_the_expected_tau_is_the_sum_of_products_of_overlaps(target, source):
    """Against a loop over one block at a time, q on the candidates alone."""
    drafter = random_drafter(target, dependency_top_k=3)
    replay, taus = Replay(drafter, target), []
    for i, sample in enumerate(source.samples):
        states, tokens = source.states([i]), sample.tokens
        for anchor in range(sample.spans[0][0], len(tokens) - 6):
            block = torch.tensor([[anchor]]), torch.tensor([[True]])
            hidden = replay.draft_states(collate([sample]), states, *block)[0, 0]
            reach, tau = 1.0, 1.0
            for k in range(6):
                logits = target.lm_head(hidden[k])
                ids = logits.topk(3).indices
                before = torch.tensor([tokens[anchor + k]])
                extra = drafter.dependency.over_vocabulary(before, hidden[k : k + 1])[0]
                q = (logits + extra)[ids].softmax(-1)
                p = target.lm_head(target.final(states.residual[0, anchor + k])).softmax(-1)[ids]
                reach *= float(torch.minimum(p, q).sum())
                tau += reach
            taus.append(tau)
    assert replay.measure(source, sampled=True)[1] == pytest.approx(sum(taus) / len(taus), rel=1e-4)


@pytest.mark.parametrize(("window", "length"), [(12, 48), (None, 48), (12, 1000)])
@torch.no_grad()
def test_a_sample_may_begin_where_a_recording_did(target, window, length):
    """With a whole window of context, its blocks are the whole sample's: RoPE is relative."""
    drafter = random_drafter(target, window=window)
    for layer in drafter.layers:
        layer.self_attn.v_proj.weight.normal_()  # or the context hardly counts
    replay, (sample,), start = Replay(drafter, target), answers(length), length - 28
    states = States.without_layers(torch.randn(1, length, 1024))
    later = States.without_layers(states.residual[:, start:])
    anchors = torch.arange(length - 16, length).unsqueeze(0)
    keep = torch.ones_like(anchors, dtype=torch.bool)
    whole = replay.draft_states(collate([sample]), states, anchors, keep)
    rows = collate([Sample(sample.tokens[start:], ())])
    gap = (replay.draft_states(rows, later, anchors - start, keep) - whole).abs().max()
    near = 1e-5 if length < 100 else 1e-2
    assert gap < near * whole.abs().max() if window else gap > 1e-2 * whole.abs().max()


def test_memory_grows_with_an_answers_length_and_not_with_its_square(target, replay, monkeypatch):
    monkeypatch.setattr(replay_module, "ANCHORS", 8)
    monkeypatch.setattr(replay_module, "BLOCKS", 2)  # logits are a constant here, and small
    sizes = []
    for length in (64, 128, 256):
        states = States.without_layers(torch.zeros(1, length, 1024))
        with LargestTensor() as seen:
            replay.measure(SimpleNamespace(samples=answers(length), states=lambda _: states))  # noqa: B023
        sizes.append(seen.most)
    assert sizes[2] <= 2.1 * sizes[1] <= 2.1 * 2.1 * sizes[0], sizes


def test_neither_processes_nor_chunks_change_a_tau(target, replay, monkeypatch):
    source = FeatureCache(target, answers(*range(20, 27)), dtype=torch.float32)
    histograms, tau = replay.measure(source, sampled=True, batch=2)
    asked, sums = [], [Mock(side_effect=torch.clone) for _ in range(3)]
    plain = source.states
    source.states = lambda indices: asked.append(indices) or plain(indices)
    monkeypatch.setattr(replay_module, "ANCHORS", 7)
    monkeypatch.setattr(replay_module, "BLOCKS", 3)
    for rank, add in enumerate(sums):
        replay.measure(
            source, sampled=True, batch=2, world=SimpleNamespace(rank=rank, size=3, sum=add)
        )
    counts, taus = zip(*([call.args[0] for call in add.mock_calls] for add in sums), strict=True)
    assert torch.equal(sum(counts), histograms)
    assert all(0 < count.sum() < histograms.sum() for count in counts), "a process had no answers"
    total, blocks = sum(taus).tolist()
    assert 1 + total / blocks == pytest.approx(tau, rel=1e-6)
    assert sorted(i for indices in asked for i in indices) == list(range(7))  # once


@pytest.fixture
def _dynamo():
    """The CPU platform turns torch.compile off for SGLang in the whole process."""
    with torch._dynamo.config.patch(disable=False):
        yield


def attention_inputs(context: int, blocks: int, block: int):
    g = torch.Generator().manual_seed(context)
    anchors = torch.randint(1, context, (2, blocks), generator=g).sort(1).values
    keep = torch.ones(2, blocks, dtype=torch.bool)
    keep[1, -2:] = False  # a padding block's anchor is 0
    queries, keys = blocks * block, context + blocks * block
    q = torch.randn(2, 4, queries, 16, generator=g)
    k, v = torch.randn(2, 2, 2, keys, 16, generator=g)
    return anchors.masked_fill(~keep, 0), keep, q, k, v


@pytest.mark.usefixtures("_dynamo")
@pytest.mark.parametrize(("window", "causal"), [(None, False), (24, False), (24, True)])
@torch.no_grad()
def test_flex_attention_is_the_dense_one(window, causal):
    """The dense mask is the oracle of the tiles that a GPU computes."""
    context, block = 300, 7
    anchors, keep, q, k, v = attention_inputs(context, 40, block)
    may_attend = visible(anchors, keep, context, block, window, causal=causal)
    sizes = q.shape[2], k.shape[2]
    tiles = create_block_mask(may_attend, 2, None, *sizes, "cpu", BLOCK_SIZE=64)
    mask = dense_mask(may_attend, 2, *sizes, "cpu")
    torch.testing.assert_close(attend(q, k, v, tiles), attend(q, k, v, mask), rtol=1e-5, atol=1e-6)
    assert not window or tiles.sparsity() > 40


@pytest.mark.usefixtures("_dynamo")
@torch.no_grad()
def test_flex_attention_is_compiled_once_for_all_steps():
    """Contexts and numbers of blocks differ from step to step."""
    graphs = []

    def count(module, _inputs):
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    flex = torch.compile(flex_attention, dynamic=True, backend=count)
    for context, blocks in ((300, 40), (333, 32), (517, 29)):
        anchors, keep, q, k, v = attention_inputs(context, blocks, 7)
        may_attend = visible(anchors, keep, context, 7, 24)
        tiles = create_block_mask(may_attend, 2, None, q.shape[2], k.shape[2], "cpu")
        compiled = flex(q, k, v, block_mask=tiles, enable_gqa=True)
        mask = dense_mask(may_attend, 2, q.shape[2], k.shape[2], "cpu")
        torch.testing.assert_close(compiled, attend(q, k, v, mask), rtol=1e-5, atol=1e-6)
    assert len(graphs) == 1
