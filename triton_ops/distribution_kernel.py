"""A drafter's distribution over one row's K candidates, as device functions for propose_kernel.

    q = filter(softmax(s / temperature))       # draft.propose.draft_distribution

They replace the launches and bytes of 5 torch operations per draft, 24 with filters. The filters
keep a prefix of the candidates by falling ``q``, ties by index. The bits of ``q``, which rise with
it, and the index form one integer key: sorted keys have that order, so the prefix is a threshold.
Blocks have WIDTH entries, K padded to a power of two; ``index`` is ``0 .. WIDTH - 1``, and
``inside`` says which entries are candidates.
"""

from __future__ import annotations

import triton
import triton.language as tl

from triton_ops.gumbel_kernel import divided

# Up to so many candidates, comparing all pairs is faster than sorting.
_PAIRS = tl.constexpr(64)
_NO_KEY = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def first_largest(s, index, inside, WIDTH: tl.constexpr):
    """Return the index of the first largest score; NaN is the largest, as in ``torch.argmax``."""
    nan = s != s
    top = tl.max(tl.where(nan, float("-inf"), s), 0)
    broken = tl.max(nan.to(tl.int32), 0)
    largest = nan | ((s == top) & (broken == 0))
    return tl.min(tl.where(largest & inside, index, WIDTH), 0)


@triton.jit
def _filtered(q, index, top_k, top_p, min_p,
              SEQUENTIAL: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Return ``q`` after top-k, top-p and min-p, normalised."""
    bits = q.to(tl.int32, bitcast=True).to(tl.int64)
    key = (bits << 32) | (WIDTH - 1 - index).to(tl.int64)
    if WIDTH <= _PAIRS:
        ahead = key[None, :] > key[:, None]
        before = tl.sum(tl.where(ahead, q[None, :], 0.0), 1)
        rank, p, ordered = tl.sum(ahead.to(tl.int32), 1), q, key
    else:
        ordered = tl.sort(key, descending=True)
        p = (ordered >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        rank, before = index, tl.cumsum(p, 0) - p
    kept = (rank < top_k) & (rank < K)
    if SEQUENTIAL:
        mass = tl.sum(tl.where(kept, p, 0.0), 0)
        before = divided(before, tl.where(min_p > 0, mass, 1.0))
    limit = tl.where(top_p >= 1.0, float("inf"), top_p)
    kept = kept & (before <= limit) & (p >= min_p * tl.max(q, 0))
    threshold = tl.min(tl.where(kept, ordered, _NO_KEY), 0)
    q = tl.where(key >= threshold, q, 0.0)
    return q / tl.sum(q, 0)


@triton.jit
def draft_distribution(s, index, inside, temperature, argmax, top_k, top_p_ptr, min_p_ptr,
                       FILTERS: tl.constexpr, SEQUENTIAL: tl.constexpr, K: tl.constexpr,
                       WIDTH: tl.constexpr):  # fmt: skip
    """Return ``q [WIDTH]`` of scores ``s``, and the index of the first largest score.

    ``q`` is one-hot there if ``argmax``, or if the row has a NaN or no possible candidate.

    Args:
        s: fp32, -inf in the padding.
        temperature: the product of the request's and the draft temperature.
    """
    choice = first_largest(s, index, inside, WIDTH)
    q = (index == choice).to(tl.float32)
    scaled = divided(s, temperature)
    top = tl.max(tl.where(scaled != scaled, float("inf"), scaled), 0)
    if (top > float("-inf")) & (top < float("inf")) & (argmax == 0):
        q = tl.exp(scaled - top)
        q = q / tl.sum(q, 0)
        if FILTERS:
            q = _filtered(q, index, tl.maximum(top_k, 1), tl.load(top_p_ptr), tl.load(min_p_ptr),
                          SEQUENTIAL, K, WIDTH)  # fmt: skip
    return q, choice


@triton.jit
def drawn(q, g, index, WIDTH: tl.constexpr):
    """Return the index of the first largest ``log q + g``, in fp64."""
    log_q = tl.log(tl.where(q > 0, q, 1.0)).to(tl.float64)
    score = tl.where(q > 0, log_q + g, float("-inf"))
    return tl.min(tl.where(score == tl.max(score, 0), index, WIDTH), 0)
