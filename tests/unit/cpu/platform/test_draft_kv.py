"""Draft K/V of all layers at once, against SGLang's own modules of one layer."""

from types import SimpleNamespace

import pytest
import torch
from sglang.kernels.ops.speculative import fused_kv_materialize
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from torch.nn import functional as F

from sglang_hyperdflash.cpu.platform.torch_ops import norm_rope_stacked

LAYERS, HEADS, HEAD_DIM, HIDDEN, TOKENS = 3, 2, 64, 48, 9
SIZE = HEADS * HEAD_DIM


def attention(rope: RotaryEmbedding, eps: float) -> SimpleNamespace:
    norm = RMSNorm(HEAD_DIM, eps=eps)
    norm.weight.data.uniform_(0.5, 2.0)
    return SimpleNamespace(
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        q_size=SIZE,
        kv_size=SIZE,
        rotary_emb=rope,
        qkv_proj=SimpleNamespace(weight=torch.randn(3 * SIZE, HIDDEN) * HIDDEN**-0.5),
        k_norm=norm,
    )


@pytest.mark.parametrize("rotary_dim", [HEAD_DIM, HEAD_DIM // 2])
def test_each_layer_s_are_those_of_its_own_norm_and_rope(rotary_dim, monkeypatch):
    torch.manual_seed(rotary_dim)
    monkeypatch.setattr(fused_kv_materialize, "_fused_norm_rope_stacked", norm_rope_stacked)
    rope = RotaryEmbedding(HEAD_DIM, rotary_dim, 512, 10000.0, True, torch.float32)
    modules = [attention(rope, eps) for eps in (1e-6, 1e-3, 0.1)]
    layers = [SimpleNamespace(self_attn=module) for module in modules]
    helper = fused_kv_materialize.FusedKVMaterializeHelper(
        layers, rope, HEADS, HEAD_DIM, torch.device("cpu"), 512
    )
    hidden, positions = torch.randn(TOKENS, HIDDEN), torch.randint(0, 511, (TOKENS,))
    made = {}
    helper.materialize(hidden, positions, lambda i, k, v: made.update({i: (k.clone(), v.clone())}))
    assert sorted(made) == list(range(LAYERS))
    for i, attn in enumerate(modules):
        k, v = F.linear(hidden, attn.qkv_proj.weight[SIZE:]).split(SIZE, -1)
        normed = attn.k_norm.forward_native(k.reshape(-1, HEAD_DIM)).view_as(k)
        _, expected = rope.forward_native(positions, torch.zeros_like(k), normed.clone())
        torch.testing.assert_close(made[i][0].reshape(TOKENS, SIZE), expected)
        torch.testing.assert_close(made[i][1].reshape(TOKENS, SIZE), v)
