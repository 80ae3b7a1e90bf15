"""A small DeepSeek-V4 checkpoint of random weights under DeepSeek's own tensor names, and drafters.

SGLang's loader and transformers both read it. Every kind of layer is there: hash and learned
routing, no compression, ratio 4 with its index, ratio 128. Head sizes are V4's own: the cache's
layout depends on them.
"""

import json
import re
import zlib
from pathlib import Path

import torch

from sglang_hyperdflash.training.drafter import DrafterShape
from tests.engine.drafters import write_untrained

CONFIG = json.loads(Path(__file__).with_name("config.json").read_text())
DRAFT = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate_size": 128}
MASK_TOKEN = 1000
LAYERS = CONFIG["num_hidden_layers"]
# What transformers calls otherwise than DeepSeek does; its last layer here is the MTP layer.
NAMES = {
    "model.": "",
    "embed_tokens": "embed",
    "attn.norm": "attn.kv_norm",
    "hc_head.hc": "hc_head",
    f"layers.{LAYERS}.": "mtp.0.",
}
FP32 = re.compile(r"hc_|attn_sink$|\.ape$|gate\.bias$")


def shapes() -> dict[str, tuple[int, ...]]:
    """Of every tensor by its name, those of the multi-token-prediction layer too."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    config = DeepseekV4Config.from_dict(CONFIG | {"num_hidden_layers": LAYERS + 1})
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(config)
    every, width = {}, CONFIG["hidden_size"]
    for name, tensor in revert_weight_conversion(model, model.state_dict()).items():
        for theirs, deepseeks in NAMES.items():
            name = name.replace(theirs, deepseeks)
        every[name] = tuple(tensor.shape)
    every |= {f"mtp.0.{name}": every[name] for name in every if name.startswith("hc_head")}
    every |= {f"mtp.0.{name}.weight": (width,) for name in ("enorm", "hnorm", "norm")}
    return every | {f"mtp.0.{name}.weight": (width, width) for name in ("e_proj", "h_proj")}


def _drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
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
    return values.to(torch.float32 if FP32.search(name) else torch.bfloat16)


def write_target(folder: Path) -> Path:
    """The checkpoint in ``folder``."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    weights = {name: _drawn(name, shape) for name, shape in shapes().items()}
    save_file(weights, folder / "model.safetensors")
    return folder


def write_drafter(folder: Path, **sizes: int) -> Path:
    """An untrained drafter whose blocks differ; ``sizes`` are those of a ``DrafterShape``."""
    shape = DrafterShape(**DRAFT, **sizes)
    return write_untrained(folder, CONFIG, shape, MASK_TOKEN)
