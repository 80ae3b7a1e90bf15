"""New weights for a drafter that serves: in place, so captured CUDA graphs keep their addresses.

Kernels of ours read the weights themselves. What SGLang derives from them when the worker is made
is computed again, into the same memory. K/V that the old weights wrote stay: they age out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from sglang_hyperdflash.draft.checkpoint import checked_tensors, expected_tensors, weight_files
from sglang_hyperdflash.draft.config import load_config
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError


def read_drafter(
    folder: str, model: Any, gather: Callable[[str], list[str]]
) -> dict[str, torch.Tensor]:
    """The tensors of a drafter in host memory, checked against the served draft ``model``.

    Args:
        gather: gives what is wrong with them on every rank, "" where nothing is.

    Raises:
        HyperDFlashConfigError: on every rank, if one of them cannot use the drafter.
    """
    tensors, wrong = {}, ""
    try:
        config, served = load_config(folder), model.hyperdflash_config
        for name in (each.name for each in fields(served)):
            expected, given = getattr(served, name), getattr(config, name)
            if expected != given:
                raise HyperDFlashConfigError(
                    f"expected a drafter with {name}={expected}, as the one that is served; "
                    f"found {given}."
                )
        # Not mapped: a file that is cut short meanwhile must not end the server.
        files = (load_file(file, backend="pread") for file in weight_files(Path(folder)))
        stored = (pair for tensors_of_file in files for pair in tensors_of_file.items())
        tensors = dict(checked_tensors(stored, expected_tensors(model.raw_config, served)))
    except (HyperDFlashConfigError, OSError, SafetensorError) as error:
        wrong = f"{folder}: {error}"
    for each in gather(wrong):
        if each:
            raise HyperDFlashConfigError(each)
    return tensors


def rebuild(fused_kv: Any, layers: Any) -> None:
    """Stack the layers' K/V projections and K norms again, in place.

    Seam: ``FusedKVMaterializeHelper.__init__``; the layers' own path derives nothing.

    Args:
        fused_kv: the helper of SGLang's worker, or None. layers: the drafter's.
    """
    if fused_kv is None:
        return
    columns = fused_kv.flat_kv_weight_t.chunk(fused_kv.n_layers, 1)
    for into, norm, layer in zip(columns, fused_kv.k_norm_weights, layers, strict=True):
        attention = layer.self_attn
        first, last = attention.q_size, attention.q_size + 2 * attention.kv_size
        into.copy_(attention.qkv_proj.weight[first:last].T)
        norm.copy_(attention.k_norm.weight)
