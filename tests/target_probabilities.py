"""The distribution a target samples from, over a sorted vocabulary: the reference of tests."""

import torch


def target_probabilities(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor | None = None,
    top_ps: torch.Tensor | None = None,
    min_ps: torch.Tensor | None = None,
) -> torch.Tensor:
    """The distribution the target samples from, ``[N, V]`` fp32.

    As SGLang's samplers apply top-k and top-p: jointly, top-p is a share of the whole mass.

    ``logits [N, V]`` are final, ``temperatures`` positive; a ``top_k`` of 1 is greedy.
    """
    probs = (logits.float() / temperatures.reshape(-1, 1).float()).softmax(-1)
    if top_ks is None and top_ps is None and min_ps is None:
        return probs
    probs, order = probs.sort(dim=-1, descending=True, stable=True)
    before = probs.cumsum(-1) - probs
    if top_ks is not None:
        ranks = torch.arange(probs.shape[-1], device=probs.device)
        probs = probs * (ranks < top_ks.reshape(-1, 1))
    if top_ps is not None:
        probs = probs * (before <= top_ps.reshape(-1, 1).float())
    if min_ps is not None:
        probs = probs * (probs >= min_ps.reshape(-1, 1).float() * probs[:, :1])
    probs = probs / probs.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, order, probs)
