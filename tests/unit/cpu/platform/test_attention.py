"""The torch attention backend against a per-query Python loop over the paged cache."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_hyperdflash.cpu.platform.attention import TorchAttention
from sglang_hyperdflash.cpu.platform.engine_seams import last_slots
from sglang_hyperdflash.cpu.platform.torch_ops import assign_req_to_token_pool, extend_cache_locs

SLOTS, D = 64, 8
PREFIXES = (0, 9, 4)
CASES = {"decode": (1, 1, 1), "target_verify": (5, 5, 5), "extend": (3, 7, 1)}


def loop(q, k, v, rows, lengths, layer, sinks):
    window, out, queries = layer.sliding_window_size, [], iter(q)
    causal, group = layer.attn_type == AttentionType.DECODER, q.shape[1] // k.shape[1]
    for row, prefix, n in zip(rows, PREFIXES, lengths, strict=True):
        for position in range(prefix, prefix + n):
            query, last = next(queries), position if causal else prefix + n - 1
            keys = row[0 if window < 0 else max(position - window, 0) : last + 1]
            for h in range(q.shape[1]):
                scores = (k[keys, h // group] @ query[h]) * D**-0.5
                if sinks is not None:
                    scores = torch.cat([scores, sinks[h : h + 1]])
                out.append(scores.softmax(0)[: len(keys)] @ v[keys, h // group])
    return torch.cat(out).view(len(q), -1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads, kv_heads, with_sinks", [(4, 1, True), (4, 2, False), (2, 2, True)])
@pytest.mark.parametrize("causal, window", [(True, -1), (True, 3), (False, -1), (False, 6)])
def test_matches_the_loop(case, heads, kv_heads, with_sinks, causal, window):
    torch.manual_seed(0)
    lengths = CASES[case]
    k, v = torch.randn(2, SLOTS, kv_heads, D)
    pool = SimpleNamespace(get_key_buffer=lambda layer: k, get_value_buffer=lambda layer: v)
    table = torch.stack([torch.randperm(SLOTS)[:20] for _ in range(4)])
    rows_of = SimpleNamespace(req_to_token=table)
    runner = SimpleNamespace(device="cpu", req_to_token_pool=rows_of, token_to_kv_pool=pool)
    indices, new = torch.tensor([2, 0, 3]), torch.tensor(lengths)
    batch = SimpleNamespace(
        forward_mode=ForwardMode[case.upper()],
        batch_size=3,
        req_pool_indices=indices,
        seq_lens=torch.tensor(PREFIXES) + (0 if case == "target_verify" else new),
        extend_seq_lens=new,
        spec_info=SimpleNamespace(draft_token_num=lengths[0]),
    )
    kind = AttentionType.DECODER if causal else AttentionType.ENCODER_ONLY
    sizes = {"sliding_window_size": window, "attn_type": kind}
    layer = RadixAttention(heads, D, D**-0.5, kv_heads, layer_id=0, **sizes)
    rows = sum(lengths)
    q = torch.randn(rows + 2, heads, D)  # the last two are padding of a larger batch
    sinks = torch.randn(heads) if with_sinks else None
    backend = TorchAttention(runner)
    backend.init_forward_metadata(batch)
    output = backend.forward_extend(q.flatten(1), None, None, layer, batch, sinks=sinks)
    expected = loop(q[:rows], k, v, table[indices], lengths, layer, sinks)
    torch.testing.assert_close(output[:rows], expected, rtol=1e-5, atol=1e-5)
    assert output.shape == (rows + 2, heads * D) and not output[rows:].any()


def test_request_to_token_helpers():
    table = torch.zeros(4, 10, dtype=torch.int32)
    slots = torch.tensor([11, 12, 13, 21, 22])
    requests, starts = torch.tensor([2, 0]), torch.tensor([4, 0])
    assign_req_to_token_pool(requests, table, starts, torch.tensor([7, 2]), slots, 2)
    assert table[2, 4:7].tolist() == [11, 12, 13]
    assert table[0, :2].tolist() == [21, 22]
    assert int(table.sum()) == sum(slots.tolist())
    places = extend_cache_locs(
        req_pool_indices=requests,
        req_to_token=table,
        start_offset=starts,
        end_offset=torch.tensor([6, 2]),
        batch_size=2,
        draft_token_num=2,
        device="cpu",
    )
    assert places.tolist() == [11, 12, 21, 22]
    table = torch.arange(100, 124).view(3, 8).int()
    rows, lengths = torch.tensor([2, 0, 1]), torch.tensor([3, 0, 8])
    assert last_slots(table, rows, lengths).tolist() == [118, -1, 115]
