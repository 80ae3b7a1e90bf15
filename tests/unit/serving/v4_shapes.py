"""DeepSeek-V4's published dimensions, as the ``config.json`` that SGLang reads."""

import json
from pathlib import Path

import torch

from sglang_hyperdflash.draft.hc_head import HcHead
from sglang_hyperdflash.targets.files import TargetFacts
from sglang_hyperdflash.training.drafter import DrafterShape, draft_config
from tests.conftest import ROOT


def sample(name: str) -> dict:
    """Of the samples that ``hyperdflash plan`` comes with."""
    path = ROOT / "examples" / "deepseek_v4_flash_config" / name / "config.json"
    fields = json.loads(path.read_text())
    return {name: value for name, value in fields.items() if name != "_note"}


FLASH = sample("target")
PRO = FLASH | {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
    "routed_scaling_factor": 2.5,
    "index_topk": 1024,
    "compress_ratios": [128, *[128, 4] * 30, 0],
}
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
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def draft_folder(folder: Path, shape: dict, drafter: DrafterShape) -> Path:
    """A drafter for it without any weights, since nothing is loaded."""
    m, d = shape["hc_mult"], shape["hidden_size"]
    hc_head = HcHead(torch.zeros(m, m * d), torch.zeros(m), torch.ones(1))
    facts = TargetFacts.from_config(shape)
    return target_folder(folder, draft_config(facts, hc_head, drafter, 128815))
