"""Noise that any process can recompute: Gumbel variables from a hash of seed, position, token.

    h     = murmur3_32(seed low, seed high, position, id)        # four 32-bit words
    x     = h / (2^32 - 1)                                       # fp64
    g     = -log(clamp(-log x, 2^-32, max))                      # fp64, standard Gumbel
    token = argmax_v(log w_v + g(seed, position, v))             # a draw from w / sum w

Source: SGLang's seeded sampler (``layers/sampler.py: multinomial_with_seed`` and the Triton kernel
``murmur_hash32``), bit for bit. SGLang keys the last word by rank as soon as one request of a
batch filters; here it is the vocabulary id always, so a draw does not depend on its batchmates.

Every kernel of ``triton_ops`` computes the same noise (``gumbel_kernel``), and rows and blocks draw
from it: ``verification``, ``draft.propose``.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_C1, _C2, _M, _N = 0xCC9E2D51, 0x1B873593, 5, 0xE6546B64
_F1, _F2 = 0x85EBCA6B, 0xC2B2AE35
_WORDS_BYTES = 16

# Streams besides that of the draws. A draft's own noise must not decide whether it is accepted.
COIN_STREAM = 0x5DEECE66D1CE4E5B
RESIDUAL_STREAM = 0x2545F4914F6CDD1D
# Blocks of one request that start at different places draw from different streams. Odd.
BLOCK_STREAM = -0x61C8864680B583EB


def _rotated(x: torch.Tensor, r: int) -> torch.Tensor:
    """``x`` rotated in its low 32 bits; what is above them is the caller's to cut."""
    return (x << r).bitwise_or_(x >> (32 - r))


def _scramble(k: torch.Tensor) -> torch.Tensor:
    # int64 products wrap; their low 32 bits are those of the 32-bit product.
    return _rotated((k * _C1).bitwise_and_(_MASK), 15).mul_(_C2).bitwise_and_(_MASK)


def _mixed(h: torch.Tensor) -> torch.Tensor:
    return _rotated(h, 13).mul_(_M).add_(_N).bitwise_and_(_MASK)


def hash32(seeds: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """``[N, K]`` int64 in ``[0, 2^32)``.

    Args:
        seeds, positions: ``[N]`` integers.
        ids: ``[K]``, the same for every row, or ``[N, K]``.
    """
    seeds, positions, ids = seeds.long(), positions.long(), ids.long()
    words = _scramble(torch.stack([seeds, seeds >> 32, positions]).bitwise_and_(_MASK))
    h = _mixed(words[0])
    h = _mixed(h ^ words[1])
    h = _mixed(h ^ words[2])
    h = _mixed(h.unsqueeze(1) ^ _scramble(ids & _MASK))
    h.bitwise_xor_(_WORDS_BYTES)
    for shift, factor in ((16, _F1), (13, _F2)):
        h.bitwise_xor_(h >> shift).mul_(factor).bitwise_and_(_MASK)
    return h.bitwise_xor_(h >> 16)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """``g(seed, position, id)``, ``[N, K]`` fp64; arguments as :func:`hash32`."""
    x = hash32(seeds, positions, ids).to(torch.float64).div_(_MASK)
    x.log_().clamp_(min=torch.finfo(x.dtype).min, max=-(2.0**-32)).neg_()
    return x.log_().neg_()


def block_seeds(seeds: torch.Tensor, seeded: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """The noise of blocks after positions ``start [bs]``: the seed's own where ``seeded [bs]``."""
    return torch.where(seeded, seeds, seeds + (start + 1) * BLOCK_STREAM)  # wraps


def coins(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One uniform number in ``[0, 1)`` for each seed and position, fp64, of their shape."""
    shape = seeds.shape
    zero = torch.zeros(1, dtype=torch.long, device=seeds.device)
    hashed = hash32(seeds.reshape(-1) ^ COIN_STREAM, positions.reshape(-1), zero)
    return hashed.to(torch.float64).div_(2.0**32).view(shape)


def gumbel_argmax(
    weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """One draw for each row of ``weights [N, V]``, ``[N]`` int64; ties go to the lower id."""
    ids = torch.arange(weights.shape[-1], device=weights.device)
    return gumbel_noise(seeds, positions, ids).add_(weights.log()).argmax(-1)
