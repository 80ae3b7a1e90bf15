"""Operators with two implementations: a torch reference on a CPU, a Triton kernel on CUDA.

The reference is the specification; kernels are tested against it in Triton's interpreter. The
module of a kernel is imported by its first call: Triton itself needs seconds.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("hyperdflash", "FRAGMENT")


def define(schema: str, reference: Callable, kernel: str, fake: Callable) -> Callable[..., Any]:
    """``torch.ops.hyperdflash.NAME``, of the schema ``NAME(arguments) -> results``.

    Args:
        kernel: ``module:function`` that launches, with the schema's arguments in their order.
        fake: makes empty results from the same arguments, for tracing.
    """
    name = schema.partition("(")[0]
    module, _, function = kernel.partition(":")

    def launch(*arguments: Any) -> Any:
        device = next(a.device for a in arguments if isinstance(a, torch.Tensor))
        with torch.cuda.device(device):
            return getattr(importlib.import_module(module), function)(*arguments)

    _LIBRARY.define(schema)
    _LIBRARY.impl(name, reference, "CPU")
    _LIBRARY.impl(name, launch, "CUDA")
    torch.library.register_fake(f"hyperdflash::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.hyperdflash, name)
