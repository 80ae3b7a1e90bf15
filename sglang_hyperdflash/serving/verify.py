"""Lossless verification of a greedily drafted chain over a sorted vocabulary, in plain torch.

``exact.py`` serves; this is what its tests compare with, and how MTP verifies on the CPU platform.

A greedy draft ``x`` is a point mass: it is accepted with probability ``p(x)``; at the first
rejection a token is drawn from ``p`` without ``x``, renormalised; when every draft is accepted
the bonus token is drawn from the last row. The emitted tokens then follow ``p`` exactly, where
``p`` is the target's distribution after temperature, top-k, top-p and min-p, computed as
SGLang's own sampler computes it (``layers/sampler.py``: top-k first, then top-p, then min-p).
"""

from __future__ import annotations

import torch


def target_probabilities(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor | None = None,
    top_ps: torch.Tensor | None = None,
    min_ps: torch.Tensor | None = None,
    *,
    max_top_k: int | None = None,
    top_p_after_top_k: bool = False,
) -> torch.Tensor:
    """The distribution the target samples from, ``[N, V]`` fp32.

    SGLang's samplers apply top-k and top-p jointly (top-p is a share of the whole mass), except
    FlashInfer's min-p path, where top-p is a share of the top-k mass (``top_p_after_top_k``).

    Args:
        logits: ``[N, V]``, already adjusted for grammar and logit bias.
        temperatures: ``[N]`` or ``[N, 1]``, positive.
        top_ks: ``[N]`` int (1 is greedy) or None; top_ps: ``[N]`` in (0, 1] or None;
        min_ps: ``[N]`` in [0, 1), relative to the largest probability, or None.
        max_top_k: an upper bound of ``top_ks``; only so many columns are then sorted.
    """
    probs = (logits.float() / temperatures.reshape(-1, 1).float()).softmax(-1)
    if top_ks is None and top_ps is None and min_ps is None:
        return probs
    vocabulary = probs.shape[-1]
    if top_ks is not None and max_top_k is not None and max_top_k < vocabulary:
        probs, order = probs.topk(max_top_k, dim=-1, sorted=True)
    else:
        probs, order = probs.sort(dim=-1, descending=True, stable=True)
    before = probs.cumsum(-1) - probs
    if top_ks is not None:
        ranks = torch.arange(probs.shape[-1], device=probs.device)
        probs = probs * (ranks < top_ks.reshape(-1, 1))
    if top_ps is not None:
        if top_p_after_top_k:
            before = before / probs.sum(-1, keepdim=True)
        probs = probs * (before <= top_ps.reshape(-1, 1).float())
    if min_ps is not None:
        probs = probs * (probs >= min_ps.reshape(-1, 1).float() * probs[:, :1])
    probs = probs / probs.sum(-1, keepdim=True)
    return probs.new_zeros(len(probs), vocabulary).scatter_(-1, order, probs)


def accept_sampled(
    candidates: torch.Tensor,
    probs: torch.Tensor,
    coins: torch.Tensor,
    bonus_coins: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept a prefix of every drafted chain and draw the bonus token.

    Args:
        candidates: ``[bs, B]`` int64: the anchor, then B-1 drafts.
        probs: ``[bs, B, V]``: row k is the target's distribution after candidates ``0..k``.
        coins: ``[bs, B-1]`` uniform in [0, 1); bonus_coins: ``[bs]`` likewise.

    Returns:
        accept_len ``[bs]`` int32 (drafts accepted, 0..B-1) and bonus ``[bs]`` int64.
    """
    bs, block = candidates.shape
    rows = torch.arange(bs, device=probs.device)
    drafts = candidates[:, 1:].long()
    p_draft = probs[:, :-1].gather(2, drafts.unsqueeze(-1)).squeeze(-1)
    # Strict: a draft the target gives no mass is never accepted, whatever the coin.
    accepted = (coins < p_draft).int().cumprod(1)
    accept_len = accepted.sum(1)
    row = probs[rows, accept_len].clone()  # [bs, V]
    rejected = accept_len < block - 1
    refused = drafts.gather(1, accept_len.clamp(max=block - 2).unsqueeze(1)).squeeze(1)
    without = row.clone()
    without[rows, refused] = 0.0
    # p(x) = 1 up to rounding with a coin above it leaves no other mass: keep the row then.
    usable = rejected & (without.sum(-1) > 0)
    row = torch.where(usable.unsqueeze(-1), without, row)
    return accept_len.to(torch.int32), draw(row, bonus_coins)


def draw(weights: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
    """Draw one index per row by inverse CDF; ``weights [N, V]`` need not be normalised.

    Never raises on a broken row: NaN counts as no mass, and a row without mass gives index 0.
    """
    weights = torch.nan_to_num(weights.double(), nan=0.0, posinf=0.0, neginf=0.0).clamp_(min=0)
    cumulative = weights.cumsum(-1)
    threshold = coins.double().unsqueeze(-1) * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    # Rounding can push the threshold onto the total: fall back to the last index with mass.
    positions = torch.arange(weights.shape[-1], device=weights.device)
    last = torch.where(weights > 0, positions, 0).amax(-1)
    return torch.minimum(index, last)
