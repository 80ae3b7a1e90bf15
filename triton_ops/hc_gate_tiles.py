"""Many rows (prefill, training): one launch, the residual read from DRAM once.

Programs do two kinds of work. A *stats* item reads a tile of tokens in a slice of the columns and
leaves partial sums; the last slice of a tile to arrive turns them into one coefficient per token
and path. An *apply* item multiplies the tile by those coefficients. The gate matrix is read once
per tile instead of once per token, and an apply item finds its tile in L2, because it runs only
``lag`` tiles after the stats items that loaded it.

Apply items wait for the flag of an item with a *lower* program id; stats items wait for nothing. On
NVIDIA's GPUs programs start in the order of their ids (no document promises it; CUB's single-pass
scan has relied on it), and one that has started keeps its multiprocessor until it ends or
returns to one. So what an item waits for is running or done, and some item always makes progress.
In another order a launch could hang; it could not give a wrong answer. That is why AMD's GPUs,
which distribute programs over several dies, are not supported. (Numbers from a counter
would not rely on the order, but are not constants of a warp: compiled for sm_90 they cost 16
registers a thread, and with those the second CTA of a multiprocessor. Two launches would read the
residual from DRAM twice.) A wait costs its CTA's place on the multiprocessor and one atomic read of
L2 per turn; ``lag`` keeps it short. Only the last slice of a tile finishes it, while the other
items of its step go on; only what follows ``lag`` tiles later reads its flag.
All sums have a fixed order: a result does not change from run to run. Formulas:
:mod:`triton_ops.hc_gate`.

What a token costs on V4-Flash (m 4, d 4096, bf16; tiles of 64 tokens, slices of 256 columns),
counted: DRAM 32 KiB read, 8 KiB written, 1 KiB of partial sums; L2 32 KiB for stats items, 4 KiB
of ``fn`` and 1 KiB of ``path_norm`` (their 320 KiB over 64 tokens), 2 KiB of partial sums, 32 KiB
again and 9 KiB of weights and output for the apply items: 80 KiB. (One CTA per token would take
256 KiB of ``fn`` alone.) On sm_90 two CTAs fit a multiprocessor, which
``tests/unit/triton_ops/test_compiled.py`` holds; on sm_80, sm_100 and sm_120 one does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from triton_ops.hc_gate_row import column_weight


# fmt: off
@triton.jit
def eighths(t, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Eight tiles ``[ROWS, COLS // 8]``, the columns modulo 8; a thread holds all eight of a group.

    Products of them add up in registers, one fused multiply-add each and no shuffles; a reduction
    over columns happens once per slice.
    """
    even, odd = tl.split(tl.reshape(t, [ROWS, COLS // 8, 2, 2, 2]))
    a, b = tl.split(even)
    c, d = tl.split(odd)
    a, b, c, d = tl.split(a), tl.split(b), tl.split(c), tl.split(d)
    return a + b + c + d


@triton.jit
def dot_eighths(total, a, b):
    """``total + sum_e a[e] * b[e]`` over two tuples of eight tiles."""
    for e in tl.static_range(8):
        total = tl.fma(a[e], b[e], total)
    return total


@triton.jit
def _gate_product(
    z, x, fn_ptr, columns, mask,
    M: tl.constexpr, D: tl.constexpr, G: tl.constexpr, EXACT: tl.constexpr,
):
    """``z [T, G] + x @ fn[:, columns].T`` on the matrix units; the columns past M stay zero.

    A 16-bit ``x`` is multiplied by each fp32 weight as two 16-bit terms, whose products are exact
    and whose sum keeps 16 bits of the weight (bf16) or 22 (fp16).
    """
    gate = tl.arange(0, G)
    w = tl.load(
        fn_ptr + gate[None, :] * (M * D) + columns[:, None],
        mask=mask[:, None] & (gate < M)[None, :],
        other=0.0,
    ).to(tl.float32)
    if EXACT:
        return tl.dot(x, w, z, input_precision="tf32x3")
    else:
        high = w.to(x.dtype)
        z = tl.dot(x, high, z)
        return tl.dot(x, (w - high.to(tl.float32)).to(x.dtype), z)


@triton.jit
def _stats_item(
    x_ptr, fn_ptr, path_ptr, partial_ptr, tile, piece, x_stride, n_tokens, padded,
    M: tl.constexpr, D: tl.constexpr, T: tl.constexpr, SLICE: tl.constexpr, CHUNK: tl.constexpr,
    G: tl.constexpr, EXACT: tl.constexpr, PATH_NORM: tl.constexpr, HIDDEN_NORM: tl.constexpr,
):
    """Partial sums of one tile in one slice: M gate products, M squares, M(M+1)/2 Gram entries."""
    local = tl.arange(0, T)
    rows = tile.to(tl.int64) * T + local
    x_rows = x_ptr + rows[:, None] * x_stride
    live = (rows < n_tokens)[:, None]
    ENTRIES: tl.constexpr = M * (M + 1) // 2
    zero = tl.zeros([T, CHUNK // 8], tl.float32)
    squares = (zero,) * M
    gram = (zero,) * ENTRIES
    z = tl.zeros([T, G], tl.float32)
    first = piece * SLICE
    for start in range(first, tl.minimum(first + SLICE, D), CHUNK):
        cols = start + tl.arange(0, CHUNK)
        mask = cols < D
        weighted = ()
        new_squares = ()
        for j in tl.static_range(M):
            x = tl.load(x_rows + (j * D + cols)[None, :], mask=live & mask[None, :], other=0.0)
            z = _gate_product(z, x, fn_ptr, j * D + cols, mask, M, D, G, EXACT)
            x = x.to(tl.float32)
            own = eighths(x, T, CHUNK)
            new_squares = new_squares + (dot_eighths(squares[j], own, own),)
            w = column_weight(path_ptr + j * D, cols, mask, PATH_NORM)
            weighted = weighted + (eighths(x * w[None, :], T, CHUNK),)
        squares = new_squares
        if HIDDEN_NORM:
            new_gram = ()
            for j in tl.static_range(M):
                for k in tl.static_range(j, M):
                    entry = gram[j * (2 * M - j - 1) // 2 + k]
                    new_gram = new_gram + (dot_eighths(entry, weighted[j], weighted[k]),)
            gram = new_gram

    out = partial_ptr + piece.to(tl.int64) * (2 * M + ENTRIES) * padded + rows
    gate = tl.arange(0, G)[None, :]
    for j in tl.static_range(M):
        tl.store(out + j * padded, tl.sum(tl.where(gate == j, z, 0.0), axis=1))
        tl.store(out + (M + j) * padded, tl.sum(squares[j], axis=1))
    if HIDDEN_NORM:
        for q in tl.static_range(ENTRIES):
            tl.store(out + (2 * M + q) * padded, tl.sum(gram[q], axis=1))


@triton.jit
def _sum_of_squares(
    x_ptr, path_ptr, s, rows, x_stride, n_tokens,
    M: tl.constexpr, D: tl.constexpr, T: tl.constexpr, CHUNK: tl.constexpr,
    PATH_NORM: tl.constexpr,
):
    """``sum_d y^2 [T]`` from ``y`` itself: the rare case in which the Gram form cancels."""
    live = (rows < n_tokens)[:, None]
    total = tl.zeros([T], tl.float32)
    for start in range(0, D, CHUNK):
        cols = start + tl.arange(0, CHUNK)
        mask = cols < D
        y = tl.zeros([T, CHUNK], tl.float32)
        for j in tl.static_range(M):
            where = x_ptr + rows[:, None] * x_stride + (j * D + cols)[None, :]
            x = tl.load(where, mask=live & mask[None, :], other=0.0).to(tl.float32)
            w = column_weight(path_ptr + j * D, cols, mask, PATH_NORM)
            y += s[j][:, None] * (x * w[None, :])
        total += tl.sum(y * y, axis=1)
    return total


@triton.jit
def _finish_tile(
    x_ptr, base_ptr, scale_ptr, path_ptr, partial_ptr, coefficient_ptr, stats_ptr, tile, x_stride,
    n_tokens, padded, rms_eps, hc_eps,
    M: tl.constexpr, D: tl.constexpr, T: tl.constexpr, CHUNK: tl.constexpr, PIECES: tl.constexpr,
    SLOTS: tl.constexpr, PATH_NORM: tl.constexpr, HIDDEN_NORM: tl.constexpr,
    SAVE_STATS: tl.constexpr,
):
    """Sum a tile's partials over its slices; write the coefficient of every token and path."""
    rows = tile.to(tl.int64) * T + tl.arange(0, T)
    inside = rows < n_tokens
    ENTRIES: tl.constexpr = M * (M + 1) // 2
    piece = tl.arange(0, SLOTS)[:, None]
    where = partial_ptr + piece.to(tl.int64) * (2 * M + ENTRIES) * padded + rows[None, :]
    have = piece < PIECES
    z = ()
    squares = ()
    mean_square = tl.zeros([T], tl.float32)
    for j in tl.static_range(M):
        part = tl.load(where + j * padded, mask=have, other=0.0, cache_modifier=".cg")
        z = z + (tl.sum(part, axis=0),)
        part = tl.load(where + (M + j) * padded, mask=have, other=0.0, cache_modifier=".cg")
        squares = squares + (tl.sum(part, axis=0),)
        mean_square += squares[j] / (M * D)
    r = tl.rsqrt(mean_square + rms_eps)
    scale = tl.load(scale_ptr).to(tl.float32)
    s = ()
    for j in tl.static_range(M):
        a = tl.sigmoid(scale * z[j] * r + tl.load(base_ptr + j).to(tl.float32)) + hc_eps
        if PATH_NORM:
            a = a * tl.rsqrt(squares[j] / D + rms_eps)
        s = s + (a,)
    inverse = tl.full([T], 1.0, tl.float32)
    if HIDDEN_NORM:
        total = tl.zeros([T], tl.float32)
        own = tl.zeros([T], tl.float32)
        for j in tl.static_range(M):
            for k in tl.static_range(j, M):
                entry = where + (2 * M + j * (2 * M - j - 1) // 2 + k) * padded
                g = tl.sum(tl.load(entry, mask=have, other=0.0, cache_modifier=".cg"), axis=0)
                # Two factors in turn: s^2 alone can leave fp32's range when another path is huge.
                share = s[j] * (s[k] * g)
                if j == k:
                    total += share
                    own += share
                else:
                    total += 2 * share
        # Below 1/16 of what uncorrelated paths give, the Gram form has lost digits to cancellation.
        if tl.max((16.0 * total < own).to(tl.int32), axis=0) > 0:
            total = _sum_of_squares(
                x_ptr, path_ptr, s, rows, x_stride, n_tokens, M, D, T, CHUNK, PATH_NORM
            )
        inverse = tl.rsqrt(total / D + rms_eps)
    for j in tl.static_range(M):
        tl.store(coefficient_ptr + j * padded + rows, s[j] * inverse)
        if SAVE_STATS:
            tl.store(stats_ptr + j * n_tokens + rows, z[j], mask=inside)
            tl.store(stats_ptr + (M + j) * n_tokens + rows, squares[j], mask=inside)
    if SAVE_STATS:
        tl.store(stats_ptr + 2 * M * n_tokens + rows, inverse, mask=inside)


@triton.jit
def _apply_item(
    x_ptr, path_ptr, norm_ptr, coefficient_ptr, out_ptr, tile, piece, x_stride, n_tokens, padded,
    M: tl.constexpr, D: tl.constexpr, T: tl.constexpr, SLICE: tl.constexpr, CHUNK: tl.constexpr,
    PATH_NORM: tl.constexpr, HIDDEN_NORM: tl.constexpr,
):
    """Write one tile of the output in one slice, from residuals that are still in L2."""
    rows = tile.to(tl.int64) * T + tl.arange(0, T)
    live = (rows < n_tokens)[:, None]
    coefficients = ()
    for j in tl.static_range(M):
        c = tl.load(coefficient_ptr + j * padded + rows, cache_modifier=".cg")
        coefficients = coefficients + (c,)
    first = piece * SLICE
    for start in range(first, tl.minimum(first + SLICE, D), CHUNK):
        cols = start + tl.arange(0, CHUNK)
        mask = cols < D
        y = tl.zeros([T, CHUNK], tl.float32)
        for j in tl.static_range(M):
            where = x_ptr + rows[:, None] * x_stride + (j * D + cols)[None, :]
            x = tl.load(
                where, mask=live & mask[None, :], other=0.0, eviction_policy="evict_first"
            ).to(tl.float32)
            w = column_weight(path_ptr + j * D, cols, mask, PATH_NORM)
            y += coefficients[j][:, None] * (x * w[None, :])
        y = y * column_weight(norm_ptr, cols, mask, HIDDEN_NORM)[None, :]
        out = out_ptr + rows[:, None] * D + cols[None, :]
        tl.store(out, y.to(out_ptr.dtype.element_ty), mask=live & mask[None, :])


@triton.jit(do_not_specialize=["n_tokens", "n_tiles", "lag"])
def _tile_kernel(
    x_ptr, fn_ptr, base_ptr, scale_ptr, path_ptr, norm_ptr, out_ptr, stats_ptr, partial_ptr,
    coefficient_ptr, arrived_ptr, ready_ptr, x_stride, n_tokens, n_tiles, lag, rms_eps, hc_eps,
    M: tl.constexpr, D: tl.constexpr, T: tl.constexpr, SLICE: tl.constexpr, CHUNK: tl.constexpr,
    G: tl.constexpr, EXACT: tl.constexpr, PIECES: tl.constexpr, SLOTS: tl.constexpr,
    PATH_NORM: tl.constexpr, HIDDEN_NORM: tl.constexpr, SAVE_STATS: tl.constexpr,
):
    item = tl.program_id(0)
    step = item // (2 * PIECES)
    piece = (item % (2 * PIECES)) // 2
    padded = n_tiles.to(tl.int64) * T
    if item % 2 == 0:
        tile = step
        if tile < n_tiles:
            _stats_item(
                x_ptr, fn_ptr, path_ptr, partial_ptr, tile, piece, x_stride, n_tokens, padded,
                M, D, T, SLICE, CHUNK, G, EXACT, PATH_NORM, HIDDEN_NORM,
            )
            # Every thread's partials must be written before one thread announces them.
            tl.debug_barrier()
            before = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel")
            if before == PIECES - 1:
                tl.debug_barrier()
                _finish_tile(
                    x_ptr, base_ptr, scale_ptr, path_ptr, partial_ptr, coefficient_ptr, stats_ptr,
                    tile, x_stride, n_tokens, padded, rms_eps, hc_eps,
                    M, D, T, CHUNK, PIECES, SLOTS, PATH_NORM, HIDDEN_NORM, SAVE_STATS,
                )
                tl.debug_barrier()
                tl.atomic_xchg(ready_ptr + tile, 1, sem="release")
    else:
        tile = step - lag
        if tile >= 0:
            while tl.atomic_add(ready_ptr + tile, 0, sem="acquire") == 0:
                pass
            tl.debug_barrier()
            _apply_item(
                x_ptr, path_ptr, norm_ptr, coefficient_ptr, out_ptr, tile, piece, x_stride,
                n_tokens, padded, M, D, T, SLICE, CHUNK, PATH_NORM, HIDDEN_NORM,
            )
# fmt: on


@dataclass(frozen=True)
class TileShape:
    """How the tile kernel cuts its work; every field is a power of two, ``chunk`` at least 16.

    ``tokens`` per tile share each read of the gate matrix; ``columns`` of every path make one
    slice; ``chunk`` columns are in registers at a time.
    """

    tokens: int = 64
    columns: int = 256
    chunk: int = 64
    num_warps: int = 8
    num_stages: int = 3

    @classmethod
    def for_sizes(cls, m: int, dtype: torch.dtype) -> TileShape:
        """The shape served: what a chunk of m paths needs must fit the registers."""
        return cls(chunk=max(16, min(64, 512 // (m * dtype.itemsize))))

    def pieces(self, d: int) -> int:
        """Slices of a row of ``d`` columns."""
        return triton.cdiv(d, self.columns)


def constants(a, shape: TileShape, save_stats: bool) -> dict[str, int | bool]:
    """Compile-time arguments of the tile kernel."""
    return {
        "M": a.m,
        "D": a.d,
        "T": shape.tokens,
        "SLICE": shape.columns,
        "CHUNK": shape.chunk,
        "G": 8,
        "EXACT": a.hidden.dtype == torch.float32,
        "PIECES": shape.pieces(a.d),
        # Not in the kernel: SGLang replaces Triton's function by one that no kernel may call.
        "SLOTS": triton.next_power_of_2(shape.pieces(a.d)),
        "PATH_NORM": a.path_norm is not None,
        "HIDDEN_NORM": a.hidden_norm is not None,
        "SAVE_STATS": save_stats,
    }


def tile_lag(shape: TileShape, d: int, multiprocessors: int) -> int:
    """Tiles between the stats items and the apply items of one step.

    One step more than the GPU holds at once (two CTAs a multiprocessor, two items a piece): apply
    items then seldom wait, and what they reread is about 25 MB old, inside L2.
    """
    return triton.cdiv(2 * multiprocessors, 2 * shape.pieces(d)) + 1


def launch(
    arguments, out: torch.Tensor, stats: torch.Tensor | None, shape: TileShape, lag: int
) -> None:
    """The two-phase launch; ``arguments`` as for :func:`triton_ops.hc_gate_row.launch`."""
    a = arguments
    m, d, n = a.m, a.d, len(a.hidden)
    tiles, pieces = triton.cdiv(n, shape.tokens), shape.pieces(d)
    new = {"device": a.hidden.device}
    sums = 2 * m + m * (m + 1) // 2
    partial = torch.empty(pieces, sums, tiles * shape.tokens, dtype=torch.float32, **new)
    coefficient = torch.empty(m, tiles * shape.tokens, dtype=torch.float32, **new)
    # Both start at 16 bytes: Triton recompiles a kernel for pointers of another alignment.
    flags = torch.zeros(2, 4 * triton.cdiv(tiles, 4), dtype=torch.int32, **new)
    _tile_kernel[(2 * pieces * (tiles + lag),)](
        *a.pointers(),
        out,
        out if stats is None else stats,
        partial,
        coefficient,
        *flags,
        a.hidden.stride(0),
        n,
        tiles,
        lag,
        a.rms_eps,
        a.hc_eps,
        **constants(a, shape, stats is not None),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
