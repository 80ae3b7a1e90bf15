"""Entry point of the ``sglang.srt.platforms`` group; imports nothing heavy."""

from __future__ import annotations

import os

from sglang_hyperdflash import CPU_PLATFORM

PLATFORM = "sglang_hyperdflash.cpu.platform.torch_cpu:TorchCpuPlatform"
ATTENTION_BACKEND = "torch_reference"


def is_active() -> bool:
    """Whether our CPU platform serves this process.

    Only where ``HYPERDFLASH_CPU`` is 1, and torch finds no accelerator of any kind (CUDA, ROCm,
    XPU, MPS, NPU, MUSA, ...).
    """
    if os.environ.get(CPU_PLATFORM) != "1":
        return False
    import torch

    return not torch.accelerator.is_available()


def limit_threads() -> None:
    """Default later processes to one OpenMP thread that does not spin; the user's settings win.

    Waiting OpenMP threads spin, which makes a server several times slower when the machine has
    other work; a model small enough for this platform gains nothing from more threads.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def activate() -> str | None:
    """Return the platform's import path, or None to leave the choice to SGLang."""
    return PLATFORM if is_active() else None
