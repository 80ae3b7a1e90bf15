"""The reduction that serving and training call: a Triton kernel on CUDA, torch for gradients.

The kernel saves 25 launches; recomputing the reference in a backward pass saves fp32 copies.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from triton_ops.hc_gate import GateArguments, hc_gate_reduce_reference
from triton_ops.operator import register


def hc_gate_reduce(
    hidden: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    path_norm: torch.Tensor | None,
    hidden_norm: torch.Tensor | None,
    *,
    rms_eps: float,
    hc_eps: float,
) -> torch.Tensor:
    """Check the arguments and reduce ``hidden [N, m*d]`` to ``[N, d]`` in its dtype.

    The arguments are in the table of :mod:`triton_ops.hc_gate`. The reference runs if a gradient is
    needed or torch.compile traces.

    Raises:
        ValueError: a shape, device or stride does not fit, or CUDA does not support the sizes.
        TypeError: a dtype is not supported.
    """
    values = hidden, fn, base, scale, path_norm, hidden_norm, rms_eps, hc_eps
    arguments = GateArguments(*values).check()
    if torch.compiler.is_compiling():
        return _reference(*values)
    if torch.is_grad_enabled() and any(t.requires_grad for t in arguments.named().values()):
        # Without a checkpoint fp32 copies of every path would be kept until the backward pass.
        return checkpoint(_reference, *values, use_reentrant=False, preserve_rng_state=False)
    return _reduce(*values)


def _reference(*arguments) -> torch.Tensor:
    *tensors, rms_eps, hc_eps = arguments
    return hc_gate_reduce_reference(*tensors, rms_eps=rms_eps, hc_eps=hc_eps)


def launch(*arguments) -> torch.Tensor:
    """Run the kernel on the arguments of :func:`hc_gate_reduce`, which checks them."""
    from triton_ops import hc_gate_kernel

    checked = GateArguments(*arguments)
    out = checked.hidden.new_empty(len(checked.hidden), checked.d)
    if len(out):
        hc_gate_kernel.launch(checked, out)
    return out


_reduce = register("hc_gate_reduce", _reference, "triton_ops.hc_gate_op:launch")
