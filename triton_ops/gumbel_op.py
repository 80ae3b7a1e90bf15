"""``torch.ops.hyperdflash.gumbel_argmax``: the draws of ``triton_ops.gumbel`` as an operator."""

from __future__ import annotations

import torch

from triton_ops.gumbel import gumbel_argmax_reference


@torch.library.custom_op(
    "hyperdflash::gumbel_argmax",
    mutates_args=(),
    schema="(Tensor weights, Tensor seeds, Tensor positions, Tensor? rows) -> Tensor",
)
def gumbel_argmax_op(weights, seeds, positions, rows):
    """``[N]`` int64; the CPU implementation."""
    return gumbel_argmax_reference(weights, seeds, positions, rows)


@gumbel_argmax_op.register_kernel("cuda")
def _cuda(weights, seeds, positions, rows):
    from triton_ops.gumbel_kernel import launch

    with torch.cuda.device(weights.device):
        return launch(weights, seeds, positions, rows)


@gumbel_argmax_op.register_fake
def _fake(weights, seeds, positions, rows):
    return seeds.new_empty(len(seeds), dtype=torch.int64)


def gumbel_argmax(
    weights: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Check the arguments and draw once for each row, ``[N]`` int64.

    Args: see the table in :mod:`triton_ops.gumbel`.

    Raises:
        ValueError: a shape or stride does not fit.
        TypeError: a dtype does not fit.
        Each says what was expected and what was found.
    """
    count = len(weights) if rows is None else len(rows)
    if weights.ndim != 2 or weights.stride(1) != 1:
        raise ValueError(
            f"weights must be [R, V] with unit column stride, found {tuple(weights.shape)} with "
            f"strides {weights.stride()}; call .contiguous()"
        )
    if weights.dtype != torch.float32:
        raise TypeError(f"weights must be float32, found {weights.dtype}")
    named = {"seeds": seeds, "positions": positions} | ({} if rows is None else {"rows": rows})
    for name, tensor in named.items():
        if tuple(tensor.shape) != (count,) or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous [{count}], found {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}"
            )
        if tensor.dtype != torch.int64:
            raise TypeError(f"{name} must be int64, found {tensor.dtype}")
    return gumbel_argmax_op(weights, seeds, positions, rows)
