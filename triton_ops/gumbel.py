"""Gumbel noise that any process can recompute, from a hash of seed, position and token.

    h     = murmur3_32(seed low, seed high, position, id)        # four 32-bit words
    x     = h / (2^32 - 1)                                       # fp64
    g     = -log(clamp(-log x, 2^-32, max))                      # fp64, standard Gumbel
    token = argmax_v(log w_v + g(seed, position, v))             # a draw from w / sum w

Source: SGLang's seeded sampler (``layers/sampler.py: multinomial_with_seed`` and the Triton kernel
``murmur_hash32``), bit for bit. If one request of a batch has a filter, SGLang hashes ranks instead
of vocabulary ids; here it is always the id, so a draw does not depend on the rest of the batch.
Every kernel of ``triton_ops`` that draws computes the same noise (``gumbel_kernel``).
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_C1, _C2, _M, _N = 0xCC9E2D51, 0x1B873593, 5, 0xE6546B64
_F1, _F2 = 0x85EBCA6B, 0xC2B2AE35
_WORDS_BYTES = 16

# Streams besides that of the drafts, whose noise must not decide their acceptance.
COIN_STREAM = 0x5DEECE66D1CE4E5B
RESIDUAL_STREAM = 0x2545F4914F6CDD1D
# Blocks of one request that start at different positions draw from different streams. Odd.
BLOCK_STREAM = -0x61C8864680B583EB


def _rotated(x: torch.Tensor, r: int) -> torch.Tensor:
    """Rotate the low 32 bits of ``x``; the caller masks the high bits."""
    return (x << r).bitwise_or_(x >> (32 - r))


def _scramble(k: torch.Tensor) -> torch.Tensor:
    # int64 products wrap; their low 32 bits are those of the 32-bit product.
    return _rotated((k * _C1).bitwise_and_(_MASK), 15).mul_(_C2).bitwise_and_(_MASK)


def _mixed(h: torch.Tensor) -> torch.Tensor:
    return _rotated(h, 13).mul_(_M).add_(_N).bitwise_and_(_MASK)


def hash32(seeds: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the hashes ``[N, K]`` int64, in ``[0, 2^32)``.

    Args:
        seeds: ``[N]`` integers.
        positions: ``[N]`` integers.
        ids: ``[K]`` integers for all rows, or ``[N, K]``.
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
    """Return ``g(seed, position, id)``, ``[N, K]`` fp64, of the arguments of :func:`hash32`."""
    x = hash32(seeds, positions, ids).to(torch.float64).div_(_MASK)
    x.log_().clamp_(min=torch.finfo(x.dtype).min, max=-(2.0**-32)).neg_()
    return x.log_().neg_()


def block_seeds(seeds: torch.Tensor, seeded: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Return the seeds ``[bs]`` of blocks after ``start [bs]``; unchanged where ``seeded [bs]``."""
    return torch.where(seeded, seeds, seeds + (start + 1) * BLOCK_STREAM)  # wraps


def coins(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return a uniform number in ``[0, 1)`` for each seed and position, fp64, of their shape."""
    shape = seeds.shape
    zero = torch.zeros(1, dtype=torch.long, device=seeds.device)
    hashed = hash32(seeds.reshape(-1) ^ COIN_STREAM, positions.reshape(-1), zero)
    return hashed.to(torch.float64).div_(2.0**32).view(shape)


def gumbel_argmax(
    weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Draw one id ``[N]`` int64 from each row of ``weights [N, V]``; ties go to the lower id."""
    ids = torch.arange(weights.shape[-1], device=weights.device)
    return gumbel_noise(seeds, positions, ids).add_(weights.log()).argmax(-1)
