"""Names of DeepSeek-V4 tensors, from transformers' or DeepSeek's scheme to the portable core's."""

from __future__ import annotations

import re

# Patterns from DeepSeek's names to transformers'; order matters.
_DEEPSEEK_NAMES = (
    (r"^embed\.weight$", "embed_tokens.weight"),
    (r"^head\.weight$", "lm_head.weight"),
    (r"^hc_head_(fn|base|scale)$", r"hc_head.hc_\1"),
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.attn\.attn_sink$", ".self_attn.sinks"),
    (r"\.attn\.wq_a\.", ".self_attn.q_a_proj."),
    (r"\.attn\.q_norm\.", ".self_attn.q_a_norm."),
    (r"\.attn\.wq_b\.", ".self_attn.q_b_proj."),
    (r"\.attn\.wkv\.", ".self_attn.kv_proj."),
    (r"\.attn\.(kv_norm|norm)\.", ".self_attn.kv_norm."),
    (r"\.attn\.wo_a\.", ".self_attn.o_a_proj."),
    (r"\.attn\.wo_b\.", ".self_attn.o_b_proj."),
    (r"\.ffn\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.ffn\.", ".mlp."),
    (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
    (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
    (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
)

_CORE_NAMES = (
    (r"^hc_head\.hc_(fn|base|scale)$", r"hc_head_\1"),
    (r"^norm\.weight$", "norm"),
    (r"\.(input_layernorm|post_attention_layernorm|q_a_norm|kv_norm)\.weight$", r".\1"),
    (r"\.o_a_proj\.weight$", ".o_a_proj"),
    (r"\.mlp\.gate\.weight$", ".mlp.router"),
    (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.bias"),
    (r"\.mlp\.gate\.tid2eid$", ".mlp.tid2eid"),
)


def core_name(name: str) -> str:
    """Return a checkpoint name of either scheme in the core's scheme, without ``model.``."""
    name = name.removeprefix("model.")
    for pattern, replacement in (*_DEEPSEEK_NAMES, *_CORE_NAMES):
        name = re.sub(pattern, replacement, name)
    return name
