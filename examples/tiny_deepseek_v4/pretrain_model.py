"""The target's shape, and forms of its modules that train fast on a CPU.

The model is transformers' ``DeepseekV4ForCausalLM``; :func:`make_model` puts equal functions in
the place of three of its modules' (to rounding), which the trained checkpoint knows nothing of.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import MethodType

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, DeepseekV4Config, DeepseekV4ForCausalLM

ATTENTION = "shared_key"
EMBEDDING_STD, NORM_SCALE, READ_BIAS, KEEP_BIAS = 0.5, 0.06, 1.0, 3.0
PORTABLE_ARCHITECTURE = "PortableDeepSeekV4ForCausalLM"


def make_config(tokenizer, layers: int, expert_width: int) -> DeepseekV4Config:
    return DeepseekV4Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        moe_intermediate_size=expert_width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        qk_rope_head_dim=32,
        q_lora_rank=128,
        o_groups=2,
        o_lora_rank=128,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        routed_scaling_factor=1.0,
        mlp_layer_types=["hash_moe"] + ["moe"] * (layers - 1),
        layer_types=["sliding_attention"] * layers,
        sliding_window=2048,
        max_position_embeddings=2048,
        hc_mult=4,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def dense_experts(self, hidden_states, top_k_index, top_k_weights):
    """All experts as one wide MLP, weighted by the router: two products of fixed shapes."""
    tokens = hidden_states.shape[0]
    weights = torch.zeros(tokens, self.num_experts, dtype=top_k_weights.dtype)
    weights = weights.scatter_add(1, top_k_index, top_k_weights)
    inner = F.linear(hidden_states, self.gate_up_proj.flatten(0, 1))
    inner = self._apply_gate(inner.view(tokens, self.num_experts, -1)) * weights.unsqueeze(-1)
    return F.linear(inner.flatten(1), self.down_proj.transpose(0, 1).flatten(1))


def shared_key_attention(module, query, key, value, attention_mask, scaling, **_):
    """Attention with sinks over one key head: ``query [b, h, s, d]``, ``key [b, 1, t, d]``."""
    b, h, s, d = query.shape
    scores = torch.bmm(query.reshape(b, h * s, d), key.squeeze(1).transpose(1, 2))
    scores = scores.view(b, h, s, -1).float() * scaling + attention_mask
    sinks = module.sinks.view(1, -1, 1, 1)
    peak = torch.maximum(scores.amax(-1, keepdim=True), sinks).detach()
    weights = (scores - peak).exp()
    weights = weights / (weights.sum(-1, keepdim=True) + (sinks - peak).exp())
    output = torch.bmm(weights.to(value.dtype).view(b, h * s, -1), value.squeeze(1))
    return output.view(b, h, s, d).transpose(1, 2).contiguous(), None


def mix(post, comb, output, streams):
    """Streams after a block: ``comb^T streams + post output``, as sums of four products.

    A batched 4 x 4 product per token would cost more than the block itself.
    """
    mixed = sum(comb[..., j, :, None] * streams[..., j, None, :] for j in range(comb.shape[-1]))
    return post.unsqueeze(-1) * output.unsqueeze(-2) + mixed


def layer_forward(self, hidden_states, input_ids=None, **kwargs):
    """A decoder layer over ``[b, s, m, d]`` streams."""
    post, comb, collapsed = self.attn_hc(hidden_states)
    output, _ = self.self_attn(self.input_layernorm(collapsed), **kwargs)
    hidden_states = mix(post, comb, output, hidden_states)
    post, comb, collapsed = self.ffn_hc(hidden_states)
    output = self.mlp(self.post_attention_layernorm(collapsed), input_ids=input_ids)
    return mix(post, comb, output, hidden_states)


@torch.no_grad()
def initialise(model: DeepseekV4ForCausalLM) -> None:
    """Start values that transformers' class leaves to a checkpoint.

    Embeddings as large as what layers add, else a token's identity drowns in the residual and
    words are copied late. The LM head is the embedding, so that what copies one word copies all,
    and the last norm brings logits down to about one. Paths that keep to themselves, each read
    most by every fourth block (hyper-connections, Zhu et al. 2024, section 3): zeros would make
    all paths their mean.
    """
    model.model.embed_tokens.weight.normal_(std=EMBEDDING_STD)
    model.lm_head.weight = model.model.embed_tokens.weight
    model.model.norm.weight.fill_(NORM_SCALE)
    paths = model.config.hc_mult
    for i, layer in enumerate(model.model.layers):
        for j, connection in enumerate((layer.attn_hc, layer.ffn_hc)):
            read, _, mixed = connection.base.split([paths, paths, paths * paths])
            read.fill_(-READ_BIAS)
            read[(2 * i + j) % paths] = READ_BIAS
            mixed.view(paths, paths).fill_diagonal_(KEEP_BIAS)


def make_model(config: DeepseekV4Config, *, seed: int = 0) -> DeepseekV4ForCausalLM:
    """A fresh model in fp32 with a random hash table; it needs a mask, see ``token_losses``."""
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(config)
    initialise(model)
    AttentionInterface.register(ATTENTION, shared_key_attention)
    model.config._attn_implementation = ATTENTION
    generator = torch.Generator().manual_seed(seed)
    for layer in model.model.layers:
        layer.forward = MethodType(layer_forward, layer)
        layer.mlp.experts.forward = MethodType(dense_experts, layer.mlp.experts)
        if layer.mlp.is_hash:
            table = layer.mlp.gate.tid2eid
            order = torch.rand(table.shape[0], config.n_routed_experts, generator=generator)
            table.copy_(order.argsort(dim=1)[:, : table.shape[1]])
    return model


def token_losses(model, batch) -> torch.Tensor:
    """Nats of each learned token, ``[learned]`` fp32, in the order of ``batch.learned[:, 1:]``."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(
            input_ids=batch.tokens[:, :-1],
            attention_mask={"sliding_attention": batch.mask},
            use_cache=False,
        ).last_hidden_state
        wanted = batch.learned[:, 1:]
        logits = model.lm_head(hidden[wanted])
    return F.cross_entropy(logits.float(), batch.tokens[:, 1:][wanted], reduction="none")


def export(model, tokenizer, out: Path) -> None:
    """Write the checkpoint: bf16 except what transformers keeps in fp32. Changes the model."""
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    keep = tuple(model._keep_in_fp32_modules_strict)
    for name, parameter in model.named_parameters():
        if not any(part in keep for part in name.split(".")):
            parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(out)
    path = out / "config.json"
    config = json.loads(path.read_text())
    config["architectures"] = [PORTABLE_ARCHITECTURE]  # what SGLang goes by
    config["v_head_dim"] = config["head_dim"]  # SGLang's default is DeepSeek-V3's
    path.write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save_pretrained(out)
