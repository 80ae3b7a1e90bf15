"""Products of draft states with the target's LM head: most of a step's arithmetic."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


def bf16_products(device: torch.device, enabled: bool) -> torch.autocast:
    """Autocast for what :func:`vocabulary_logits` computes: bf16 on a GPU, exact on a CPU.

    A CPU gains nothing from bf16 here, and its runs are compared to the bit.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled and device.type == "cuda")


def vocabulary_logits(head: nn.Linear, states: torch.Tensor) -> torch.Tensor:
    """``[..., V]`` fp32 logits of ``states [..., d]`` under a frozen LM head.

    Inside autocast the operands are bf16 and the sums fp32, and unlike an ordinary autocast product
    nothing is rounded afterwards: bf16 logits of 16 or more are multiples of 1/8, which would
    blur the distributions that the losses compare. Outside, everything is fp32.
    """
    if not torch.is_autocast_enabled(states.device.type):
        return F.linear(states.float(), head.weight.float())
    flat = _Bf16Product.apply(states.flatten(0, -2), head.weight.bfloat16())
    return flat.view(*states.shape[:-1], len(head.weight))


class _Bf16Product(torch.autograd.Function):
    """``x @ w.T`` of ``x [N, d]`` and a frozen ``w [V, d]``, fp32 from bf16 operands: torch has no
    gradient of a product with another output dtype.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(w)
        ctx.dtype = x.dtype
        return torch.mm(x.bfloat16(), w.T, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (w,) = ctx.saved_tensors
        return torch.mm(gradient.bfloat16(), w, out_dtype=torch.float32).to(ctx.dtype), None
