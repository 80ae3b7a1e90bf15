"""Operators with two implementations: a torch reference on a CPU, a Triton kernel on CUDA.

The reference is the specification; kernels are tested against it in Triton's interpreter. A
kernel's module is imported by its first call, because importing Triton takes seconds.
``HYPERDFLASH_OPERATORS`` names operators that run their reference on CUDA as well; at its start a
server adds those whose kernel differs from its reference (``triton_ops.comparison``).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

OPERATORS_VARIABLE = "HYPERDFLASH_OPERATORS"
ALL, NONE = "torch", "triton"


def reference_operators_from_environment() -> set[str]:
    """Return the operators that ``HYPERDFLASH_OPERATORS`` names, or ``torch`` for all."""
    words = os.environ.get(OPERATORS_VARIABLE, "").split(",")
    return {word.strip() for word in words} - {"", NONE}


# The names of operators that run their reference on CUDA.
reference_operators = reference_operators_from_environment()


@dataclass(frozen=True)
class Operator:
    """One operation with two implementations of the same positional arguments.

    Attributes:
        kernel: ``module:function``, which launches the kernel.
    """

    name: str
    reference: Callable[..., Any]
    kernel: str

    def __call__(self, *arguments: Any) -> Any:
        """Run the kernel on a GPU, the reference elsewhere and for ``reference_operators``."""
        if interceptor is not None:
            return interceptor(self, arguments)
        on_gpu = next(a.is_cuda for a in arguments if isinstance(a, torch.Tensor))
        if not on_gpu:
            return self.reference(*arguments)
        return (self.exactly if self.uses_reference else self.launch)(*arguments)

    def exactly(self, *arguments: Any) -> Any:
        """Run the reference without TF32 in its products, even if the process allows it."""
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            return self.reference(*arguments)
        finally:
            torch.set_float32_matmul_precision(precision)

    @property
    def uses_reference(self) -> bool:
        """Whether the reference runs on CUDA."""
        return bool(reference_operators & {self.name, ALL})

    def launch(self, *arguments: Any) -> Any:
        """Run the kernel."""
        module, _, function = self.kernel.partition(":")
        with on_device(next(a for a in arguments if isinstance(a, torch.Tensor))):
            return getattr(importlib.import_module(module), function)(*arguments)


OPERATORS: dict[str, Operator] = {}
# The function that replaces every operator while kernels are compared with their references.
interceptor: Callable[[Operator, tuple], Any] | None = None


def on_device(tensor: torch.Tensor) -> AbstractContextManager:
    """Return a context in which kernels are launched on the tensor's GPU, if it is on one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def register(name: str, reference: Callable, kernel: str) -> Operator:
    """Make an operator and add it to ``OPERATORS``."""
    OPERATORS[name] = Operator(name, reference, kernel)
    return OPERATORS[name]
