"""The noise of :mod:`triton_ops.gumbel` as device functions, for every kernel that draws.

Noise in registers saves about 60 torch operations and their int64 and fp64 tensors per draw.

    function                              arguments              result
    row_hash(seed, position)              int64, integer         uint32: hash of the first 3 words
    noise(hashed, ids)                    uint32, uint32         fp64: g(seed, position, id)
    coin(seed, position)                  int64, integer         fp64 in [0, 1): gumbel.coins
    block_seed(seed, seeded, start)       int64, bool, integer   int64: gumbel.block_seeds
    divided(x, t)                         fp32, fp32             fp32: x / t as torch rounds it

Arguments are scalars or blocks. Kernels are launched without fusion of products and sums, so that
all of them compute the same draw.
"""

from __future__ import annotations

import triton
import triton.language as tl

from triton_ops import gumbel

COIN_STREAM = tl.constexpr(gumbel.COIN_STREAM)
BLOCK_STREAM = tl.constexpr(gumbel.BLOCK_STREAM)
RESIDUAL_STREAM = tl.constexpr(gumbel.RESIDUAL_STREAM)


@triton.jit
def _rotate(x, r: tl.constexpr):
    return (x << r) | (x >> (32 - r))


@triton.jit
def _mix(h, k):
    k = k * 0xCC9E2D51
    k = _rotate(k, 15) * 0x1B873593
    return _rotate(h ^ k, 13) * 5 + 0xE6546B64


@triton.jit
def _finished(hashed, ids):
    """Return the hash after its last word."""
    h = _mix(hashed, ids) ^ 16
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def row_hash(seed, position):
    """Return the hash of a row's ``seed`` and the low 32 bits of its ``position``."""
    seed = seed.to(tl.uint64, bitcast=True)
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    h = _mix(_mix(tl.zeros_like(low), low), (seed >> 32).to(tl.uint32))
    return _mix(h, position.to(tl.uint32))


@triton.jit
def noise(hashed, ids):
    """Return the Gumbel noise of uint32 ``ids`` for a row's ``hashed`` seed and position."""
    h = _finished(hashed, ids)
    x = h.to(tl.float64) / 4294967295.0
    # log(0) is -inf, which the reference clamps to the lowest fp64.
    y = tl.where(h == 0, -1.7976931348623157e308, tl.log(tl.where(h == 0, 0.5, x)))
    y = -tl.minimum(y, -2.3283064365386963e-10)
    return -tl.log(y)


@triton.jit
def coin(seed, position):
    """Return a uniform number of a stream that no draw uses."""
    hashed = row_hash(seed ^ COIN_STREAM, position)
    return _finished(hashed, tl.zeros_like(hashed)).to(tl.float64) / 4294967296.0


@triton.jit
def block_seed(seed, seeded, start):
    """Return the seed of a block after position ``start``; unchanged if ``seeded``."""
    return tl.where(seeded, seed, seed + (start.to(tl.int64) + 1) * BLOCK_STREAM)


@triton.jit
def divided(x, t):
    """Divide with IEEE rounding; Triton's ``/`` is off by a bit or two."""
    return tl.div_rn(x, t)
