"""Draft K/V of all layers at once, against SGLang's own modules of one layer."""

from types import SimpleNamespace

import pytest
import torch
from sglang.kernels.ops.speculative import fused_kv_materialize
from sglang.kernels.ops.speculative.fused_kv_materialize import FusedKVMaterializeHelper
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from torch.nn import functional as F

from sglang_hyperdflash.cpu.platform.torch_ops import norm_rope_stacked

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, TOKENS = 4, 2, 64, 48, 9
Q_SIZE, KV_SIZE = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM


def layer(rope: RotaryEmbedding, eps: float = 1e-6) -> SimpleNamespace:
    """As far as SGLang's helper reads it; the projection has more rows than heads, as padding."""
    norm = RMSNorm(HEAD_DIM, eps=eps)
    norm.weight.data.uniform_(0.5, 2.0)
    weight = torch.randn(Q_SIZE + 2 * KV_SIZE + 5, HIDDEN) * HIDDEN**-0.5
    attention = SimpleNamespace(
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        q_size=Q_SIZE,
        kv_size=KV_SIZE,
        rotary_emb=rope,
        qkv_proj=SimpleNamespace(weight=weight),
        k_norm=norm,
    )
    return SimpleNamespace(self_attn=attention)


def rope_of(rotary_dim: int = HEAD_DIM) -> RotaryEmbedding:
    return RotaryEmbedding(HEAD_DIM, rotary_dim, 512, 10000.0, True, torch.float32)


def helper(layers: list[SimpleNamespace]) -> FusedKVMaterializeHelper:
    rope = layers[0].self_attn.rotary_emb
    return FusedKVMaterializeHelper(layers, rope, KV_HEADS, HEAD_DIM, torch.device("cpu"), 512)


@pytest.mark.parametrize("rotary_dim", [HEAD_DIM, HEAD_DIM // 2])
def test_each_layer_s_are_those_of_its_own_norm_and_rope(rotary_dim, monkeypatch):
    torch.manual_seed(rotary_dim)
    monkeypatch.setattr(fused_kv_materialize, "_fused_norm_rope_stacked", norm_rope_stacked)
    rope, made = rope_of(rotary_dim), {}
    layers = [layer(rope, eps) for eps in (1e-6, 1e-3, 0.1)]
    hidden, positions = torch.randn(TOKENS, HIDDEN), torch.randint(0, 511, (TOKENS,))
    helper(layers).materialize(
        hidden, positions, lambda i, k, v: made.update({i: (k.clone(), v.clone())})
    )
    assert sorted(made) == list(range(len(layers)))
    for i, attn in enumerate(each.self_attn for each in layers):
        rows = attn.qkv_proj.weight[Q_SIZE : Q_SIZE + 2 * KV_SIZE]
        k, v = F.linear(hidden, rows).split(KV_SIZE, -1)
        normed = attn.k_norm.forward_native(k.reshape(-1, HEAD_DIM)).view_as(k)
        _, expected = rope.forward_native(positions, torch.zeros_like(k), normed.clone())
        torch.testing.assert_close(made[i][0].reshape(TOKENS, KV_SIZE), expected)
        torch.testing.assert_close(made[i][1].reshape(TOKENS, KV_SIZE), v)
