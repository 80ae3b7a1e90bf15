"""New weights for a drafter that serves: in place, so captured CUDA graphs keep their addresses.

Kernels of ours read the weights themselves. What SGLang derives from them when the worker is made
is computed again, into the same memory. K/V that the old weights wrote stay: they age out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    folder: str, model: Any, gather: Callable[[str], list[str]] | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of a drafter in host memory, checked against the served draft ``model``.

    Args:
        gather: what is wrong with them on each rank, or "", of all ranks; None for one rank.

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
        stored = (one for file in weight_files(Path(folder)) for one in load_file(file).items())
        tensors = dict(checked_tensors(stored, expected_tensors(model.raw_config, served)))
    except (HyperDFlashConfigError, OSError, SafetensorError) as error:
        wrong = f"{folder}: {error}"
    for each in [wrong] if gather is None else gather(wrong):
        if each:
            raise HyperDFlashConfigError(each)
    return tensors


@contextmanager
def replacing(worker: Any) -> Iterator[None]:
    """While weights are replaced: after the round that may still run, before the next one.

    Then derived values are rebuilt, and what was learnt of the old drafter is forgotten, its rounds
    without a result included.

    Args:
        worker: the ``HyperDFlashWorker``. Its rounds run on ``ModelRunner.forward_stream`` with
            overlap scheduling, else on the current stream.
    """
    device = torch.get_device_module(worker.device)
    rounds, current = worker.model_runner.forward_stream, device.current_stream()
    rounds.wait_stream(current)
    with torch.no_grad(), device.stream(rounds):
        yield
        rebuild(worker)
    current.wait_stream(rounds)
    for launched in worker.rounds:
        launched.learns = False
    if worker.width_control.policy is not None:
        worker.width_control.policy.forget()


def rebuild(worker: Any) -> None:
    """Stack the layers' K/V projections and K norms again, in place.

    Seam: ``FusedKVMaterializeHelper.__init__``; the layers' own path derives nothing.
    """
    helper = worker._fused_kv_helper
    if helper is None:
        return
    columns = helper.flat_kv_weight_t.chunk(helper.n_layers, 1)
    layers = worker.draft_model.layers
    for into, norm, layer in zip(columns, helper.k_norm_weights, layers, strict=True):
        own = layer.self_attn
        into.copy_(own.qkv_proj.weight[own.q_size : own.q_size + 2 * own.kv_size].T)
        norm.copy_(own.k_norm.weight)
