"""Tables of a dependency head that are trained through the target's embedding and LM head.

    A[x] = R_A[x] + e[x] W_A        B[c] = R_B[c] + l[c] W_B

``e[x]``, ``l[c]``: rows of the target's embedding and LM head, each of length one; ``W_A, W_B
[d, r]``. A row of a table learns only when its token is met, so most rows of a large vocabulary
stay as random as they started; what the maps learn from frequent tokens holds for rare ones too. A
checkpoint holds the sums, so that nothing else changes, at a server least of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.utils import parametrize

from sglang_hyperdflash.draft.dependency import START, DependencyHead

TABLES = ("predecessor", "successor")


class SharedTable(nn.Module):
    """``own + unit(basis) @ shared``, a parametrization of a table ``own [V, r]``.

    Args:
        basis: ``[V, d]``, frozen; its memory is the target's, and in no state of this module.
        shared: the map ``[d, r]`` to begin with, fp32.
    """

    def __init__(self, basis: torch.Tensor, shared: torch.Tensor) -> None:
        super().__init__()
        lengths = torch.linalg.vector_norm(basis, dim=1, keepdim=True, dtype=torch.float32)
        self.basis = nn.Buffer(basis, persistent=False)
        self.scale = nn.Buffer(1.0 / lengths.clamp(min=1e-6), persistent=False)
        self.shared = nn.Parameter(shared)

    def forward(self, own: torch.Tensor) -> torch.Tensor:
        """The table ``[V, r]`` fp32."""
        return own + self.scale * (self.basis @ self.shared.to(self.basis.dtype)).float()


@torch.no_grad()
def share_tables(
    head: DependencyHead, embedding: torch.Tensor, lm_head: torch.Tensor, seed: int
) -> None:
    """Train ``head``'s tables through the target's matrices from here on.

    A new head (``B = 0``) still adds nothing: its ``A`` now begins in the embedding's space. A
    trained one is, for now, what it was: its maps begin at zero.

    Args:
        embedding, lm_head: ``[>= V, d]``, on the head's device. seed: of ``W_A``.
    """
    v, rank = head.predecessor.shape
    new = not bool(head.successor.any())
    start = torch.zeros(embedding.shape[1], rank)
    if new:
        start.normal_(std=START, generator=torch.Generator("cpu").manual_seed(seed))
        head.predecessor.zero_()
    at = head.predecessor.device
    pairs = ((embedding, start), (lm_head, torch.zeros_like(start)))
    for name, (basis, shared) in zip(TABLES, pairs, strict=True):
        parametrize.register_parametrization(
            head, name, SharedTable(basis.detach()[:v], shared.to(at))
        )


@contextmanager
def tables_once(head: DependencyHead | None) -> Iterator[None]:
    """Compute shared tables once for a pass, its backward included.

    Before anything else, so that chunks that are computed again in the backward do not hold them.
    """
    if head is None or not parametrize.is_parametrized(head):
        yield
        return
    with parametrize.cached():
        for name in TABLES:
            getattr(head, name)
        yield


def folded(head: DependencyHead) -> dict[str, torch.Tensor]:
    """The head's tensors as a checkpoint has them, whatever its tables are trained through."""
    tensors = {name: getattr(head, name) for name in TABLES} | {"gate.weight": head.gate.weight}
    return {f"dependency.{name}": tensor for name, tensor in tensors.items()}
