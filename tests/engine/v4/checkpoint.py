"""A small DeepSeek-V4 checkpoint of random weights under DeepSeek's own tensor names, and drafters.

SGLang's loader and transformers both read it. Every kind of layer is there: hash and learned
routing, no compression, ratio 4 with its index, ratio 128. Head sizes are V4's own: the cache's
layout depends on them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch

from sglang_hyperdflash.training.drafter import DrafterShape
from tests.engine.drafters import write_untrained

CONFIG = json.loads(Path(__file__).with_name("config.json").read_text())
DRAFT = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate_size": 128}
MASK_TOKEN = 1000
BF16, FP32 = torch.bfloat16, torch.float32
WIDTH, STREAMS, VOCABULARY = CONFIG["hidden_size"], CONFIG["hc_mult"], CONFIG["vocab_size"]
HEADS, HEAD, RANK = CONFIG["num_attention_heads"], CONFIG["head_dim"], CONFIG["q_lora_rank"]
Shapes = Iterator[tuple[str, tuple[int, ...], torch.dtype]]


def _mixing(name: str, mixes: int, scales: int) -> Shapes:
    """Of hyper-connections."""
    yield f"{name}_fn", (mixes, STREAMS * WIDTH), FP32
    yield f"{name}_base", (mixes,), FP32
    yield f"{name}_scale", (scales,), FP32


def _compressor(name: str, ratio: int, width: int) -> Shapes:
    series = 2 if ratio == 4 else 1
    yield f"{name}.ape", (ratio, series * width), FP32
    for part in ("wkv", "wgate"):
        yield f"{name}.{part}.weight", (series * width, WIDTH), BF16
    yield f"{name}.norm.weight", (width,), BF16


def _attention(name: str, ratio: int) -> Shapes:
    groups, out_rank = CONFIG["o_groups"], CONFIG["o_lora_rank"]
    yield f"{name}.attn_sink", (HEADS,), FP32
    for part, shape in (
        ("wq_a", (RANK, WIDTH)),
        ("q_norm", (RANK,)),
        ("wq_b", (HEADS * HEAD, RANK)),
        ("wkv", (HEAD, WIDTH)),
        ("kv_norm", (HEAD,)),
        ("wo_a", (groups * out_rank, HEADS * HEAD // groups)),
        ("wo_b", (WIDTH, groups * out_rank)),
    ):
        yield f"{name}.{part}.weight", shape, BF16
    if ratio:
        yield from _compressor(f"{name}.compressor", ratio, HEAD)
    if ratio == 4:
        heads, width = CONFIG["index_n_heads"], CONFIG["index_head_dim"]
        yield f"{name}.indexer.wq_b.weight", (heads * width, RANK), BF16
        yield f"{name}.indexer.weights_proj.weight", (heads, WIDTH), BF16
        yield from _compressor(f"{name}.indexer.compressor", ratio, width)


def _experts(name: str, hashed: bool) -> Shapes:
    width, experts = CONFIG["moe_intermediate_size"], CONFIG["n_routed_experts"]
    yield f"{name}.gate.weight", (experts, WIDTH), BF16
    if hashed:
        yield f"{name}.gate.tid2eid", (VOCABULARY, CONFIG["num_experts_per_tok"]), torch.int64
    else:
        yield f"{name}.gate.bias", (experts,), FP32
    for expert in [f"experts.{e}" for e in range(experts)] + ["shared_experts"]:
        for part in ("w1", "w3"):
            yield f"{name}.{expert}.{part}.weight", (width, WIDTH), BF16
        yield f"{name}.{expert}.w2.weight", (WIDTH, width), BF16


def _layer(name: str, i: int, hashed: bool = False) -> Shapes:
    for part in ("attn", "ffn"):
        yield f"{name}.{part}_norm.weight", (WIDTH,), BF16
        yield from _mixing(f"{name}.hc_{part}", STREAMS * (2 + STREAMS), 3)
    yield from _attention(f"{name}.attn", CONFIG["compress_ratios"][i])
    yield from _experts(f"{name}.ffn", hashed)


def tensors() -> Shapes:
    """Name, shape and dtype of every tensor, those of the multi-token-prediction layer too."""
    for name in ("embed", "head"):
        yield f"{name}.weight", (VOCABULARY, WIDTH), BF16
    yield "norm.weight", (WIDTH,), BF16
    yield from _mixing("hc_head", STREAMS, 1)
    for i in range(CONFIG["num_hidden_layers"]):
        yield from _layer(f"layers.{i}", i, hashed=i < CONFIG["num_hash_layers"])
    for name in ("enorm", "hnorm", "norm"):
        yield f"mtp.0.{name}.weight", (WIDTH,), BF16
    for name in ("e_proj", "h_proj"):
        yield f"mtp.0.{name}.weight", (WIDTH, WIDTH), BF16
    yield from _mixing("mtp.0.hc_head", STREAMS, 1)
    yield from _layer("mtp.0", -1)


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
    weights = {name: _drawn(name, *rest) for name, *rest in tensors()}
    save_file(weights, folder / "model.safetensors")
    return folder


def write_drafter(folder: Path, **sizes: int) -> Path:
    """An untrained drafter whose blocks differ; ``sizes`` are those of a ``DrafterShape``."""
    shape = DrafterShape(**DRAFT, **sizes)
    return write_untrained(folder, CONFIG, shape, MASK_TOKEN)
