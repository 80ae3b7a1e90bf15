"""The dependency head: conditions each draft on the draft before it (HyperDFlash-2).

    s_k[c] = u_k[c] + < A[x_{k-1}] * (1 + G h_k), B[c] >      # u_k: LM head of h_k; x_0 the anchor

``A, B [V, r]`` and ``G [r, d]``. With ``A ~ N(0, .02)``, ``B = 0`` and ``G = 0`` a new head adds
nothing, so training starts at the drafter as it is. ``G = 0`` throughout is DSpark's Markov head
(2607.05147); the form ``product``, ``A * (G h)``, is DFlash 2's selector (SGLang's
``models/dflash.py: CandidateSelector``). It is trained over the whole vocabulary and served on the
K likeliest tokens of ``u_k``: K dot products of length r a draft.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

if TYPE_CHECKING:  # kernels are checked where pydantic is absent
    from sglang_hyperdflash.draft.config import HyperDFlashConfig

START = 0.02


def dependency_scores(
    predecessor: torch.Tensor,
    successor: torch.Tensor,
    previous: torch.Tensor,
    gates: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    """Return ``< A[x_{k-1}] * gates, B[c] >`` of the candidates c, ``[bs, K]`` fp32.

    Args:
        predecessor, successor: the tables A and B, ``[V, r]``.
        previous: ``[bs]`` int64, the tokens ``x_{k-1}``.
        gates: ``[bs, r]`` fp32.
        ids: ``[bs, K]`` int64, the candidates.
    """
    state = F.embedding(previous, predecessor).float() * gates
    if ids.shape[-1] == len(successor):
        # The candidates are the whole vocabulary: one product instead of a gathered table.
        return F.linear(state, successor.float()).gather(-1, ids)
    return torch.bmm(F.embedding(ids, successor).float(), state.unsqueeze(-1)).squeeze(-1)


class DependencyHead(nn.Module):
    """The head's tables A and B (``predecessor``, ``successor``) and its ``gate`` G.

    Every tensor-parallel rank holds whole tables, because candidates come from all shards.

    Args:
        vocabulary: V.
        hidden_size: d.
        rank: r.
        form: one of ``draft.config.FORMS``.
    """

    def __init__(self, vocabulary: int, hidden_size: int, rank: int, form: str) -> None:
        super().__init__()
        self.form = form
        self.predecessor = nn.Parameter(torch.empty(vocabulary, rank))
        self.successor = nn.Parameter(torch.zeros(vocabulary, rank))
        self.gate = nn.Linear(hidden_size, rank, bias=False)
        # A new head adds nothing, but its gradient is not zero.
        nn.init.normal_(self.predecessor, std=START)
        if form == "residual":
            nn.init.zeros_(self.gate.weight)
        else:
            nn.init.normal_(self.gate.weight, std=hidden_size**-0.5)

    def gates(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``1 + G h`` (or ``G h``), ``[..., r]`` fp32, of draft rows ``[..., d]``."""
        gates = F.linear(hidden.to(self.gate.weight.dtype), self.gate.weight).float()
        return gates + 1.0 if self.form == "residual" else gates

    def forward(
        self, previous: torch.Tensor, gates: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Return :func:`dependency_scores` with this head's tables, ``[bs, K]`` fp32."""
        return dependency_scores(self.predecessor, self.successor, previous, gates, ids)

    def over_vocabulary(self, previous: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the scores of all V tokens, ``[N, V]``, for ``hidden [N, d]``."""
        state = F.embedding(previous, self.predecessor).float() * self.gates(hidden)
        return F.linear(state, self.successor.float())


def build_dependency(config: HyperDFlashConfig) -> DependencyHead | None:
    """Build the head that a config describes, or return None if it describes none."""
    if (head := config.dependency) is None:
        return None
    return DependencyHead(config.vocab_size, config.hidden_size, head.rank, head.form)
