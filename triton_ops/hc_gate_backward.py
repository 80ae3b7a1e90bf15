"""Backward of the HC-gate reduction; the forward's formulas are in :mod:`triton_ops.hc_gate`.

With ``u_j = w_j * H_j`` (``w`` the path norm), ``p_j = rsqrt(mean(H_j^2) + rms_eps)`` (1 without
it), ``s_j = a_j p_j``, ``y = sum_j s_j u_j``, ``i = rsqrt(mean(y^2) + rms_eps)`` and
``h = hidden_norm * dc``, each token needs six kinds of numbers before any gradient:

    P_j = sum_d h u_j                   R_j = sum_d y u_j
    lam = i^3 / d * sum_j s_j P_j       q_j = i P_j - lam R_j          # q_j = dL / ds_j
    t_j = q_j p_j sig_j (1 - sig_j)     dz_j = t_j scale r             # sig_j = a_j - hc_eps
    kappa_j = -(sum_k t_k scale z_k) r^3 / (m d) - a_j q_j p_j^3 / d

and then, over the columns and tokens,

    dy = i h - lam y
    dH_j = s_j w_j dy + kappa_j H_j + sum_k dz_k fn_k[j]               # the second kappa term
    dw_j = sum_n s_j dy H_j             dfn = dz^T x                   # only with a path norm
    dhidden_norm = sum_n i y dc         dbase = sum_n t                dscale = sum_n t . z r

Two Triton kernels, each reading the residual once: one CTA per tile of tokens for the numbers, one
per slice of columns and run of tokens for the gradients. A run leaves one partial sum per weight,
which torch adds up in a fixed order.
"""

from __future__ import annotations

import torch

from triton_ops.hc_gate import GateArguments, wide

Gradients = tuple[torch.Tensor, ...]


def backward_reference(
    arguments: GateArguments, grad: torch.Tensor, stats: torch.Tensor, need_hidden: bool
) -> Gradients:
    """Gradients of hidden, fn, base, scale, path_norm, hidden_norm in plain torch.

    Args:
        grad: ``[N, d]``, the gradient of ``c``.
        stats: ``[2m + 1, N]`` from the forward.
        need_hidden: whether the residual's gradient is wanted.

    Returns:
        Six tensors in the shapes and dtypes of what they belong to; empty ones for an absent norm
        and for the residual when it is not wanted.
    """
    a, m, d = arguments, arguments.m, arguments.d
    x, stats, dc = wide(a.hidden), stats.T, wide(grad)
    paths = x.view(-1, m, d)
    z, squares, i = stats[:, :m], stats[:, m : 2 * m], stats[:, 2 * m :]
    r = torch.rsqrt(squares.sum(-1, keepdim=True) / (m * d) + a.rms_eps)
    sig = torch.sigmoid(z * r * wide(a.scale) + wide(a.base))
    gates = sig + a.hc_eps
    normed = a.path_norm is not None
    p = torch.rsqrt(squares / d + a.rms_eps) if normed else torch.ones_like(squares)
    s = gates * p
    u = paths * wide(a.path_norm) if normed else paths
    y = (s.unsqueeze(-1) * u).sum(1)
    h = dc * wide(a.hidden_norm) if a.hidden_norm is not None else dc
    big_p = (h.unsqueeze(1) * u).sum(-1)
    big_r = (y.unsqueeze(1) * u).sum(-1)
    lam = (s * big_p).sum(-1, keepdim=True) * i.pow(3) / d * (a.hidden_norm is not None)
    q = i * big_p - lam * big_r
    t = q * p * sig * (1 - sig)
    dz = t * wide(a.scale) * r
    kappa = -(t * wide(a.scale) * z).sum(-1, keepdim=True) * r.pow(3) / (m * d)
    if normed:
        kappa = kappa - gates * q * p.pow(3) / d
    dy = i * h - lam * y
    dw, dnorm, dx = (a.hidden.new_empty(0) for _ in range(3))
    if normed:
        dw = (s.unsqueeze(-1) * dy.unsqueeze(1) * paths).sum(0).to(a.path_norm.dtype)
    if need_hidden:
        weighted = s.unsqueeze(-1) * dy.unsqueeze(1)
        weighted = weighted * wide(a.path_norm) if normed else weighted
        dx = (weighted + kappa.unsqueeze(-1) * paths).flatten(1) + dz @ wide(a.fn)
        dx = dx.to(a.hidden.dtype)
    if a.hidden_norm is not None:
        dnorm = (i * y * dc).sum(0).to(a.hidden_norm.dtype)
    return (
        dx,
        (dz.T @ x).to(a.fn.dtype),
        t.sum(0).to(a.base.dtype),
        (t * z * r).sum().reshape(1).to(a.scale.dtype),
        dw,
        dnorm,
    )


def backward_triton(
    arguments: GateArguments, grad: torch.Tensor, stats: torch.Tensor, need_hidden: bool
) -> Gradients:
    """As :func:`backward_reference`, with Triton; ``grad`` is contiguous."""
    from triton_ops import hc_gate_backward_kernels as kernels

    a, m, d = arguments, arguments.m, arguments.d
    n = len(a.hidden)
    tokens = kernels.token_gradients(a, grad, stats)
    dx, dfn, dw, dnorm = kernels.column_gradients(a, grad, tokens, need_hidden)
    t, z = tokens[2 * m + 2 : 3 * m + 2, :n], stats[:m]
    r = torch.rsqrt(stats[m : 2 * m].sum(0) / (m * d) + a.rms_eps)
    return (
        dx,
        dfn.to(a.fn.dtype),
        t.sum(1).to(a.base.dtype),
        (t * z * r).sum().reshape(1).to(a.scale.dtype),
        a.hidden.new_empty(0) if a.path_norm is None else dw.to(a.path_norm.dtype),
        a.hidden.new_empty(0) if a.hidden_norm is None else dnorm.to(a.hidden_norm.dtype),
    )
