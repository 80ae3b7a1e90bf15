"""Operators with two implementations: a torch reference on a CPU, a Triton kernel on CUDA.

The reference is the specification; kernels are tested against it in Triton's interpreter. The
module of a kernel is imported by its first call: Triton itself needs seconds.
``HYPERDFLASH_OPERATORS`` names operators that run their reference on CUDA as well; a server adds
those whose kernel its start shows to be wrong (``triton_ops.comparison``).
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
    """What ``HYPERDFLASH_OPERATORS`` says: names of operators, or ``torch``, which is all."""
    words = os.environ.get(OPERATORS_VARIABLE, "").split(",")
    return {word.strip() for word in words} - {"", NONE}


# Names of the operators that run their reference on CUDA.
reference_operators = reference_operators_from_environment()


@dataclass(frozen=True)
class Operator:
    """One operation; ``reference`` and ``kernel`` take the same arguments by position.

    Attributes:
        kernel: ``module:function`` that launches.
    """

    name: str
    reference: Callable[..., Any]
    kernel: str

    def __call__(self, *arguments: Any) -> Any:
        """The kernel's results on a GPU, unless ``reference_operators`` has the name."""
        if interceptor is not None:
            return interceptor(self, arguments)
        on_gpu = next(a.is_cuda for a in arguments if isinstance(a, torch.Tensor))
        if not on_gpu:
            return self.reference(*arguments)
        return (self.exactly if self.uses_reference else self.launch)(*arguments)

    def exactly(self, *arguments: Any) -> Any:
        """Results of the reference, whose products are no TF32's, whatever the process allows."""
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
        """Results of the kernel."""
        module, _, function = self.kernel.partition(":")
        with on_device(next(a for a in arguments if isinstance(a, torch.Tensor))):
            return getattr(importlib.import_module(module), function)(*arguments)


OPERATORS: dict[str, Operator] = {}
# Called in place of every operator, while kernels are compared with their references.
interceptor: Callable[[Operator, tuple], Any] | None = None


def on_device(tensor: torch.Tensor) -> AbstractContextManager:
    """While this lasts, kernels are launched on the tensor's GPU, if it is on one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def register(name: str, reference: Callable, kernel: str) -> Operator:
    """Make an operator; ``kernel`` is ``module:function``, which launches."""
    OPERATORS[name] = Operator(name, reference, kernel)
    return OPERATORS[name]
