"""New weights for a drafter that serves: in place, so captured CUDA graphs keep their addresses.

Kernels of ours read the weights themselves. What SGLang derives from them when the worker is made
is computed again, into the same memory. K/V that the old weights wrote stay: they age out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def in_own_memory(
    tensors: Iterable[tuple[str, torch.Tensor]], pinned: bool
) -> dict[str, torch.Tensor]:
    """Copies in host memory: a file that is cut short later cannot end the server.

    Args:
        pinned: for copies to a GPU.
    """
    return {name: t.pin_memory() if pinned else t.clone() for name, t in tensors}


@contextmanager
def replacing(worker: Any) -> Iterator[None]:
    """While weights are replaced: after the round that may still run, before the next one.

    Then derived values are rebuilt, and what was learnt of the old drafter is forgotten.

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
        worker.drafter.draft_temperature.reset()
    current.wait_stream(rounds)
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
