"""The files of a draft checkpoint, and checks of its tensors by name, shape, dtype and value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from sglang_hyperdflash.draft.config import HyperDFlashConfig
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def weight_files(folder: Path) -> list[Path]:
    """Return a drafter's weight files; raise ``HyperDFlashConfigError`` if there are none."""
    if files := sorted(folder.glob("*.safetensors")):
        return files
    raise HyperDFlashConfigError(
        f"{folder} holds no *.safetensors; pickled weights are not loaded. Export it again."
    )


def expected_tensors(raw: Mapping[str, Any], config: HyperDFlashConfig) -> dict[str, tuple]:
    """Return the name and shape of every tensor of a draft checkpoint.

    Args:
        raw: the ``config.json`` itself, for the Qwen3 fields.
        config: its checked view.
    """
    d, m = config.hidden_size, config.hc_mult
    head_dim = raw["head_dim"]
    q = raw["num_attention_heads"] * head_dim
    kv = raw["num_key_value_heads"] * head_dim
    f = raw["intermediate_size"]
    shapes: dict[str, tuple] = {"hidden_norm.weight": (d,), "norm.weight": (d,)}
    if config.reducer == "fc":
        shapes["fc.weight"] = (d, config.source_width)
    else:
        shapes |= {"reducer.fn": (m, m * d), "reducer.base": (m,), "reducer.scale": (1,)}
        shapes["reducer.path_norm"] = (m, d)
    if config.dependency is not None:
        v, r = config.vocab_size, config.dependency.rank
        shapes |= {"dependency.predecessor": (v, r), "dependency.successor": (v, r)}
        shapes["dependency.gate.weight"] = (r, d)
    for i in range(config.num_hidden_layers):
        prefix = f"layers.{i}."
        shapes |= {
            prefix + "input_layernorm.weight": (d,),
            prefix + "post_attention_layernorm.weight": (d,),
            prefix + "self_attn.q_proj.weight": (q, d),
            prefix + "self_attn.k_proj.weight": (kv, d),
            prefix + "self_attn.v_proj.weight": (kv, d),
            prefix + "self_attn.o_proj.weight": (d, q),
            prefix + "self_attn.q_norm.weight": (head_dim,),
            prefix + "self_attn.k_norm.weight": (head_dim,),
            prefix + "mlp.gate_proj.weight": (f, d),
            prefix + "mlp.up_proj.weight": (f, d),
            prefix + "mlp.down_proj.weight": (d, f),
        }
    return shapes


def checked_tensors(
    weights: Iterable[tuple[str, torch.Tensor]], expected: Mapping[str, tuple], whole: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors while checking them; a missing one raises when the stream ends.

    Args:
        whole: False if some of the checkpoint's tensors are enough.

    Raises:
        HyperDFlashConfigError: a tensor is missing, extra or repeated, has another shape, a dtype
            other than fp32, fp16 and bf16, or a value that is not finite.
    """
    seen: set[str] = set()
    for name, tensor in weights:
        shape, wrong = tuple(tensor.shape), None
        if name not in expected:
            wrong = (
                f"unexpected tensor {name} {shape}; expected only the {len(expected)} tensors its "
                "config.json describes"
            )
        elif name in seen:
            wrong = f"tensor {name} appears twice"
        elif shape != expected[name]:
            wrong = f"tensor {name} has shape {shape}; its config.json asks for {expected[name]}"
        elif tensor.dtype not in DTYPES:
            wrong = f"expected tensor {name} in fp32, fp16 or bf16, found {tensor.dtype}"
        elif not torch.isfinite(tensor).all():
            wrong = f"tensor {name} holds NaN or infinite values"
        if wrong is not None:
            raise HyperDFlashConfigError(
                f"draft checkpoint: {wrong}. Copy or export the drafter again."
            )
        seen.add(name)
        yield name, tensor
    missing = sorted(set(expected) - seen)
    if missing and whole:
        raise HyperDFlashConfigError(
            f"draft checkpoint: {len(missing)} tensors are missing: {', '.join(missing[:6])}"
            f"{' ...' if len(missing) > 6 else ''}. Copy or export the drafter again."
        )
