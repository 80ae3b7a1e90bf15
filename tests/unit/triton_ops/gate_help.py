"""Inputs and comparisons of the gate kernels' tests."""

import importlib.util
import os
import runpy
from typing import Any
from unittest import mock

import torch

from triton_ops.hc_gate import GateArguments

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# A batch that no multiple of a tile holds. Interpreted programs run one after another.
MANY = 257 if DEVICE == "cuda" else 17
EPSILONS = {"rms_eps": 1e-6, "hc_eps": 1e-6}
# Largest relative error ||out - ref|| / ||ref||, as the project's contract has it.
TOLERANCE = {FP32: 1e-5, FP16: 1e-3, BF16: 4e-3}


def random_arguments(n, m, d, *, dtype=FP32, norms=(True, True)) -> GateArguments:
    """Fresh inputs on the test device; fp32 weights; path norm and hidden norm where asked for."""
    g = torch.Generator().manual_seed(n + d)
    hidden, fn, base = (torch.randn(*s, generator=g) for s in ((n, m * d), (m, m * d), (m,)))
    scale = torch.rand(1, generator=g) + 0.5
    path_norm, hidden_norm = torch.randn(m, d, generator=g), torch.randn(d, generator=g)
    tensors = [(hidden * 3).to(dtype), fn * 0.1, base, scale]
    tensors += [path_norm if norms[0] else None, hidden_norm if norms[1] else None]
    return GateArguments(*(t if t is None else t.to(DEVICE) for t in tensors), **EPSILONS)


def tensors_of(a: GateArguments) -> tuple[torch.Tensor | None, ...]:
    """The six tensors in the order of every function that takes them."""
    return a.hidden, a.fn, a.base, a.scale, a.path_norm, a.hidden_norm


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """``||result - expected|| / ||expected||``; NaN where the result is not finite."""
    result, expected = result.double().cpu(), expected.double().cpu()
    return ((result - expected).norm() / expected.norm().clamp_min(1e-300)).item()


def sglang_kernels(name: str) -> dict[str, Any]:
    """The names of one of SGLang's modules with kernels (``sglang.kernels.ops``), interpreted."""
    path = importlib.util.find_spec(f"sglang.kernels.ops.{name}").origin
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        return runpy.run_path(path)
