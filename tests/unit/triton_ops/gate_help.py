"""Inputs and comparisons of the kernels' tests."""

import importlib.util
import inspect
import os
import runpy
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from sglang_hyperdflash.draft.adjust import NEUTRAL
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
    return a.hidden, a.fn, a.base, a.scale, a.path_norm, a.hidden_norm


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    result, expected = result.double().cpu(), expected.double().cpu()
    return ((result - expected).norm() / expected.norm().clamp_min(1e-300)).item()


def in_order(given: dict[str, Any], reference: Callable) -> list:
    """Arguments by name as an operator passes them: by position, in the order of its reference."""
    return [given[name] for name in inspect.signature(reference).parameters]


# What changes logits: arguments of the operators that draft, and of the one that adjusts rows.
CHANGES = ("counts", "slots", "penalties", "end_ids", "earliest", "bias")
EVERYTHING = "penalties end_ids bias"
PENALTIES = [(0.3, 0.0, 1.0), (0.0, 0.7, 1.0), (0.0, 0.0, 1.3), (0.0, 0.0, 0.6)]
PENALTIES += [(-0.4, 0.2, 1.1), NEUTRAL]


def adjusting(changes, start, block, ends, vocabulary, g, bias_dtype):
    """The operators' last arguments by name, None but of ``changes``; some ``ends`` end an answer.

    The first end tokens may come before the block after ``start``, within it and after it.
    """
    bs, known = len(start), dict.fromkeys(CHANGES)
    if "penalties" in changes:
        known["counts"] = torch.randint(0, 3, (bs + 3, vocabulary), generator=g, dtype=torch.int32)
        known["slots"] = torch.randperm(bs + 3, generator=g)[:bs]
        known["penalties"] = torch.tensor([PENALTIES[b % 6] for b in range(bs)])
    if "end_ids" in changes:
        known["end_ids"] = ends.masked_fill(torch.rand(ends.shape, generator=g) < 0.4, -1)
        known["earliest"] = start[:, 0] + torch.arange(bs) % (block + 2)
    if "bias" in changes:
        bias = torch.randn(bs, vocabulary, generator=g)
        bias[torch.rand(bias.shape, generator=g) < 0.1] = float("-inf")
        bias[::3] = 0.0
        known["bias"] = bias.to(bias_dtype)
    return known


def sglang_kernels(name: str) -> dict[str, Any]:
    """The names of one of SGLang's modules with kernels (``sglang.kernels.ops``), interpreted."""
    path = importlib.util.find_spec(f"sglang.kernels.ops.{name}").origin
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        return runpy.run_path(path)
