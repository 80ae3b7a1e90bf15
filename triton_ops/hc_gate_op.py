"""The reduction that serving and training call: a Triton kernel on CUDA, torch for gradients."""

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
    """Check the arguments and reduce ``hidden [N, m*d]`` to ``[N, d]``.

    Where a gradient is wanted, or torch.compile traces, it is the reference of torch operations.

    Args: see the table in :mod:`triton_ops.hc_gate`.

    Returns:
        ``[N, d]`` in ``hidden.dtype``; differentiable in every tensor argument.

    Raises:
        ValueError: a shape, device or stride does not fit, or CUDA does not support the sizes.
        TypeError: a dtype is not supported.
        Each says what was expected and what was found.
    """
    arguments = GateArguments(hidden, fn, base, scale, path_norm, hidden_norm, rms_eps, hc_eps)
    arguments.check()
    tensors = arguments.named().values()
    given = hidden, fn, base, scale, path_norm, hidden_norm, rms_eps, hc_eps
    if torch.compiler.is_compiling():
        return _reference(*given)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        # Else fp32 copies of every path would be kept until the backward pass.
        return checkpoint(_reference, *given, use_reentrant=False, preserve_rng_state=False)
    return _reduce(*given)


def _reference(*arguments) -> torch.Tensor:
    *tensors, rms_eps, hc_eps = arguments
    return hc_gate_reduce_reference(*tensors, rms_eps=rms_eps, hc_eps=hc_eps)


def launch(*arguments) -> torch.Tensor:
    """The served kernel; arguments as :func:`hc_gate_reduce`, which checks them."""
    from triton_ops import hc_gate_kernel

    checked = GateArguments(*arguments)
    out = checked.hidden.new_empty(len(checked.hidden), checked.d)
    if len(out):
        hc_gate_kernel.launch(checked, out)
    return out


_reduce = register("hc_gate_reduce", _reference, "triton_ops.hc_gate_op:launch")
