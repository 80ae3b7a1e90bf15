"""Held-out replay: in chunks, over processes; and block attention, dense and by FlexAttention."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from sglang_hyperdflash.targets.files import TargetFacts
from sglang_hyperdflash.training import replay as replay_module
from sglang_hyperdflash.training.anchors import dense_mask, visible
from sglang_hyperdflash.training.drafter import Drafter, DrafterShape, attend, draft_config
from sglang_hyperdflash.training.replay import Replay
from sglang_hyperdflash.training.samples import FeatureCache, Sample, States, collate
from tests.unit.training.conftest import LargestTensor

SHAPE = DrafterShape(
    layers=1, heads=2, kv_heads=1, head_dim=32, intermediate_size=64, dependency_rank=4
)


def samples_of(*lengths: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(10, 1300, (n,), generator=generator).tolist() for n in lengths]
    return [Sample.continuation(row, 6) for row in rows]


@pytest.fixture(scope="module")
def replay(target) -> Replay:
    torch.manual_seed(0)
    facts = TargetFacts.from_config(target.config.to_dict())
    drafter = Drafter(draft_config(facts, target.hc_head, SHAPE, 4))
    drafter.inherit(target.hc_head)
    with torch.no_grad():
        drafter.dependency.successor.normal_()
    return Replay(drafter.eval(), target)


@pytest.mark.parametrize("window", [12, None])
@torch.no_grad()
def test_a_sample_may_begin_where_a_recording_did(target, replay, window):
    """With a whole window of context, its blocks are the whole sample's: RoPE is relative."""
    raw = replay.drafter.raw
    raw |= {"hyperdflash_config": raw["hyperdflash_config"] | {"window": window}}
    drafter = Drafter(raw).eval()
    drafter.load_state_dict(replay.drafter.state_dict())
    for layer in drafter.layers:
        layer.self_attn.v_proj.weight.normal_()  # or the context hardly counts
    own, (sample,), start = Replay(drafter, target), samples_of(48), 20
    states = FeatureCache(target, [sample], dtype=torch.float32).states([0])
    later = Sample(sample.tokens[start:], ((6, 28),))
    states_later = States(states.residual[:, start:], states.layers[:, start:])
    anchors = torch.arange(start + 12, 48).unsqueeze(0)
    keep = torch.ones_like(anchors, dtype=torch.bool)
    whole = own.draft_states(collate([sample]), states, anchors, keep)
    found = own.draft_states(collate([later]), states_later, anchors - start, keep)
    difference = (found - whole).abs().max() / whole.abs().max()
    assert difference < 1e-5 if window else difference > 1e-2  # context is cut


class Share:
    """One of several processes; what each would add is kept."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.given = rank, size, []

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        self.given.append(tensor.clone())
        return tensor


def test_chunks_change_neither_tau(target, replay, monkeypatch):
    source = FeatureCache(target, samples_of(40, 33, 61), dtype=torch.float32)
    monkeypatch.setattr(replay_module, "ANCHORS", 1000)
    whole = replay.evaluate(source, sampled=True)
    monkeypatch.setattr(replay_module, "ANCHORS", 7)
    monkeypatch.setattr(replay_module, "BLOCKS", 3)
    chunks = replay.evaluate(source, sampled=True)
    assert chunks["tau_sampled"] == pytest.approx(whole.pop("tau_sampled"), rel=1e-6)
    assert {name: chunks[name] for name in whole} == whole


def test_memory_grows_with_an_answers_length_and_not_with_its_square(target, replay, monkeypatch):
    """Found as: every block of eight answers in one mask, 8 GB at 2,000 tokens."""
    monkeypatch.setattr(replay_module, "ANCHORS", 8)
    monkeypatch.setattr(replay_module, "BLOCKS", 2)  # logits are a constant here, and small
    sizes = []
    for length in (512, 1024, 2048):
        (sample,) = samples_of(length)
        d, m = target.config.hidden_size, target.config.hc_mult
        states = States.without_layers(torch.zeros(1, length, m * d))
        source = SimpleNamespace(samples=[sample], states=lambda _, kept=states: kept)
        with LargestTensor() as seen:
            replay.acceptance(source)
        sizes.append(seen.most)
    assert sizes[2] <= 2.1 * sizes[1] <= 2.1 * 2.1 * sizes[0], sizes


def test_a_windowed_block_is_the_same_after_any_length_of_context(target):
    """Found as: drafters were trained on up to 4,096 tokens and served after a million."""
    facts = TargetFacts.from_config(target.config.to_dict() | {"max_position_embeddings": 2**20})
    tokens = torch.randint(10, 1300, (20_000,), generator=torch.Generator().manual_seed(0))
    states = torch.randn(1, 1, facts.hc_mult * facts.hidden_size).expand(1, 20_000, -1).contiguous()
    states[:, -64:] = torch.randn(1, 64, states.shape[-1])

    def block(window: int | None, length: int) -> torch.Tensor:
        torch.manual_seed(0)
        raw = draft_config(facts, target.hc_head, replace(SHAPE, window=window), 4)
        rows = collate([Sample(tokens[-length:], ())])
        near = States.without_layers(states[:, -length:])
        anchor = torch.tensor([[length - 1]]), torch.ones(1, 1, dtype=torch.bool)
        return Replay(Drafter(raw).eval(), target).draft_states(rows, near, *anchor)

    with torch.no_grad():
        torch.testing.assert_close(block(32, 20_000), block(32, 64), rtol=1e-2, atol=1e-2)
        assert (block(None, 20_000) - block(None, 64)).abs().max() > 0.1


def test_processes_share_the_answers_and_agree(target, replay):
    source = FeatureCache(target, samples_of(*range(20, 45)), dtype=torch.float32)
    histogram, tau = replay.acceptance(source), replay.expected_tau(source)
    shares = [Share(rank, 3) for rank in range(3)]
    for share in shares:
        replay.acceptance(source, world=share)
        replay.expected_tau(source, world=share)
    counts = [share.given[0] for share in shares]
    assert sum(counts).sum(0).tolist() == histogram
    assert all(0 < count.sum() < sum(histogram) for count in counts), "a process had no answers"
    total, blocks = sum(share.given[1] for share in shares).tolist()
    assert 1 + total / blocks == pytest.approx(tau, rel=1e-12)


@pytest.fixture
def _dynamo():
    """The CPU platform turns torch.compile off for SGLang in the whole process."""
    with torch._dynamo.config.patch(disable=False):
        yield


MASKS = [
    {"window": None, "causal": False},
    {"window": 24, "causal": False},
    {"window": 24, "causal": True},
]


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
@pytest.mark.parametrize("options", MASKS)
@torch.no_grad()
def test_flex_attention_is_the_dense_one(options):
    """The dense mask is the oracle of the tiles that a GPU computes."""
    context, block = 300, 7
    anchors, keep, q, k, v = attention_inputs(context, 40, block)
    may_attend = visible(anchors, keep, context, block, **options)
    sizes = q.shape[2], k.shape[2]
    tiles = create_block_mask(may_attend, 2, None, *sizes, "cpu", BLOCK_SIZE=64)
    mask = dense_mask(may_attend, 2, *sizes, "cpu")
    torch.testing.assert_close(attend(q, k, v, tiles), attend(q, k, v, mask), rtol=1e-5, atol=1e-6)
    if options["window"]:
        assert tiles.sparsity() > 40


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
    for context, blocks in ((300, 40), (333, 32), (517, 29), (800, 40), (1025, 21)):
        anchors, keep, q, k, v = attention_inputs(context, blocks, 7)
        may_attend = visible(anchors, keep, context, 7, 24)
        tiles = create_block_mask(may_attend, 2, None, q.shape[2], k.shape[2], "cpu")
        found = flex(q, k, v, block_mask=tiles, enable_gqa=True)
        mask = dense_mask(may_attend, 2, q.shape[2], k.shape[2], "cpu")
        torch.testing.assert_close(found, attend(q, k, v, mask), rtol=1e-5, atol=1e-6)
    assert len(graphs) == 1
