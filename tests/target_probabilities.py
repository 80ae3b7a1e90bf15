"""The distribution a target samples from, over a sorted vocabulary: the reference of tests."""

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
