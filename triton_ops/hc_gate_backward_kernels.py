"""Triton kernels of :mod:`triton_ops.hc_gate_backward`, where their formulas are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_ops.hc_gate import GateArguments
from triton_ops.hc_gate_row import column_weight
from triton_ops.hc_gate_tiles import dot_eighths, eighths

TOKENS = 32
TOKEN_CHUNK = 64
GATE_CHUNK = 128
# Tiles of tokens that one CTA adds up; the rest of the sum is over so many fewer partial sums.
RUN = 32
WARPS = 8


# fmt: off
@triton.jit
def _token_sums(
    x_ptr, grad_ptr, path_ptr, norm_ptr, s, rows, live, x_stride,
    M: tl.constexpr, D: tl.constexpr, T: tl.constexpr, CHUNK: tl.constexpr,
    PATH_NORM: tl.constexpr, HIDDEN_NORM: tl.constexpr,
):
    """``P_j`` and ``R_j``, two tuples of ``[T]``."""
    zero = tl.zeros([T, CHUNK // 8], tl.float32)
    p_sum = (zero,) * M
    r_sum = (zero,) * M
    for start in range(0, D, CHUNK):
        cols = start + tl.arange(0, CHUNK)
        mask = cols < D
        inside = live[:, None] & mask[None, :]
        h = tl.load(grad_ptr + rows[:, None] * D + cols[None, :], mask=inside, other=0.0)
        h = h.to(tl.float32) * column_weight(norm_ptr, cols, mask, HIDDEN_NORM)[None, :]
        y = tl.zeros([T, CHUNK], tl.float32)
        weighted = ()
        for j in tl.static_range(M):
            where = x_ptr + rows[:, None] * x_stride + (j * D + cols)[None, :]
            u = tl.load(where, mask=inside, other=0.0).to(tl.float32)
            u = u * column_weight(path_ptr + j * D, cols, mask, PATH_NORM)[None, :]
            y += s[j][:, None] * u
            weighted = weighted + (eighths(u, T, CHUNK),)
        h = eighths(h, T, CHUNK)
        y = eighths(y, T, CHUNK)
        new_p = ()
        new_r = ()
        for j in tl.static_range(M):
            new_p = new_p + (dot_eighths(p_sum[j], h, weighted[j]),)
            new_r = new_r + (dot_eighths(r_sum[j], y, weighted[j]),)
        p_sum = new_p
        r_sum = new_r
    p_out = ()
    r_out = ()
    for j in tl.static_range(M):
        p_out = p_out + (tl.sum(p_sum[j], axis=1),)
        r_out = r_out + (tl.sum(r_sum[j], axis=1),)
    return p_out, r_out


@triton.jit(do_not_specialize=["n_tokens", "padded"])
def _token_kernel(
    x_ptr, fn_ptr, base_ptr, scale_ptr, path_ptr, norm_ptr, grad_ptr, stats_ptr, token_ptr,
    x_stride, n_tokens, padded, rms_eps, hc_eps,
    M: tl.constexpr, D: tl.constexpr, T: tl.constexpr, CHUNK: tl.constexpr,
    PATH_NORM: tl.constexpr, HIDDEN_NORM: tl.constexpr,
):
    """Per token: ``s_j, kappa_j, i, lam, t_j, dz_j`` in rows of ``token_ptr``."""
    rows = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    live = rows < n_tokens
    z = ()
    square = ()
    mean_square = tl.zeros([T], tl.float32)
    for j in tl.static_range(M):
        z = z + (tl.load(stats_ptr + j * n_tokens + rows, mask=live, other=0.0),)
        square = square + (tl.load(stats_ptr + (M + j) * n_tokens + rows, mask=live, other=0.0),)
        mean_square += square[j] / (M * D)
    i = tl.load(stats_ptr + 2 * M * n_tokens + rows, mask=live, other=0.0)
    r = tl.rsqrt(mean_square + rms_eps)
    scale = tl.load(scale_ptr).to(tl.float32)
    sig = ()
    p = ()
    s = ()
    for j in tl.static_range(M):
        sig = sig + (tl.sigmoid(scale * z[j] * r + tl.load(base_ptr + j).to(tl.float32)),)
        if PATH_NORM:
            p = p + (tl.rsqrt(square[j] / D + rms_eps),)
        else:
            p = p + (tl.full([T], 1.0, tl.float32),)
        s = s + ((sig[j] + hc_eps) * p[j],)
    p_sum, r_sum = _token_sums(
        x_ptr, grad_ptr, path_ptr, norm_ptr, s, rows, live, x_stride,
        M, D, T, CHUNK, PATH_NORM, HIDDEN_NORM,
    )
    lam = tl.zeros([T], tl.float32)
    if HIDDEN_NORM:
        for j in tl.static_range(M):
            lam += s[j] * p_sum[j]
        lam = lam * i * i * i / D
    dr = tl.zeros([T], tl.float32)
    q = ()
    for j in tl.static_range(M):
        q = q + (i * p_sum[j] - lam * r_sum[j],)
        t = q[j] * p[j] * sig[j] * (1.0 - sig[j])
        dr += t * scale * z[j]
        tl.store(token_ptr + (2 * M + 2 + j) * padded + rows, t)
        tl.store(token_ptr + (3 * M + 2 + j) * padded + rows, t * scale * r)
        tl.store(token_ptr + j * padded + rows, s[j])
    for j in tl.static_range(M):
        kappa = -dr * r * r * r / (M * D)
        if PATH_NORM:
            kappa -= (sig[j] + hc_eps) * q[j] * p[j] * p[j] * p[j] / D
        tl.store(token_ptr + (M + j) * padded + rows, kappa)
    tl.store(token_ptr + 2 * M * padded + rows, i)
    tl.store(token_ptr + (2 * M + 1) * padded + rows, lam)


@triton.jit(do_not_specialize=["n_tokens", "padded", "run"])
def _column_kernel(
    x_ptr, fn_ptr, path_ptr, norm_ptr, grad_ptr, token_ptr, dx_ptr, dw_ptr, dnorm_ptr,
    x_stride, n_tokens, padded, run, M: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
    CHUNK: tl.constexpr, PATH_NORM: tl.constexpr, HIDDEN_NORM: tl.constexpr,
    NEED_HIDDEN: tl.constexpr,
):
    """``dH`` and the norms' gradients in ``CHUNK`` columns, over ``run`` tiles of tokens."""
    cols = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    mask = cols < D
    part = tl.program_id(1)
    norm = column_weight(norm_ptr, cols, mask, HIDDEN_NORM)
    dnorm = tl.zeros([T, CHUNK], tl.float32)
    dw = (tl.zeros([T, CHUNK], tl.float32),) * M
    for step in range(run):
        rows = (part.to(tl.int64) * run + step) * T + tl.arange(0, T)
        live = rows < n_tokens
        inside = live[:, None] & mask[None, :]
        dc = tl.load(grad_ptr + rows[:, None] * D + cols[None, :], mask=inside, other=0.0)
        dc = dc.to(tl.float32)
        i = tl.load(token_ptr + 2 * M * padded + rows, mask=live, other=0.0)
        lam = tl.load(token_ptr + (2 * M + 1) * padded + rows, mask=live, other=0.0)
        paths = ()
        y = tl.zeros([T, CHUNK], tl.float32)
        for j in tl.static_range(M):
            where = x_ptr + rows[:, None] * x_stride + (j * D + cols)[None, :]
            paths = paths + (tl.load(where, mask=inside, other=0.0).to(tl.float32),)
            s = tl.load(token_ptr + j * padded + rows, mask=live, other=0.0)
            w = column_weight(path_ptr + j * D, cols, mask, PATH_NORM)
            y += s[:, None] * (paths[j] * w[None, :])
        dnorm += i[:, None] * y * dc
        dy = i[:, None] * (dc * norm[None, :]) - lam[:, None] * y
        new_dw = ()
        for j in tl.static_range(M):
            s = tl.load(token_ptr + j * padded + rows, mask=live, other=0.0)
            sdy = s[:, None] * dy
            new_dw = new_dw + (dw[j] + sdy * paths[j],)
            if NEED_HIDDEN:
                w = column_weight(path_ptr + j * D, cols, mask, PATH_NORM)
                kappa = tl.load(token_ptr + (M + j) * padded + rows, mask=live, other=0.0)
                dx = sdy * w[None, :] + kappa[:, None] * paths[j]
                for k in tl.static_range(M):
                    dz = tl.load(token_ptr + (3 * M + 2 + k) * padded + rows, mask=live, other=0.0)
                    fn = tl.load(fn_ptr + (k * M + j) * D + cols, mask=mask, other=0.0)
                    dx += dz[:, None] * fn.to(tl.float32)[None, :]
                where = dx_ptr + rows[:, None] * (M * D) + (j * D + cols)[None, :]
                tl.store(where, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        dw = new_dw
    if PATH_NORM:
        for j in tl.static_range(M):
            tl.store(dw_ptr + (part * M + j) * D + cols, tl.sum(dw[j], axis=0), mask=mask)
    if HIDDEN_NORM:
        tl.store(dnorm_ptr + part * D + cols, tl.sum(dnorm, axis=0), mask=mask)


@triton.jit(do_not_specialize=["n_tokens", "padded", "run"])
def _gate_kernel(
    x_ptr, token_ptr, dfn_ptr, x_stride, n_tokens, padded, run,
    M: tl.constexpr, D: tl.constexpr, T: tl.constexpr, CHUNK: tl.constexpr, G: tl.constexpr,
    EXACT: tl.constexpr,
):
    """``dfn = dz^T x`` in ``CHUNK`` of the ``m*d`` columns, over ``run`` tiles of tokens."""
    cols = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    mask = cols < M * D
    part = tl.program_id(1)
    gate = tl.arange(0, G)
    dz_rows = token_ptr + (3 * M + 2 + gate)[:, None] * padded
    dfn = tl.zeros([G, CHUNK], tl.float32)
    for step in range(run):
        rows = (part.to(tl.int64) * run + step) * T + tl.arange(0, T)
        live = rows < n_tokens
        dz = tl.load(dz_rows + rows[None, :], mask=(gate < M)[:, None] & live[None, :], other=0.0)
        where = x_ptr + rows[:, None] * x_stride + cols[None, :]
        x = tl.load(where, mask=live[:, None] & mask[None, :], other=0.0)
        if EXACT:
            dfn = tl.dot(dz, x, dfn, input_precision="tf32x3")
        else:
            # A token's dz as two 16-bit terms, as the forward takes fn; scaled, so that fp16 holds
            # what a small loss scale leaves.
            top = tl.maximum(tl.max(tl.abs(dz), axis=1), 1e-30)[:, None]
            unit = dz / top
            high = unit.to(x.dtype)
            low = (unit - high.to(tl.float32)).to(x.dtype)
            product = tl.dot(high, x, tl.zeros([G, CHUNK], tl.float32))
            dfn += top * tl.dot(low, x, product)
    where = dfn_ptr + (part * M + gate)[:, None] * (M * D) + cols[None, :]
    tl.store(where, dfn, mask=(gate < M)[:, None] & mask[None, :])
# fmt: on


def token_constants(a: GateArguments) -> dict[str, int | bool]:
    """Compile-time arguments of the per-token kernel."""
    return {
        "M": a.m,
        "D": a.d,
        "T": TOKENS,
        "CHUNK": TOKEN_CHUNK,
        "PATH_NORM": a.path_norm is not None,
        "HIDDEN_NORM": a.hidden_norm is not None,
    }


def column_chunk(m: int) -> int:
    """Columns of every path that one CTA of the per-column kernel keeps in registers."""
    return 64 if m <= 4 else 32


def column_constants(a: GateArguments, need_hidden: bool) -> dict[str, int | bool]:
    """Compile-time arguments of the per-column kernel."""
    return {**token_constants(a), "CHUNK": column_chunk(a.m), "NEED_HIDDEN": need_hidden}


def gate_constants(a: GateArguments) -> dict[str, int | bool]:
    """Compile-time arguments of the kernel for ``fn``."""
    exact = a.hidden.dtype == torch.float32
    return {"M": a.m, "D": a.d, "T": TOKENS, "CHUNK": GATE_CHUNK, "G": 16, "EXACT": exact}


def token_gradients(a: GateArguments, grad: torch.Tensor, stats: torch.Tensor) -> torch.Tensor:
    """The numbers of each token, ``[4m + 2, padded N]`` fp32: ``s, kappa, i, lam, t, dz``."""
    n, tiles = len(a.hidden), triton.cdiv(len(a.hidden), TOKENS)
    padded = tiles * TOKENS
    tokens = torch.empty(4 * a.m + 2, padded, dtype=torch.float32, device=a.hidden.device)
    where = (*a.pointers(), grad, stats, tokens, a.hidden.stride(0), n, padded)
    if n:
        _token_kernel[(tiles,)](*where, a.rms_eps, a.hc_eps, **token_constants(a), num_warps=WARPS)
    return tokens


def column_gradients(
    a: GateArguments, grad: torch.Tensor, tokens: torch.Tensor, need_hidden: bool
) -> tuple[torch.Tensor, ...]:
    """``dhidden`` (empty unless wanted) and fp32 ``dfn, dpath_norm, dhidden_norm``.

    Args:
        tokens: from :func:`token_gradients`.
    """
    m, d, n = a.m, a.d, len(a.hidden)
    parts = triton.cdiv(tokens.shape[1], TOKENS * RUN)
    dx = a.hidden.new_empty((n, m * d) if need_hidden else 0)
    new = {"dtype": torch.float32, "device": a.hidden.device}
    dfn = torch.empty(parts, m, m * d, **new)
    dw, dnorm = torch.empty(parts, m, d, **new), torch.empty(parts, d, **new)
    if n:
        hidden, fn, _, _, path_norm, hidden_norm = a.pointers()
        size = (hidden.stride(0), n, tokens.shape[1], RUN)
        where = (hidden, fn, path_norm, hidden_norm, grad, tokens, dx if need_hidden else dfn)
        grid = (triton.cdiv(d, column_chunk(m)), parts)
        constants = column_constants(a, need_hidden)
        _column_kernel[grid](*where, dw, dnorm, *size, **constants, num_warps=WARPS)
        grid = (triton.cdiv(m * d, GATE_CHUNK), parts)
        _gate_kernel[grid](hidden, tokens, dfn, *size, **gate_constants(a), num_warps=4)
    return dx, dfn.sum(0), dw.sum(0), dnorm.sum(0)
