"""A drafter's distribution over one row's K candidates, for the kernel that draws drafts.

    q = filter(softmax(s / temperature))       # draft.propose.draft_distribution

The filters keep a prefix of the candidates by falling ``q``, ties by index. ``q``'s bits, which
rise with it, and the index make one integer: sorted, these are that order, and the prefix is a
threshold.
"""

from __future__ import annotations

import triton
import triton.language as tl

from triton_ops.gumbel_kernel import divided

# Up to so many candidates, comparing all pairs waits for less than sorting.
_PAIRS = tl.constexpr(64)
_NO_KEY = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def first_largest(s, at, inside, WIDTH: tl.constexpr):
    """Index of the first largest score as ``torch.argmax`` has it: NaN is above everything."""
    nan = s != s
    top = tl.max(tl.where(nan, float("-inf"), s), 0)
    broken = tl.max(nan.to(tl.int32), 0)
    largest = nan | ((s == top) & (broken == 0))
    return tl.min(tl.where(largest & inside, at, WIDTH), 0)


@triton.jit
def _filtered(q, at, top_k, top_p, min_p,
              SEQUENTIAL: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """``q`` after top-k, top-p and min-p, normalised."""
    bits = q.to(tl.int32, bitcast=True).to(tl.int64)
    key = (bits << 32) | (WIDTH - 1 - at).to(tl.int64)
    if WIDTH <= _PAIRS:
        ahead = key[None, :] > key[:, None]
        before = tl.sum(tl.where(ahead, q[None, :], 0.0), 1)
        rank, p, ordered = tl.sum(ahead.to(tl.int32), 1), q, key
    else:
        ordered = tl.sort(key, descending=True)
        p = (ordered >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        rank, before = at, tl.cumsum(p, 0) - p
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
def draft_distribution(s, at, inside, temperature, argmax, top_k, top_p_ptr, min_p_ptr,
                       FILTERS: tl.constexpr, SEQUENTIAL: tl.constexpr, K: tl.constexpr,
                       WIDTH: tl.constexpr):  # fmt: skip
    """``q [WIDTH]`` of scores ``s``, -inf in the padding, and the index of the first largest.

    One-hot there where ``argmax``, and where a row has a NaN or no possible candidate.

    Args:
        at: indices; inside: which of them are candidates.
        temperature: the request's times the draft's; top_k: the request's, 1 at least.
    """
    choice = first_largest(s, at, inside, WIDTH)
    q = (at == choice).to(tl.float32)
    scaled = divided(s, temperature)
    top = tl.max(tl.where(scaled != scaled, float("inf"), scaled), 0)
    if (top > float("-inf")) & (top < float("inf")) & (argmax == 0):
        q = tl.exp(scaled - top)
        q = q / tl.sum(q, 0)
        if FILTERS:
            q = _filtered(q, at, tl.maximum(top_k, 1), tl.load(top_p_ptr), tl.load(min_p_ptr),
                          SEQUENTIAL, K, WIDTH)  # fmt: skip
    return q, choice


@triton.jit
def drawn(q, g, at, WIDTH: tl.constexpr):
    """Index of the first largest ``log q + g``, fp64."""
    log_q = tl.log(tl.where(q > 0, q, 1.0)).to(tl.float64)
    score = tl.where(q > 0, log_q + g, float("-inf"))
    return tl.min(tl.where(score == tl.max(score, 0), at, WIDTH), 0)
