"""DeepSeek-V4's published dimensions, as the ``config.json`` that SGLang reads."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from sglang_hyperdflash.draft.hc_head import HcHead
from sglang_hyperdflash.targets.files import TargetFacts
from sglang_hyperdflash.training.drafter import DrafterShape, draft_config


def _ratios(first: tuple[int, int], layers: int) -> list[int]:
    """Compression of each layer and, last, of the MTP layer."""
    return [*first, *(4 if i % 2 == 0 else 128 for i in range(layers - 2)), 0]


COMMON = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "head_dim": 512,
    "num_key_value_heads": 1,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 1024,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1048576,
    "sliding_window": 128,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    "num_nextn_predict_layers": 1,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "num_hash_layers": 3,
    "torch_dtype": "bfloat16",
}
FLASH = COMMON | {
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "routed_scaling_factor": 1.5,
    "index_topk": 512,
    "compress_ratios": _ratios((0, 0), 43),
}
PRO = COMMON | {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
    "routed_scaling_factor": 2.5,
    "index_topk": 1024,
    "compress_ratios": _ratios((128, 128), 61),
}
SHAPES = {"flash": FLASH, "pro": PRO}
# A checkpoint that carries its DSPARK draft: three stages behind these layers, blocks of five.
DSPARK = {
    "dspark_block_size": 5,
    "dspark_markov_rank": 256,
    "dspark_noise_token_id": 128815,
    "dspark_target_layer_ids": [1, 20, 41],
}
# V4.1 as far as its start-up rules look: Flash's sizes under V4.1's type, no hc_head.
V41 = FLASH | {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "hc_pre_from_prev_sublayer": True,
    "qk_nope_head_dim": 448,
    "v_head_dim": 512,
    "kv_source_layer_ids": list(range(43)),
    "index_source_layer_ids": [i for i in range(43) if FLASH["compress_ratios"][i] == 4],
}


def target_folder(folder: Path, shape: dict) -> Path:
    """A target of which only the configuration exists."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def draft_folder(folder: Path, shape: dict, drafter: DrafterShape) -> Path:
    """A drafter for it; its weights file is there and empty, since nothing is loaded."""
    m, d = shape["hc_mult"], shape["hidden_size"]
    hc_head = HcHead(torch.zeros(m, m * d), torch.zeros(m), torch.ones(1))
    facts = TargetFacts.from_config(shape)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(draft_config(facts, hc_head, drafter, 128815)))
    (folder / "model.safetensors").touch()
    return folder
