"""``torch.ops.hyperdflash.hc_gate_reduce``: the reduction as an operator torch can trace.

The forward also returns what the backward needs, ``stats [2m + 1, N]`` fp32: the m gate products
``x @ fn.T``, the m sums of squares of the paths, and the hidden norm's factor (1 without it).
"""

from __future__ import annotations

import torch

from triton_ops.hc_gate import GateArguments, gated_sum, hc_gate_reduce_reference, wide
from triton_ops.operator import on_device, register

_ARGUMENTS = (
    "Tensor hidden, Tensor fn, Tensor base, Tensor scale, Tensor? path_norm, Tensor? hidden_norm"
)
# Up to this many tokens, each has a program of its own: 512 threads of 80 registers, so one a
# multiprocessor. Above, tokens share the gate matrix. ``make bench`` times both kernels; on an H100
# (m 4, d 4096) 112 tokens take the first 10 us, 448 the second 38 us.
ROW_KERNEL_TOKENS = 256
_EPSILONS = "float rms_eps, float hc_eps"


def reduce_cuda(
    arguments: GateArguments, save_stats: bool, most_rows: int = ROW_KERNEL_TOKENS
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch the forward kernel for this number of tokens: of rows up to ``most_rows``.

    Returns:
        ``c [N, d]`` in the residual's dtype and, if asked for, ``stats [2m + 1, N]`` fp32.
    """
    from triton_ops import hc_gate_row, hc_gate_tiles

    n, device = len(arguments.hidden), arguments.hidden.device
    out = arguments.hidden.new_empty(n, arguments.d)
    stats = None
    if save_stats:
        stats = torch.empty(2 * arguments.m + 1, n, dtype=torch.float32, device=device)
    if n == 0:
        return out, stats
    with on_device(out):
        if n <= most_rows:
            hc_gate_row.launch(arguments, out, stats)
        else:
            shape = hc_gate_tiles.TileShape.for_sizes(arguments.m, out.dtype)
            count = torch.cuda.get_device_properties(device).multi_processor_count
            lag = hc_gate_tiles.tile_lag(shape, arguments.d, count)
            hc_gate_tiles.launch(arguments, out, stats, shape, lag)
    return out, stats


def reduce_reference(arguments: GateArguments) -> tuple[torch.Tensor, torch.Tensor]:
    """``c [N, d]`` and ``stats [2m + 1, N]`` in plain torch."""
    a = arguments
    y, z = gated_sum(a.hidden, a.fn, a.base, a.scale, a.path_norm, a.rms_eps, a.hc_eps)
    squares = wide(a.hidden).view(-1, a.m, a.d).square().sum(-1)
    inverse = torch.ones_like(z[:, :1])
    if a.hidden_norm is not None:
        inverse = torch.rsqrt(y.square().mean(-1, keepdim=True) + a.rms_eps)
        y = y * inverse * wide(a.hidden_norm)
    stats = torch.cat([z, squares, inverse], dim=1).T.contiguous()
    return y.to(a.hidden.dtype), stats


@torch.library.custom_op(
    "hyperdflash::hc_gate_reduce",
    mutates_args=(),
    schema=f"({_ARGUMENTS}, {_EPSILONS}) -> (Tensor, Tensor)",
)
def hc_gate_reduce_op(hidden, fn, base, scale, path_norm, hidden_norm, rms_eps, hc_eps):
    """``(c [N, d], stats [2m + 1, N])``; the CPU implementation."""
    arguments = GateArguments(hidden, fn, base, scale, path_norm, hidden_norm, rms_eps, hc_eps)
    return reduce_reference(arguments.check())


@hc_gate_reduce_op.register_kernel("cuda")
def _forward_cuda(hidden, fn, base, scale, path_norm, hidden_norm, rms_eps, hc_eps):
    arguments = GateArguments(hidden, fn, base, scale, path_norm, hidden_norm, rms_eps, hc_eps)
    if _reduce.uses_reference:
        return reduce_reference(arguments.check())
    return reduce_cuda(arguments.check(), save_stats=True)


@hc_gate_reduce_op.register_fake
def _forward_fake(hidden, fn, base, scale, path_norm, hidden_norm, rms_eps, hc_eps):
    m, n = fn.shape[0], hidden.shape[0]
    stats_dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return (
        hidden.new_empty(n, fn.shape[1] // m),
        hidden.new_empty(2 * m + 1, n, dtype=stats_dtype),
    )


@torch.library.custom_op(
    "hyperdflash::hc_gate_reduce_backward",
    mutates_args=(),
    schema=(
        f"(Tensor grad, {_ARGUMENTS}, Tensor stats, {_EPSILONS}, bool need_hidden) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
def hc_gate_reduce_backward_op(
    grad, hidden, fn, base, scale, path_norm, hidden_norm, stats, rms_eps, hc_eps, need_hidden
):
    """Gradients of the six tensors, empty for one that is absent or not needed; on the CPU."""
    from triton_ops.hc_gate_backward import backward_reference

    arguments = GateArguments(hidden, fn, base, scale, path_norm, hidden_norm, rms_eps, hc_eps)
    return backward_reference(arguments, grad, stats, need_hidden)


@hc_gate_reduce_backward_op.register_kernel("cuda")
def _backward_cuda(
    grad, hidden, fn, base, scale, path_norm, hidden_norm, stats, rms_eps, hc_eps, need_hidden
):
    from triton_ops.hc_gate_backward import backward_reference, backward_triton

    arguments = GateArguments(hidden, fn, base, scale, path_norm, hidden_norm, rms_eps, hc_eps)
    if _reduce.uses_reference:
        return backward_reference(arguments, grad, stats, need_hidden)
    with on_device(hidden):
        return backward_triton(arguments, grad.contiguous(), stats, need_hidden)


@hc_gate_reduce_backward_op.register_fake
def _backward_fake(
    grad, hidden, fn, base, scale, path_norm, hidden_norm, stats, rms_eps, hc_eps, need_hidden
):
    def like(tensor: torch.Tensor | None, wanted: bool = True) -> torch.Tensor:
        if tensor is None or not wanted:
            return hidden.new_empty(0)
        return tensor.new_empty(tensor.shape)

    return (
        like(hidden, need_hidden),
        like(fn),
        like(base),
        like(scale),
        like(path_norm),
        like(hidden_norm),
    )


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.rms_eps, ctx.hc_eps = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad, _grad_stats):
    *tensors, stats = ctx.saved_tensors
    needs = ctx.needs_input_grad
    gradients = hc_gate_reduce_backward_op(grad, *tensors, stats, ctx.rms_eps, ctx.hc_eps, needs[0])
    wanted = zip(gradients, needs, tensors, strict=False)
    kept = (g if need and t is not None else None for g, need, t in wanted)
    return (*kept, None, None)


hc_gate_reduce_op.register_autograd(_backward, setup_context=_setup_context)


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

    Args: see the table in :mod:`triton_ops.hc_gate`.

    Returns:
        ``[N, d]`` in ``hidden.dtype``; differentiable once in every tensor argument.

    Raises:
        ValueError: a shape, device or stride does not fit, or CUDA does not support the sizes.
        TypeError: a dtype is not supported.
        Each says what was expected and what was found.
    """
    arguments = GateArguments(hidden, fn, base, scale, path_norm, hidden_norm, rms_eps, hc_eps)
    arguments.check()
    tensors = arguments.named().values()
    if torch.compiler.is_compiling() or (
        torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    ):
        return hc_gate_reduce_op(hidden, fn, base, scale, path_norm, hidden_norm, rms_eps, hc_eps)[
            0
        ]
    return _reduce(hidden, fn, base, scale, path_norm, hidden_norm, rms_eps, hc_eps)


def _reference(*arguments) -> torch.Tensor:
    *tensors, rms_eps, hc_eps = arguments
    return hc_gate_reduce_reference(*tensors, rms_eps=rms_eps, hc_eps=hc_eps)


def launch(*arguments) -> torch.Tensor:
    """The served kernel; arguments as :func:`hc_gate_reduce`, which checks them."""
    return reduce_cuda(GateArguments(*arguments), save_stats=False)[0]


_reduce = register("hc_gate_reduce", _reference, "triton_ops.hc_gate_op:launch")
