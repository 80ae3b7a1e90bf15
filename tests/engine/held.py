"""A server plugin: the tensors that a running server is left with when its K/V pools are made."""

import gc
import json
import os
from functools import partial
from pathlib import Path

import torch

from tests.engine.v4 import plugin

HELD = "TEST_HELD"  # a folder for ``target.json`` and ``drafter.json``: ``[bytes, shape]`` of each


def tensors() -> dict[int, torch.Tensor]:
    """One tensor of every storage of this process, by address."""
    gc.collect()
    every = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return {tensor.untyped_storage().data_ptr(): tensor for tensor in every}


def record(name: str, original, self, *args, **kwargs) -> None:
    """Write down what has come since; nothing of before was freed, for it is still referred to."""
    if name == "target" and self.is_draft_worker:
        return original(self, *args, **kwargs)
    before = tensors()
    original(self, *args, **kwargs)
    new = [tensor for address, tensor in tensors().items() if address not in before]
    sizes = [(x.untyped_storage().nbytes(), list(x.shape)) for x in new]
    (Path(os.environ[HELD]) / f"{name}.json").write_text(json.dumps(sizes))


def load() -> None:
    """SGLang's plugin entry point, of the replacements too."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    plugin.load()
    for name, worker in (
        ("target", "sglang.srt.managers.tp_worker.TpModelWorker"),
        ("drafter", "sglang_hyperdflash.serving.worker.HyperDFlashWorker"),
    ):
        HookRegistry.register(f"{worker}.alloc_memory_pool", partial(record, name), HookType.AROUND)
