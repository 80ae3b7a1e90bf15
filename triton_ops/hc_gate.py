"""The inherited HC-gate reduction of the paper's eq. 1, with the details of DeepSeek-V4.

    x = vec(H)                                            # [N, m*d]
    r = rsqrt(mean(x^2) + rms_eps)                        # [N, 1]
    a = sigmoid(scale * (x @ fn.T) * r + base) + hc_eps   # [N, m]
    y = sum_j a_j * RMSNorm(H_j; path_norm_j)             # [N, d]
    c = RMSNorm(y; hidden_norm)                           # [N, d]

    tensor        shape        dtype
    hidden        [N, m*d]     bf16, fp16 or fp32; unit column stride, any row stride
    fn            [m, m*d]     any of the three, contiguous; fp32 in a checkpoint
    base          [m]          as fn
    scale         [1]          as fn
    path_norm     [m, d]       as fn, or None: the raw paths are gated
    hidden_norm   [d]          as fn, or None: y is returned
    c             [N, d]       hidden's dtype

All arithmetic is fp32. On CUDA, m is 1, 2, 4 or 8 and d a multiple of 64 up to 32768.

``hc_gate_op.hc_gate_reduce`` checks its arguments and dispatches: CUDA tensors run the kernel
(``hc_gate_kernel``), CPU tensors and training :func:`hc_gate_reduce_reference`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PATHS = (1, 2, 4, 8)
MAX_WIDTH = 32768
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Convert to fp32; fp64 stays, so that gradients can be checked numerically."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``weight * x * rsqrt(mean(x^2) + eps)`` over the last dimension, in fp32 or fp64."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * wide(weight)


def hc_gate_reduce_reference(
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
    """Reduce ``hidden [N, m*d]`` to the context feature ``[N, d]`` in plain torch.

    The module's table has the arguments. The result has ``hidden.dtype`` and is differentiable in
    every tensor; fp64 inputs are computed in fp64.
    """
    m, x = fn.shape[0], wide(hidden)
    inverse_rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + rms_eps)
    products = x @ wide(fn).T
    gates = torch.sigmoid(products * inverse_rms * wide(scale) + wide(base)) + hc_eps
    paths = x.view(*x.shape[:-1], m, x.shape[-1] // m)
    if path_norm is not None:
        paths = rms_norm(paths, path_norm, rms_eps)
    y = (gates.unsqueeze(-1) * paths).sum(-2)
    if hidden_norm is not None:
        y = rms_norm(y, hidden_norm, rms_eps)
    return y.to(hidden.dtype)


@dataclass(frozen=True)
class GateArguments:
    """The arguments of one reduction, with their checks."""

    hidden: torch.Tensor
    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor
    path_norm: torch.Tensor | None
    hidden_norm: torch.Tensor | None
    rms_eps: float
    hc_eps: float

    @property
    def m(self) -> int:
        """The number of residual paths."""
        return self.fn.shape[0]

    @property
    def d(self) -> int:
        """The columns of one path."""
        return self.fn.shape[1] // self.fn.shape[0]

    def named(self) -> dict[str, torch.Tensor]:
        """Return the tensors that are present, by name."""
        names = ("hidden", "fn", "base", "scale", "path_norm", "hidden_norm")
        return {n: getattr(self, n) for n in names if getattr(self, n) is not None}

    def pointers(self) -> tuple[torch.Tensor, ...]:
        """Return the kernel's six tensors; ``fn`` stands for an absent norm, which is not read."""
        return (
            self.hidden,
            self.fn,
            self.base,
            self.scale,
            self.fn if self.path_norm is None else self.path_norm,
            self.fn if self.hidden_norm is None else self.hidden_norm,
        )

    def check(self) -> GateArguments:
        """Raise ``ValueError`` or ``TypeError`` unless shapes, dtypes, devices and strides fit."""
        self._check_shapes()
        for name, tensor in self.named().items():
            allowed = DTYPES if tensor.is_cuda else (*DTYPES, torch.float64)
            if tensor.dtype not in allowed:
                names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
                raise TypeError(f"{name} must be one of {names}; found {tensor.dtype}")
            if tensor.device != self.hidden.device:
                raise ValueError(
                    f"{name} is on {tensor.device}, the residual on {self.hidden.device}; "
                    "move them to one device"
                )
            if name != "hidden" and not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous, found strides {tensor.stride()}")
        if self.hidden.stride(1) != 1:
            raise ValueError(
                "the pre-collapse residual must have unit stride along its columns, found strides "
                f"{self.hidden.stride()}; call .contiguous()"
            )
        if self.hidden.is_cuda:
            self.check_kernel_limits()
        return self

    def _check_shapes(self) -> None:
        if self.fn.ndim != 2 or self.fn.shape[1] % self.fn.shape[0]:
            raise ValueError(f"gate matrix fn must be [m, m*d], found {tuple(self.fn.shape)}")
        m, d = self.m, self.d
        expected = {"base": (m,), "scale": (1,), "path_norm": (m, d), "hidden_norm": (d,)}
        for name, tensor in self.named().items():
            shape = expected.get(name)
            if shape is not None and tuple(tensor.shape) != shape:
                raise ValueError(f"{name} must be {shape}, found {tuple(tensor.shape)}")
        if self.hidden.ndim != 2 or self.hidden.shape[1] != m * d:
            raise ValueError(
                f"pre-collapse residual must be [N, {m * d}] (m={m} paths of {d}), "
                f"found {tuple(self.hidden.shape)}"
            )

    def check_kernel_limits(self) -> None:
        """Raise ``ValueError`` for sizes that the CUDA kernels do not support."""
        if self.m not in PATHS or self.d % 64 or self.d > MAX_WIDTH:
            raise ValueError(
                f"on CUDA the reducer supports m in {PATHS} paths whose width is a multiple of 64 "
                f"up to {MAX_WIDTH}; found m={self.m}, d={self.d}"
            )
