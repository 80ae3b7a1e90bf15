"""A small DeepSeek-V4 checkpoint of random weights under DeepSeek's own tensor names, and drafters.

SGLang's loader and transformers both read it. Every kind of layer is there: hash and learned
routing, no compression, ratio 4 with its index, ratio 128. Head sizes are V4's own: the cache's
layout depends on them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch

from sglang_hyperdflash.training.drafter import DrafterShape
from tests.engine.drafters import write_untrained

CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 1024,
    "hidden_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "o_groups": 2,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "num_hash_layers": 1,
    "hidden_act": "silu",
    "swiglu_limit": 2.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "sliding_window": 128,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 1024},
    "num_nextn_predict_layers": 1,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "compress_ratios": [0, 4, 128, 4, 128, 0],
    "bos_token_id": 0,
    "eos_token_id": 1,
}
DRAFT = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate_size": 128}
MASK_TOKEN = 1000
BF16, FP32 = torch.bfloat16, torch.float32
Shapes = Iterator[tuple[str, tuple[int, ...], torch.dtype]]


def _compressor(name: str, ratio: int, width: int) -> Shapes:
    series = 2 if ratio == 4 else 1
    d = CONFIG["hidden_size"]
    yield f"{name}.ape", (ratio, series * width), FP32
    for part in ("wkv", "wgate"):
        yield f"{name}.{part}.weight", (series * width, d), BF16
    yield f"{name}.norm.weight", (width,), BF16


def _attention(name: str, ratio: int) -> Shapes:
    c = CONFIG
    d, heads, width, rank = (
        c[key] for key in ("hidden_size", "num_attention_heads", "head_dim", "q_lora_rank")
    )
    groups, out_rank = c["o_groups"], c["o_lora_rank"]
    yield f"{name}.attn_sink", (heads,), FP32
    yield f"{name}.wq_a.weight", (rank, d), BF16
    yield f"{name}.q_norm.weight", (rank,), BF16
    yield f"{name}.wq_b.weight", (heads * width, rank), BF16
    yield f"{name}.wkv.weight", (width, d), BF16
    yield f"{name}.kv_norm.weight", (width,), BF16
    yield f"{name}.wo_a.weight", (groups * out_rank, heads * width // groups), BF16
    yield f"{name}.wo_b.weight", (d, groups * out_rank), BF16
    if ratio:
        yield from _compressor(f"{name}.compressor", ratio, width)
    if ratio == 4:
        index = c["index_n_heads"], c["index_head_dim"]
        yield f"{name}.indexer.wq_b.weight", (index[0] * index[1], rank), BF16
        yield f"{name}.indexer.weights_proj.weight", (index[0], d), BF16
        yield from _compressor(f"{name}.indexer.compressor", ratio, index[1])


def _experts(name: str, hashed: bool) -> Shapes:
    c = CONFIG
    d, width, experts = (c[k] for k in ("hidden_size", "moe_intermediate_size", "n_routed_experts"))
    yield f"{name}.gate.weight", (experts, d), BF16
    if hashed:
        yield f"{name}.gate.tid2eid", (c["vocab_size"], c["num_experts_per_tok"]), torch.int64
    else:
        yield f"{name}.gate.bias", (experts,), FP32
    for expert in [f"experts.{e}" for e in range(experts)] + ["shared_experts"]:
        for part in ("w1", "w3"):
            yield f"{name}.{expert}.{part}.weight", (width, d), BF16
        yield f"{name}.{expert}.w2.weight", (d, width), BF16


def _layer(name: str, ratio: int, hashed: bool) -> Shapes:
    d, m = CONFIG["hidden_size"], CONFIG["hc_mult"]
    mixes = m * (2 + m)
    for part in ("attn", "ffn"):
        yield f"{name}.{part}_norm.weight", (d,), BF16
        yield f"{name}.hc_{part}_fn", (mixes, m * d), FP32
        yield f"{name}.hc_{part}_base", (mixes,), FP32
        yield f"{name}.hc_{part}_scale", (3,), FP32
    yield from _attention(f"{name}.attn", ratio)
    yield from _experts(f"{name}.ffn", hashed)


def tensors() -> Shapes:
    """Name, shape and dtype of every tensor of the checkpoint."""
    vocabulary, d, m = (CONFIG[key] for key in ("vocab_size", "hidden_size", "hc_mult"))
    for name in ("embed", "head"):
        yield f"{name}.weight", (vocabulary, d), BF16
    yield "norm.weight", (d,), BF16
    yield "hc_head_fn", (m, m * d), FP32
    yield "hc_head_base", (m,), FP32
    yield "hc_head_scale", (1,), FP32
    for i in range(CONFIG["num_hidden_layers"]):
        hashed = i < CONFIG["num_hash_layers"]
        yield from _layer(f"layers.{i}", CONFIG["compress_ratios"][i], hashed)


def mtp_tensors() -> Shapes:
    """Those of its multi-token-prediction layer, which EAGLE drafts with."""
    d, m = CONFIG["hidden_size"], CONFIG["hc_mult"]
    for name in ("enorm", "hnorm", "norm"):
        yield f"mtp.0.{name}.weight", (d,), BF16
    for name in ("e_proj", "h_proj"):
        yield f"mtp.0.{name}.weight", (d, d), BF16
    yield "mtp.0.hc_head_fn", (m, m * d), FP32
    yield "mtp.0.hc_head_base", (m,), FP32
    yield "mtp.0.hc_head_scale", (1,), FP32
    yield from _layer("mtp.0", CONFIG["compress_ratios"][-1], hashed=False)


def _drawn(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Weights that make every token of a context, every path and every bias matter."""
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if name.endswith("tid2eid"):
        experts = CONFIG["n_routed_experts"]
        return torch.rand(shape[0], experts, generator=draw).argsort(1)[:, : shape[1]].contiguous()
    values = torch.randn(shape, generator=draw)
    if "norm" in name or name.endswith("scale"):
        values = 1 + 0.1 * values
    elif name.endswith("gate.bias"):
        values = 0.3 * values
    elif len(shape) == 1 or name.endswith("ape"):
        values = 2 * values
    elif not name.startswith("embed"):
        values = 2 * values * shape[-1] ** -0.5
    return values.to(dtype)


def write_target(folder: Path) -> Path:
    """The checkpoint in ``folder``."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    every = chain(tensors(), mtp_tensors())
    save_file({name: _drawn(name, *rest) for name, *rest in every}, folder / "model.safetensors")
    return folder


def write_drafter(folder: Path, **sizes: int) -> Path:
    """An untrained drafter whose blocks differ; ``sizes`` are those of a ``DrafterShape``."""
    shape = DrafterShape(**DRAFT, **sizes)
    return write_untrained(folder, CONFIG, shape, MASK_TOKEN)
