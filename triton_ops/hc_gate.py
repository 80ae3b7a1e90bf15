"""The inherited HC-gate reduction of the paper's eq. 1, with DeepSeek-V4's own details.

    x = vec(H)                                            # [N, m*d]
    r = rsqrt(mean(x^2) + rms_eps)                        # [N, 1]
    a = sigmoid(scale * (x @ fn.T) * r + base) + hc_eps   # [N, m]
    y = sum_j a_j * RMSNorm(H_j; path_norm_j)             # [N, d]
    c = RMSNorm(y; hidden_norm)                           # [N, d]

All arithmetic is fp32; the result has ``hidden``'s dtype.
"""

from __future__ import annotations

import torch


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

    Args:
        hidden: pre-collapse residual, flattened paths, ``[N, m*d]``, any float dtype.
        fn: gate matrix ``[m, m*d]``; base: ``[m]``; scale: ``[1]``.
        path_norm: per-path RMSNorm weights ``[m, d]``, or None to gate the raw paths.
        hidden_norm: weight ``[d]`` of the final RMSNorm, or None to return ``y``.
        rms_eps: epsilon of every RMSNorm; hc_eps: offset added to the gates.

    Returns:
        ``[N, d]`` in ``hidden.dtype``; differentiable in every tensor argument.
    """
    m = fn.shape[0]
    x = hidden.float()
    inverse_rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + rms_eps)
    gates = torch.sigmoid((x @ fn.float().T) * inverse_rms * scale.float() + base.float()) + hc_eps
    paths = x.view(*x.shape[:-1], m, x.shape[-1] // m)
    if path_norm is not None:
        paths = rms_norm(paths, path_norm, rms_eps)
    y = (gates.unsqueeze(-1) * paths).sum(-2)
    if hidden_norm is not None:
        y = rms_norm(y, hidden_norm, rms_eps)
    return y.to(hidden.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``weight * x * rsqrt(mean(x^2) + eps)`` over the last dimension, in fp32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


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
    """Checked entry point of :func:`hc_gate_reduce_reference`; same arguments and result.

    Raises:
        ValueError: a shape does not fit, with what was expected and what was found.
    """
    if fn.ndim != 2 or fn.shape[1] % fn.shape[0]:
        raise ValueError(f"gate matrix fn must be [m, m*d], found {tuple(fn.shape)}")
    m, width = fn.shape
    expected = {"base": (base, (m,)), "scale": (scale, (1,))}
    if path_norm is not None:
        expected["path_norm"] = (path_norm, (m, width // m))
    if hidden_norm is not None:
        expected["hidden_norm"] = (hidden_norm, (width // m,))
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {shape}, found {tuple(tensor.shape)}")
    if hidden.ndim != 2 or hidden.shape[1] != width:
        raise ValueError(
            f"pre-collapse residual must be [N, {width}] (m={m} paths of {width // m}), "
            f"found {tuple(hidden.shape)}"
        )
    return hc_gate_reduce_reference(
        hidden, fn, base, scale, path_norm, hidden_norm, rms_eps=rms_eps, hc_eps=hc_eps
    )
