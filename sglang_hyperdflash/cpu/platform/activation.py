"""The entry point in the group ``sglang.srt.platforms``; imports nothing heavy."""

from __future__ import annotations

import os

from sglang_hyperdflash import CPU_PLATFORM

PLATFORM = "sglang_hyperdflash.cpu.platform.torch_cpu:TorchCpuPlatform"
ATTENTION_BACKEND = "torch_reference"


def is_active() -> bool:
    """Whether this process uses the CPU platform.

    It does if ``HYPERDFLASH_CPU`` is 1 and torch finds no accelerator of any kind.
    """
    if os.environ.get(CPU_PLATFORM) != "1":
        return False
    import torch

    return not torch.accelerator.is_available()


def activate() -> str | None:
    """Return the platform's import path, or None to leave the choice to SGLang."""
    return PLATFORM if is_active() else None
