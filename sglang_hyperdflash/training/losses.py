"""Losses of drafts: the paper's (CE plus early KL, eq. 2-3) and acceptance itself (CE plus TV);
with a dependency head also the CE of the rows' own logits, which choose its candidates.

There is one loss per supervised row; the caller weights and normalises
them over the global batch. Logits exist for a chunk of rows at a time, forward and backward, so
memory does not grow with vocabulary times sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from sglang_hyperdflash.draft.dependency import DependencyHead

Head = Callable[[torch.Tensor], torch.Tensor]


def position_weights(num_drafts: int, gamma: float) -> torch.Tensor:
    """``w_k = exp(-(k-1) / gamma)`` for k = 1..num_drafts, ``[num_drafts]``."""
    return torch.exp(-torch.arange(num_drafts, dtype=torch.float32) / gamma)


class RowLosses(NamedTuple):
    """Losses of draft rows, fp32 unless stated.

    ce: ``[M]``; distance: ``[K]``; hits: ``[M]`` bool, where the most probable token is the label;
    own: ``[M]``, the CE of a row's own logits u, without its dependency head; empty where it is not
    requested, and under the term ``selector``, whose ``ce`` holds it.
    """

    ce: torch.Tensor
    distance: torch.Tensor
    hits: torch.Tensor
    own: torch.Tensor


def row_losses(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    head: Head,
    *,
    early: torch.Tensor,
    teacher: torch.Tensor,
    temperature: float,
    chunk: int = 2048,
    term: str = "kl",
    dependency: DependencyHead | None = None,
    previous: torch.Tensor | None = None,
    top_k: int = 0,
    own: bool = False,
) -> RowLosses:
    """CE and hit of every row, a distance of the early ones, without all logits at once.

    Args:
        hidden: draft states ``[M, d]``; labels: ``[M]``; head: states to logits ``[., V]``.
        early: ``[M]`` bool, the rows that are distilled; teacher: their target states ``[K, d]``.
        temperature: T of eq. 2, for both distributions.
        chunk: rows whose logits are in memory at a time; the backward recomputes them.
        term: the distance, one of :data:`TERMS`.
        dependency: the dependency head, whose predecessors are ``previous [M]``.
        top_k: candidates of the term ``selector``.
        own: whether the CE of a row's own logits is wanted.

    Returns:
        Of every row, without weights.
    """
    parts, at = [], 0
    options = _Options(head, dependency, term, temperature, top_k, own)
    for start in range(0, len(hidden), chunk):
        rows = slice(start, start + chunk)
        count = int(early[rows].sum())
        before = None if previous is None else previous[rows]
        inputs = (hidden[rows], labels[rows], before, early[rows], teacher[at : at + count])
        parts.append(checkpoint(_chunk, *inputs, options, use_reentrant=False))
        at += count
    if not parts:
        none = hidden.new_zeros(0, dtype=torch.float32)
        return RowLosses(none, none, none.bool(), none)
    return RowLosses(*(torch.cat(losses) for losses in zip(*parts, strict=True)))


class _Options(NamedTuple):
    head: Head
    dependency: DependencyHead | None
    term: str
    temperature: float
    top_k: int
    own: bool


def _chunk(hidden, labels, previous, early, teacher, options: _Options):
    logits = own = options.head(hidden).float()
    if options.term == "selector":
        extra, logits = _selector(own, hidden, labels, previous, options)
        ce = F.cross_entropy(own, labels, reduction="none")
        return ce + extra, own[:0, 0], logits == labels, own[:0, 0]
    if options.dependency is not None:
        logits = own + options.dependency.over_vocabulary(previous, hidden)
    with torch.no_grad():
        log_p = F.log_softmax(options.head(teacher).float() / options.temperature, dim=-1)
    alone = own[:0, 0]
    if options.own:
        alone = F.cross_entropy(own, labels, reduction="none")
    ce = F.cross_entropy(logits, labels, reduction="none")
    log_q = F.log_softmax(logits[early] / options.temperature, dim=-1)
    distance, hits = TERMS[options.term](log_p, log_q), logits.argmax(-1) == labels
    return ce, distance, hits, alone


def _selector(own, hidden, labels, previous, options: _Options):
    """K-way CE over the K largest of ``own [N, V]``, zero where the label is not among them.

    Returns:
        ``[N]``, and the candidate with the largest score ``[N]``.
    """
    scores, ids = own.topk(options.top_k, dim=-1)
    gates = options.dependency.gates(hidden)
    scores = scores + options.dependency(previous, gates, ids)
    found = ids == labels.unsqueeze(-1)
    at = found.int().argmax(-1)
    ce = F.cross_entropy(scores, at, reduction="none")
    chosen = ids.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)
    return torch.where(found.any(-1), ce, 0.0), chosen


def _kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _tv(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return (log_p.exp() - log_q.exp()).abs().sum(-1)


# ``KL(p || q)``, and ``||p - q||_1``: twice the share of drafts that p/q rejection rejects.
TERMS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "kl": _kl,
    "tv": _tv,
}
