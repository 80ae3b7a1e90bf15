"""Entry point of the ``sglang.srt.platforms`` group; imports nothing heavy."""

from __future__ import annotations

import os

PLATFORM = "sglang_hyperdflash.reference.platform:ReferenceCpuPlatform"


def is_active() -> bool:
    """Whether the CPU reference platform serves this process.

    Only without a CUDA device, and when SGLang's own CPU engine is not asked for.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return False
    import torch

    return not torch.cuda.is_available()


def activate() -> str | None:
    """Return the platform's import path, or None to leave the choice to SGLang."""
    return PLATFORM if is_active() else None
