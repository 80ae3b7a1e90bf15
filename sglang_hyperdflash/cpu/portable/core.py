"""DeepSeek-V4 (sliding-attention layers) in plain torch, without an engine.

The caller passes in the attention product: SGLang's paged attention in ``deepseek_v4.py``, a dense
one in training and tests. Everything else is here: mHC streams, shared-KV attention with sinks and
partial interleaved RoPE, its inverse on the output, the grouped output projection, and hash or
top-k MoE with a shared expert.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from sglang_hyperdflash.cpu.portable.mhc import HyperConnection
from sglang_hyperdflash.draft.hc_head import HcHead
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

# (layer index, q [N, heads, d], kv [N, d], sinks [heads]) -> [N, heads, d]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def check_config(config) -> None:
    """Refuse a config that the portable target cannot compute."""
    expected = {
        "layer_types": (set(config.layer_types), {"sliding_attention"}),
        "mlp_layer_types": (set(config.mlp_layer_types), {"hash_moe", "moe"}),
        "num_key_value_heads": ({config.num_key_value_heads}, {1}),
        "scoring_func": ({config.scoring_func}, {"sqrtsoftplus", "sigmoid", "softmax"}),
        "hidden_act": ({config.hidden_act}, {"silu"}),
        "attention_bias": ({bool(config.attention_bias)}, {False}),
        "mlp_bias": ({bool(config.mlp_bias)}, {False}),
        "tie_word_embeddings": ({bool(config.tie_word_embeddings)}, {False}),
        "rope_parameters.main.rope_type": (
            {config.rope_parameters["main"].get("rope_type", "default")},
            {"default"},
        ),
        "quantization_config": ({getattr(config, "quantization_config", None)}, {None}),
    }
    for name, (values, allowed) in expected.items():
        if not values <= allowed:
            raise HyperDFlashConfigError(
                f"the portable DeepSeek-V4 target supports {name} in {sorted(map(str, allowed))}; "
                f"this config has {sorted(map(str, values))}. Serve it with SGLang's own "
                "DeepseekV4ForCausalLM on a GPU."
            )


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Apply RMSNorm over the last dimension in fp32; the result has ``x.dtype``."""
    if weight is not None:
        weight = weight.float()
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)


def softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return attention weights; part of their mass goes to a sink per head that has no value.

    Args:
        scores: ``[b, heads, n, keys]``, masked with -inf.
        sinks: ``[heads]``, the logit of each sink.
    """
    column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


class RotaryTable(nn.Module):
    """Complex rotations ``[max_position, rope_dim / 2]`` for interleaved pairs, fp32."""

    def __init__(self, config) -> None:
        super().__init__()
        dim = int(config.qk_rope_head_dim)
        theta = float(config.rope_parameters["main"]["rope_theta"])
        inverse = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
        angles = torch.arange(config.max_position_embeddings).float()[:, None] * inverse
        self.dim = dim
        self.cos_sin = nn.Buffer(torch.stack([angles.cos(), angles.sin()], -1), persistent=False)

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the rotations at ``positions [N]``, complex ``[N, 1, dim / 2]``."""
        return torch.view_as_complex(self.cos_sin[positions].float()).unsqueeze(1)

    def rotate(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """Rotate the trailing ``dim`` channels of ``x [N, heads, d]`` in fp32."""
        tail = x[..., -self.dim :].float().unflatten(-1, (-1, 2)).contiguous()
        tail = torch.view_as_real(torch.view_as_complex(tail) * rotation).flatten(-2)
        return torch.cat([x[..., : -self.dim], tail.to(x.dtype)], dim=-1)


class Attention(nn.Module):
    """Shared-KV attention: one head is both K and V for all query heads, each with a sink."""

    def __init__(self, config, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.groups, self.rms_eps = config.o_groups, config.rms_norm_eps
        d, rank = config.hidden_size, config.q_lora_rank
        self.q_a_proj = nn.Linear(d, rank, bias=False)
        self.q_a_norm = nn.Parameter(torch.ones(rank).float())
        self.q_b_proj = nn.Linear(rank, self.heads * self.head_dim, bias=False)
        self.kv_proj = nn.Linear(d, self.head_dim, bias=False)
        self.kv_norm = nn.Parameter(torch.ones(self.head_dim).float())
        group_in = self.heads * self.head_dim // self.groups
        self.o_a_proj = nn.Parameter(torch.empty(self.groups, config.o_lora_rank, group_in))
        self.o_b_proj = nn.Linear(self.groups * config.o_lora_rank, d, bias=False)
        self.sinks = nn.Parameter(torch.zeros(self.heads).float())

    def forward(
        self, x: torch.Tensor, rotary: RotaryTable, rotation: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Attend from ``x [N, d]``; returns ``[N, d]``."""
        n = len(x)
        q = self.q_b_proj(rms_norm(self.q_a_proj(x), self.q_a_norm, self.rms_eps))
        q = rms_norm(q.view(n, self.heads, self.head_dim), None, self.rms_eps)
        kv = rms_norm(self.kv_proj(x), self.kv_norm, self.rms_eps).unsqueeze(1)
        q, kv = rotary.rotate(q, rotation), rotary.rotate(kv, rotation)
        output = attend(self.layer_idx, q, kv.squeeze(1), self.sinks)
        # V has K's rotation; its inverse at the query position leaves the relative distance.
        output = rotary.rotate(output.view(n, self.heads, self.head_dim), rotation.conj())
        grouped = output.flatten(1).unflatten(1, (self.groups, -1)).transpose(0, 1)
        grouped = torch.bmm(grouped, self.o_a_proj.transpose(1, 2)).transpose(0, 1)
        return self.o_b_proj(grouped.flatten(1))


def swiglu(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """Return ``silu(min(gate, limit)) * clamp(up)`` of the halves of ``gate_up [..., 2f]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)


class MoE(nn.Module):
    """Hash or top-k routed experts plus one shared expert.

    The shared expert is the last row of the stacked expert weights with a constant weight of 1, so
    a few experts take two matrix products together.
    """

    DENSE_EXPERTS = 16

    def __init__(self, config, layer_idx: int) -> None:
        super().__init__()
        e, d, f = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.experts, self.top_k = e, config.num_experts_per_tok
        self.limit, self.scoring = config.swiglu_limit, config.scoring_func
        self.scaling = config.routed_scaling_factor
        self.is_hash = config.mlp_layer_types[layer_idx] == "hash_moe"
        self.router = nn.Parameter(torch.empty(e, d))
        self.gate_up = nn.Parameter(torch.empty(e + 1, 2 * f, d))
        self.down = nn.Parameter(torch.empty(e + 1, f, d))  # input-major: no copy in _dense
        if self.is_hash:
            table = torch.zeros(config.vocab_size, self.top_k, dtype=torch.long)
            self.tid2eid = nn.Parameter(table, requires_grad=False)
        else:
            self.bias = nn.Parameter(torch.zeros(e).float(), requires_grad=False)

    def route(self, x: torch.Tensor, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the expert indices ``[N, k]`` and their weights ``[N, k]``."""
        logits = F.linear(x, self.router)
        if self.scoring == "sqrtsoftplus":
            scores = F.softplus(logits).sqrt()
        elif self.scoring == "sigmoid":
            scores = logits.sigmoid()
        else:
            scores = logits.softmax(-1)
        if self.is_hash:
            indices = self.tid2eid[input_ids]
        else:
            indices = (scores + self.bias).topk(self.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(1, indices)
        return indices, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scaling

    def forward(self, x: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        """Apply the experts to ``x [N, d]``; hash routing reads ``input_ids [N]``."""
        indices, weights = self.route(x, input_ids)
        if self.experts <= self.DENSE_EXPERTS:
            return self._dense(x, indices, weights)
        return self._sparse(x, indices, weights)

    def _dense(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        n, stacked = len(x), self.experts + 1
        dense = x.new_zeros(n, stacked)
        dense[:, -1] = 1.0
        dense.scatter_add_(1, indices, weights.to(x.dtype))
        inner = swiglu(
            F.linear(x, self.gate_up.flatten(0, 1)).unflatten(1, (stacked, -1)), self.limit
        )
        inner = (inner * dense.unsqueeze(-1)).flatten(1)
        return inner @ self.down.flatten(0, 1)

    def _sparse(
        self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        # Reads the experts on the host, so CUDA graphs cannot capture it (--disable-cuda-graph).
        output = swiglu(F.linear(x, self.gate_up[-1]), self.limit) @ self.down[-1]
        for expert in indices.unique().tolist():
            token, slot = (indices == expert).nonzero(as_tuple=True)
            inner = swiglu(F.linear(x[token], self.gate_up[expert]), self.limit)
            inner = (inner @ self.down[expert]) * weights[token, slot, None]
            output.index_add_(0, token, inner.to(output.dtype))
        return output


class DecoderLayer(nn.Module):
    """Attention and MoE, each between the collapse and the expand of a hyper-connection."""

    def __init__(self, config, layer_idx: int) -> None:
        super().__init__()
        self.rms_eps = config.rms_norm_eps
        self.attn_hc, self.ffn_hc = HyperConnection(config), HyperConnection(config)
        self.input_layernorm = nn.Parameter(torch.ones(config.hidden_size).float())
        self.post_attention_layernorm = nn.Parameter(torch.ones(config.hidden_size).float())
        self.self_attn = Attention(config, layer_idx)
        self.mlp = MoE(config, layer_idx)

    def forward(
        self,
        streams: torch.Tensor,
        input_ids: torch.Tensor,
        rotary: RotaryTable,
        rotation: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """Return the streams ``[N, m, d]`` after the layer."""
        x, post, comb = self.attn_hc.collapse(streams)
        x = rms_norm(x, self.input_layernorm, self.rms_eps)
        x = self.self_attn(x, rotary, rotation, attend)
        streams = self.attn_hc.expand(streams, x, post, comb)
        x, post, comb = self.ffn_hc.collapse(streams)
        x = rms_norm(x, self.post_attention_layernorm, self.rms_eps)
        return self.ffn_hc.expand(streams, self.mlp(x, input_ids), post, comb)


def add_final_state(core: nn.Module, config) -> None:
    """Add the parameters of :func:`final_state` to a core, under their checkpoint names."""
    m, d = config.hc_mult, config.hidden_size
    core.m, core.rms_eps, core.hc_eps = m, config.rms_norm_eps, config.hc_eps
    core.hc_head_fn = nn.Parameter(torch.empty(m, m * d).float())
    core.hc_head_base = nn.Parameter(torch.empty(m).float())
    core.hc_head_scale = nn.Parameter(torch.empty(1).float())
    core.norm = nn.Parameter(torch.ones(d).float())


def final_state(core: nn.Module, streams: torch.Tensor) -> torch.Tensor:
    """Collapse ``[N, m, d]`` streams with the core's ``hc_head`` and norm them: ``[N, d]``."""
    head = HcHead(core.hc_head_fn, core.hc_head_base, core.hc_head_scale)
    collapsed = head.collapse(streams.flatten(1), rms_eps=core.rms_eps, hc_eps=core.hc_eps)
    return rms_norm(collapsed, core.norm, core.rms_eps)


class DeepseekV4Core(nn.Module):
    """The target's layers, from embeddings to the pre-collapse residual and the final state."""

    def __init__(self, config) -> None:
        super().__init__()
        check_config(config)
        self.rotary = RotaryTable(config)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        add_final_state(self, config)

    def forward(
        self,
        embeddings: torch.Tensor,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        trace: list[torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run ``N`` tokens; append the streams ``[N, m, d]`` after every layer to ``trace``.

        Returns:
            The normed final state ``[N, d]`` and the pre-collapse residual ``[N, m * d]``.
        """
        streams = embeddings.unsqueeze(1).repeat(1, self.m, 1)
        rotation = self.rotary.at(positions)
        for layer in self.layers:
            streams = layer(streams, input_ids, self.rotary, rotation, attend)
            if trace is not None:
                trace.append(streams)
        return final_state(self, streams), streams.flatten(1)
