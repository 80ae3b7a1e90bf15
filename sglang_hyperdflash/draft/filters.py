"""Temperature, top-k, top-p and min-p of a batch, without sorting a vocabulary.

The tokens that pass are a prefix of the vocabulary by falling probability, ties by id
(``layers/sampler.py: top_k_top_p_min_p_sampling_from_probs_torch``). A prefix is a threshold and,
among tokens at the threshold, the lowest ids. So it needs a row's few largest probabilities, not
their whole order, and never depends on the other requests of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

# Leading probabilities that are sorted at first, and the factor where they are too few.
LEADING, GROWTH = 256, 8


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of N rows, as SGLang normalises them.

    Attributes:
        temperatures: ``[N]`` fp32, positive (1 for greedy rows).
        top_ks: ``[N]`` int; 1 is greedy, V or more is off.
        top_ps: ``[N]`` fp32 in (0, 1].
        min_ps: ``[N]`` fp32 in [0, 1], relative to the row's largest probability.
        need_top_k, need_top_p, need_min_p: whether some row uses the filter, known on the host.
        top_p_after_top_k: whether, in rows with a min-p, top-p is a share of what passed top-k, as
            in FlashInfer's min-p path.
    """

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    need_top_k: bool = False
    need_top_p: bool = False
    need_min_p: bool = False
    top_p_after_top_k: bool = False

    @property
    def greedy(self) -> torch.Tensor:
        """Which rows are greedy, ``[N]`` bool."""
        return self.top_ks <= 1

    @property
    def filters(self) -> bool:
        """Whether any row has a filter."""
        return self.need_top_k or self.need_top_p or self.need_min_p

    @property
    def any_sequential(self) -> bool:
        """Whether some row's top-p is a share of what passed top-k; known on the host."""
        return self.top_p_after_top_k and self.need_min_p

    @property
    def sequential(self) -> torch.Tensor | None:
        """The rows whose top-p is a share of what passed top-k, ``[N]`` bool; None without any."""
        return self.min_ps > 0 if self.any_sequential else None

    def repeated(self, times: int) -> Sampling:
        """Repeat every row ``times`` times: the parameters of each position of a block."""
        return replace(
            self,
            temperatures=self.temperatures.repeat_interleave(times),
            top_ks=self.top_ks.repeat_interleave(times),
            top_ps=self.top_ps.repeat_interleave(times),
            min_ps=self.min_ps.repeat_interleave(times),
        )


def filter_mask(probs: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return which entries of ``probs [N, V]`` pass the filters, bool; may read the device."""
    if sampling.need_min_p:
        keep = probs >= sampling.min_ps.unsqueeze(-1) * probs.amax(-1, keepdim=True)
    else:
        keep = torch.ones_like(probs, dtype=torch.bool)
    vocabulary = probs.shape[-1]
    limited = (sampling.top_ks < vocabulary) | (sampling.top_ps < 1.0)
    rows = limited.nonzero().squeeze(-1)
    if len(rows):
        top_ks = sampling.top_ks[rows].clamp(min=1, max=vocabulary).long()
        sequential = sampling.sequential
        sequential = None if sequential is None else sequential[rows]
        keep[rows] &= _prefix(probs[rows], top_ks, sampling.top_ps[rows].float(), sequential)
    return keep


def _prefix(
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    sequential: torch.Tensor | None,
) -> torch.Tensor:
    """Return which entries of ``probs [N, V]`` lie within top-k and top-p, bool."""
    vocabulary = probs.shape[-1]
    finite = top_ks[top_ks < vocabulary]
    count = max(int(finite.max()) if len(finite) else 1, min(LEADING, vocabulary))
    while True:
        leading = probs.topk(count, dim=-1).values
        length = _inside(leading, top_ks, top_ps, sequential).sum(-1, keepdim=True)
        # If all leading entries of a row pass, later ones may pass, too.
        if count == vocabulary or not ((length.squeeze(-1) == count) & (top_ks > count)).any():
            break
        count = min(vocabulary, count * GROWTH)
    threshold = leading.gather(-1, (length - 1).clamp(min=0))
    above, equal = probs > threshold, probs == threshold
    room = length - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room))


def _inside(
    ordered: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    sequential: torch.Tensor | None,
) -> torch.Tensor:
    """Return which entries of the descending ``ordered [N, n]`` lie within top-k and top-p, bool.

    They are the n largest entries of rows that sum to 1; n is at least every finite top-k.
    """
    ranks = torch.arange(ordered.shape[-1], device=ordered.device)
    inside = ranks < top_ks.unsqueeze(-1)
    before = ordered.cumsum(-1) - ordered
    if sequential is not None:
        share = sequential & (top_ks <= ordered.shape[-1])
        mass = (ordered * inside).sum(-1).masked_fill(~share, 1.0)
        before = before / mass.unsqueeze(-1)
    top_ps = top_ps.unsqueeze(-1)
    return inside & ((before <= top_ps) | (top_ps >= 1.0))


def filter_candidates(q: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Filter a drafter's ``q [N, K]`` and normalise it; sorts, and never reads the device."""
    if not sampling.filters:
        return q
    ordered, order = q.sort(dim=-1, descending=True, stable=True)
    top_ks, top_ps = sampling.top_ks.clamp(min=1).long(), sampling.top_ps.float()
    keep = _inside(ordered, top_ks, top_ps, sampling.sequential)
    keep &= ordered >= sampling.min_ps.unsqueeze(-1) * ordered[:, :1]
    ordered = ordered * keep
    ordered = ordered / ordered.sum(-1, keepdim=True)
    return torch.zeros_like(q).scatter_(-1, order, ordered)
