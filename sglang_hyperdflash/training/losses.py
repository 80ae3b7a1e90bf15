"""Losses of draft rows: CE and a distance to the target's distribution (the paper's eq. 2-3).

There is one loss per supervised row; the caller weights and normalises them over the global batch.
Logits exist for a chunk of rows at a time, forward and backward, so memory does not grow with
vocabulary times sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from sglang_hyperdflash.draft.dependency import DependencyHead
from sglang_hyperdflash.training.samples import moved

Head = Callable[[torch.Tensor], torch.Tensor]


def position_weights(num_drafts: int, gamma: float) -> torch.Tensor:
    """``w_k = exp(-(k-1) / gamma)`` for k = 1..num_drafts, ``[num_drafts]``, on the CPU."""
    return torch.exp(-torch.arange(num_drafts, dtype=torch.float32, device="cpu") / gamma)


class RowLosses(NamedTuple):
    """Losses of draft rows, fp32, without weights.

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
    """CE and hit of every row, a distance of the early ones.

    Args:
        hidden: draft states ``[M, d]``; labels: ``[M]``; head: states to logits ``[., V]``.
        early: ``[M]`` bool, the rows that are distilled, best on the CPU: its counts are needed
            there; teacher: their target states ``[K, d]``.
        temperature: T of eq. 2, for both distributions.
        chunk: rows whose logits are in memory at a time; the backward recomputes them.
        term: the distance, one of :data:`TERMS`.
        dependency: the dependency head, whose predecessors are ``previous [M]``.
        top_k: candidates of the term ``selector``.
        own: whether the CE of a row's own logits is wanted.
    """
    parts, at = [], 0
    options = {"head": head, "dependency": dependency, "term": term, "own": own}
    options |= {"temperature": temperature, "top_k": top_k}
    for start in range(0, len(hidden), chunk):
        rows = slice(start, start + chunk)
        chosen = early[rows].nonzero().squeeze(1)
        count = len(chosen)
        before = None if previous is None else previous[rows]
        inputs = (hidden[rows], labels[rows], before, moved(chosen, hidden.device))
        inputs += (teacher[at : at + count],)
        # Nothing in a chunk is random.
        parts.append(
            checkpoint(_chunk, *inputs, **options, use_reentrant=False, preserve_rng_state=False)
        )
        at += count
    if not parts:
        none = hidden.new_zeros(0, dtype=torch.float32)
        return RowLosses(none, none, none.bool(), none)
    return RowLosses(*(torch.cat(losses) for losses in zip(*parts, strict=True)))


def _chunk(
    hidden, labels, previous, early, teacher, *, head, dependency, term, temperature, top_k, own
):
    logits = u = head(hidden).float()
    none = u[:0, 0]
    if term == "selector":
        extra, chosen = _selector(u, hidden, labels, previous, dependency, top_k)
        return F.cross_entropy(u, labels, reduction="none") + extra, none, chosen == labels, none
    if dependency is not None:
        logits = u + dependency.over_vocabulary(previous, hidden)
    with torch.no_grad():
        log_p = F.log_softmax(head(teacher).float() / temperature, dim=-1)
    alone = F.cross_entropy(u, labels, reduction="none") if own else none
    ce = F.cross_entropy(logits, labels, reduction="none")
    log_q = F.log_softmax(logits.index_select(0, early) / temperature, dim=-1)
    return ce, TERMS[term](log_p, log_q), logits.argmax(-1) == labels, alone


def _selector(u, hidden, labels, previous, dependency: DependencyHead, top_k: int):
    """K-way CE over the K largest of ``u [N, V]``, zero where the label is not among them: ``[N]``,
    and the candidate with the largest score ``[N]``.
    """
    scores, ids = u.topk(top_k, dim=-1)
    scores = scores + dependency(previous, dependency.gates(hidden), ids)
    found = ids == labels.unsqueeze(-1)
    at = found.int().argmax(-1)
    ce = F.cross_entropy(scores, at, reduction="none")
    chosen = ids.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)
    return torch.where(found.any(-1), ce, 0.0), chosen


# ``KL(p || q)``, and ``||p - q||_1``: twice the share of drafts that p/q rejection rejects.
TERMS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "kl": lambda log_p, log_q: (log_p.exp() * (log_p - log_q)).sum(-1),
    "tv": lambda log_p, log_q: (log_p.exp() - log_q.exp()).abs().sum(-1),
}
