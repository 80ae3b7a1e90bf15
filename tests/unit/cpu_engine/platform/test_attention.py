"""The torch attention backend against a per-query Python loop over the paged cache."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType

from cpu_engine.platform.attention import TorchAttention
from cpu_engine.platform.torch_ops import assign_req_to_token_pool, extend_cache_locs

SLOTS, D = 64, 8


class Mode:
    """A forward mode that answers as SGLang's enum does."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, question: str):
        return lambda: question == f"is_{self.name}"


class Pool:
    def __init__(self, kv_heads: int) -> None:
        self.k = torch.randn(SLOTS, kv_heads, D)
        self.v = torch.randn(SLOTS, kv_heads, D)

    def set_kv_buffer(self, layer, loc, k, v) -> None:
        raise AssertionError("this test writes the pool itself")

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.k

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.v


def loop(q, pool, rows, prefixes, lengths, heads, kv_heads, causal, window, sinks):
    out, at = [], 0
    for row, prefix, n in zip(rows, prefixes, lengths, strict=True):
        for i in range(n):
            position = prefix + i
            last = position if causal else prefix + n - 1
            keys = [int(row[p]) for p in range(last + 1) if window < 0 or p >= position - window]
            heads_out = []
            for h in range(heads):
                k = pool.k[keys, h * kv_heads // heads]
                scores = (k @ q[at, h]) * D**-0.5
                if sinks is not None:
                    scores = torch.cat([scores, sinks[h : h + 1]])
                weights = scores.softmax(0)[: len(keys)]
                heads_out.append(weights @ pool.v[keys, h * kv_heads // heads])
            out.append(torch.cat(heads_out))
            at += 1
    return torch.stack(out)


CASES = {
    "decode": ("decode", [1, 1, 1]),
    "verify": ("target_verify", [5, 5, 5]),
    "extend": ("extend", [3, 7, 1]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads, kv_heads", [(4, 1), (4, 2), (2, 2)])
@pytest.mark.parametrize("causal, window", [(True, -1), (True, 3), (False, -1), (False, 6)])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_matches_the_loop(case, heads, kv_heads, causal, window, with_sinks):
    torch.manual_seed(0)
    mode, lengths = CASES[case]
    prefixes = [0, 9, 4]
    pool = Pool(kv_heads)
    table = torch.stack([torch.randperm(SLOTS)[:20] for _ in range(4)])
    indices = torch.tensor([2, 0, 3])
    runner = SimpleNamespace(
        device="cpu",
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool=pool,
    )
    totals = torch.tensor([p + n for p, n in zip(prefixes, lengths, strict=True)])
    batch = SimpleNamespace(
        forward_mode=Mode(mode),
        batch_size=3,
        req_pool_indices=indices,
        seq_lens=torch.tensor(prefixes) if mode == "target_verify" else totals,
        extend_seq_lens=torch.tensor(lengths),
        spec_info=SimpleNamespace(draft_token_num=lengths[0]),
        out_cache_loc=None,
    )
    layer = SimpleNamespace(
        tp_q_head_num=heads,
        tp_k_head_num=kv_heads,
        qk_head_dim=D,
        layer_id=0,
        scaling=D**-0.5,
        sliding_window_size=window,
        attn_type=AttentionType.DECODER if causal else AttentionType.ENCODER_ONLY,
    )
    q = torch.randn(sum(lengths), heads, D)
    sinks = torch.randn(heads) if with_sinks else None
    backend = TorchAttention(runner)
    backend.init_forward_metadata(batch)
    found = backend.forward_extend(q.flatten(1), None, None, layer, batch, sinks=sinks)
    rows = [table[i] for i in indices]
    expected = loop(q, pool, rows, prefixes, lengths, heads, kv_heads, causal, window, sinks)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_padding_rows_are_zero():
    table = torch.arange(SLOTS).view(1, -1)
    runner = SimpleNamespace(
        device="cpu",
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool=Pool(1),
    )
    batch = SimpleNamespace(
        forward_mode=Mode("decode"),
        batch_size=1,
        req_pool_indices=torch.tensor([0]),
        seq_lens=torch.tensor([5]),
        out_cache_loc=None,
    )
    layer = SimpleNamespace(
        tp_q_head_num=1,
        tp_k_head_num=1,
        qk_head_dim=D,
        layer_id=0,
        scaling=1.0,
        sliding_window_size=-1,
        attn_type=AttentionType.DECODER,
    )
    backend = TorchAttention(runner)
    backend.init_forward_metadata(batch)
    found = backend.forward_decode(torch.randn(3, D), None, None, layer, batch)
    assert found.shape == (3, D)
    assert not found[1:].any()


def test_request_to_token_helpers():
    table = torch.zeros(4, 10, dtype=torch.int32)
    slots = torch.tensor([11, 12, 13, 21, 22])
    assign_req_to_token_pool(
        torch.tensor([2, 0]), table, torch.tensor([4, 0]), torch.tensor([7, 2]), slots, 2
    )
    assert table[2, 4:7].tolist() == [11, 12, 13]
    assert table[0, :2].tolist() == [21, 22]
    assert int(table.sum()) == sum(slots.tolist())
    found = extend_cache_locs(
        req_pool_indices=torch.tensor([2, 0]),
        req_to_token=table,
        start_offset=torch.tensor([4, 0]),
        end_offset=torch.tensor([6, 2]),
        batch_size=2,
        draft_token_num=2,
        device="cpu",
    )
    assert found.tolist() == [11, 12, 21, 22]
