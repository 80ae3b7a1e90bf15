"""Entry point of the ``sglang.srt.platforms`` group; imports nothing heavy."""

from __future__ import annotations

import os

PLATFORM = "sglang_hyperdflash.cpu.platform:TorchCpuPlatform"
ATTENTION_BACKEND = "torch_reference"


def is_active() -> bool:
    """Whether our CPU platform serves this process.

    Only where torch finds no accelerator of any kind (CUDA, ROCm, XPU, MPS, NPU, MUSA, ...), and
    when SGLang's own CPU engine is not asked for: out-of-tree platforms come before SGLang's own.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return False
    import torch

    return not torch.accelerator.is_available()


def calm_threads() -> None:
    """Give processes to come one thread each, which does not spin; a user's own choice stays.

    Waiting threads of OpenMP spin, so that a server beside any other work takes several times as
    long; a model that is small enough for this platform gains nothing from more of them.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def activate() -> str | None:
    """Return the platform's import path, or None to leave the choice to SGLang."""
    return PLATFORM if is_active() else None
