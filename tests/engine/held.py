"""A server plugin: the tensors that a running server is left with when its K/V pools are made."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import torch

HELD = "TEST_HELD"  # a folder: one file for the target, one for the drafter

# ``[bytes, shape]`` of each.
Tensors = list[tuple[int, list[int]]]


def tensors() -> dict[int, torch.Tensor]:
    """One tensor of every storage of this process, by address."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return {tensor.untyped_storage().data_ptr(): tensor for tensor in found}


def write_new(name: str, before: dict[int, torch.Tensor]) -> None:
    """Write down what has come since; nothing of before was freed, for it is still referred to."""
    new = [tensor for at, tensor in tensors().items() if at not in before]
    sizes: Tensors = [(x.untyped_storage().nbytes(), list(x.shape)) for x in new]
    (Path(os.environ[HELD]) / f"{name}.json").write_text(json.dumps(sizes))


def load() -> None:
    """SGLang's plugin entry point. Seams: ``alloc_memory_pool`` of both workers."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def target(original, self, *args: Any, **kwargs: Any) -> None:
        if self.is_draft_worker:
            return original(self, *args, **kwargs)
        before = tensors()
        original(self, *args, **kwargs)
        write_new("target", before)

    def drafter(original, self, *args: Any, **kwargs: Any) -> None:
        before = tensors()
        original(self, *args, **kwargs)
        write_new("drafter", before)

    worker = "sglang.srt.managers.tp_worker.TpModelWorker.alloc_memory_pool"
    HookRegistry.register(worker, target, HookType.AROUND)
    ours = "sglang_hyperdflash.serving.worker.HyperDFlashWorker.alloc_memory_pool"
    HookRegistry.register(ours, drafter, HookType.AROUND)


def drafter_bytes(
    tokens: int, cell: int, layers: int, *, page: int = 1, requests: int, window: int | None = None
) -> int:
    """What a drafter of blocks of seven takes besides its weights, for so many target tokens.

    Args:
        cell: bytes of one slot's K and V; layers: of them. requests: at most, for a window's rows.
    """
    addresses = 48 * layers  # of the buffers, and their strides
    if window is None:
        return cell * (tokens + page) + addresses
    blocks = 7 * requests
    ring = int(0.1 * tokens) - blocks
    pages = -(-(ring + blocks) // page) + 1
    # Slots of tokens, tokens of slots, the head, the slots of blocks, and two ranges.
    tables = 8 * (tokens + page + 1 + ring + 1 + 1 + blocks + window + 7)
    rows = (requests + 1) * (4 * (window + 7) + 8)
    return cell * pages * page + tables + rows + addresses


def total(found: Tensors) -> int:
    """Bytes of all of them."""
    return sum(size for size, _ in found)


def held(folder: Path, name: str) -> Tensors:
    """What was written down."""
    return [tuple(one) for one in json.loads((folder / f"{name}.json").read_text())]
