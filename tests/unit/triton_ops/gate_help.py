"""Inputs and comparisons of the gate kernels' tests."""

from unittest import mock

import numpy as np
import torch

from triton_ops.hc_gate import GateArguments

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# A batch that no multiple of a tile holds. Interpreted programs run one after another.
MANY = 257 if DEVICE == "cuda" else 17
EPSILONS = {"rms_eps": 1e-6, "hc_eps": 1e-6}
# Largest relative error ||out - ref|| / ||ref||, as the project's contract has it.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}


def random_arguments(
    n: int,
    m: int,
    d: int,
    *,
    dtype: torch.dtype = torch.float32,
    norms: tuple[bool, bool] = (True, True),
    seed: int = 0,
) -> GateArguments:
    """Fresh inputs on the test device; fp32 weights; path norm and hidden norm where asked for."""
    g = torch.Generator().manual_seed(seed)
    hidden, fn, base = (torch.randn(*s, generator=g) for s in ((n, m * d), (m, m * d), (m,)))
    scale = torch.rand(1, generator=g) + 0.5
    path_norm, hidden_norm = torch.randn(m, d, generator=g), torch.randn(d, generator=g)
    tensors = [(hidden * 3).to(dtype), fn * 0.1, base, scale]
    tensors += [
        norm if wanted else None
        for norm, wanted in zip((path_norm, hidden_norm), norms, strict=True)
    ]
    return GateArguments(*(t if t is None else t.to(DEVICE) for t in tensors), **EPSILONS)


def in_fp64(a: GateArguments) -> GateArguments:
    """The same arguments in fp64 on the CPU."""
    wide = (t if t is None else t.double().cpu() for t in tensors_of(a))
    return GateArguments(*wide, a.rms_eps, a.hc_eps)


def tensors_of(a: GateArguments) -> tuple[torch.Tensor | None, ...]:
    """The six tensors in the order of every function that takes them."""
    return a.hidden, a.fn, a.base, a.scale, a.path_norm, a.hidden_norm


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """``||found - expected|| / ||expected||``; NaN where found is not finite."""
    difference = (found.double().cpu() - expected.double().cpu()).norm()
    return (difference / expected.double().cpu().norm().clamp_min(1e-300)).item()


def bf16_dot_in_the_interpreter():
    """Triton's interpreter keeps bf16 as 16-bit integers and multiplies those in ``tl.dot``.

    This patch decodes them first; casts and loads are the interpreter's own.
    """
    from triton.language import bfloat16
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.create_dot

    def decoded(handle):
        if handle.dtype.scalar != bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), interpreter.tl.float32)

    def create_dot(self, a, b, d, *rest):
        return plain(self, decoded(a), decoded(b), d, *rest)

    return mock.patch.object(interpreter.InterpreterBuilder, "create_dot", create_dot)
