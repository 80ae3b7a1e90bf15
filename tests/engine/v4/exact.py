"""Torch arithmetic whose rows do not depend on how many of them there are.

Products pick their order by the number of rows, and elementwise kernels treat the tail of a tensor
apart from its vectorised body. The differences are of one step, and fp8 stores make them visible:
a verified block of seven rows would not equal seven single ones. So: fp64, rounded once.
"""

import torch
import torch.nn.functional as F

ROUNDED = (torch.float32, torch.bfloat16)
PRODUCTS = ("mm", "bmm", "matmul", "einsum")
REDUCTIONS = ("softmax", "sigmoid", "mean", "sum", "exp", "rsqrt", "sqrt", "square")
REDUCTIONS += ("silu", "softplus")

_linear = F.linear


def _exact_linear(x, weight, bias=None):
    if x.dtype not in ROUNDED:
        return _linear(x, weight, bias)
    out = x.double() @ weight.double().T
    return (out if bias is None else out + bias.double()).to(x.dtype)


def _exact_product(product):
    def wrapped(*args, **options):
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if any(x.dtype == torch.float64 for x in tensors):
            return product(*args, **options)
        out = product(*(x.double() if isinstance(x, torch.Tensor) else x for x in args), **options)
        return out.to(tensors[0].dtype)

    return wrapped


def _exact_reduction(original):
    def wrapped(x, *args, **options):
        plain = options.get("dtype") is None and options.get("out") is None
        if not (isinstance(x, torch.Tensor) and x.dtype in ROUNDED and plain):
            return original(x, *args, **options)
        out = original(x.double(), *args, **options)
        return out.to(x.dtype) if isinstance(out, torch.Tensor) else out

    return wrapped


def exact_everywhere() -> None:
    """Replace torch's own functions in this process."""
    F.linear = torch.nn.functional.linear = _exact_linear
    for name in PRODUCTS:
        setattr(torch, name, _exact_product(getattr(torch, name)))
    for owner in (torch, torch.Tensor, F):
        for name in REDUCTIONS:
            if hasattr(owner, name):
                setattr(owner, name, _exact_reduction(getattr(owner, name)))
