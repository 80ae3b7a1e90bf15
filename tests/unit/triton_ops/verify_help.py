"""Rounds of every shape as the operators ``accept`` and ``finish`` take them, of fixed seeds."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from triton_ops import verification
from triton_ops.gumbel import block_seeds, coins
from triton_ops.verification import row_statistics_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GREEDY, SEEDED, UNSEEDED = range(3)


@dataclass
class Round:
    """The arguments both operators share, in their order, then those of one of them."""

    logits: torch.Tensor | None
    kept: torch.Tensor | None
    row_tokens: torch.Tensor
    largest: torch.Tensor | None
    total: torch.Tensor | None
    block_tokens: torch.Tensor
    ids: torch.Tensor | None
    q: torch.Tensor | None
    choice: torch.Tensor | None
    temperatures: torch.Tensor
    top_ks: torch.Tensor
    seeded: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    vocabulary: int

    def of_accept(self) -> tuple:
        return tuple(getattr(self, field.name) for field in fields(self))

    def of_finish(self, correct: torch.Tensor, weight: torch.Tensor, draws: bool = True) -> tuple:
        given = self.of_accept()
        return (*given[:8], correct, weight, *given[9:14], draws, self.vocabulary)

    @property
    def by_block(self) -> torch.Tensor:
        return ~self.seeded & (self.top_ks > 1)

    def read_again(self) -> Round:
        """After a change of the logits or of what is kept."""
        found = row_statistics_reference(
            *(self.logits, self.temperatures, self.top_ks, self.seeded, self.seeds),
            *(self.positions, self.kept, False),
        )
        return replace(self, row_tokens=found[0], largest=found[1], total=found[2])

    def without_proposal(self) -> Round:
        return replace(self, ids=None, q=None, choice=None)

    def on_device(self) -> Round:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        move = torch.Tensor
        return Round(**{k: v.to(DEVICE) if isinstance(v, move) else v for k, v in values.items()})


def make_round(
    bs: int,
    drafts: int,
    width: int,
    vocabulary: int,
    seed: int = 0,
    kinds: tuple[int, ...] = (UNSEEDED, GREEDY, UNSEEDED, SEEDED),
    filtered: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Round:
    """A mixed batch whose drafters are good enough that every length is accepted.

    Args:
        kinds: of the requests, in turn; filtered: whether ``kept`` forbids half the vocabulary.
    """
    g = torch.Generator().manual_seed(seed)
    block, width = drafts + 1, min(width, vocabulary)
    kind = torch.tensor(kinds).repeat(-(-bs // len(kinds)))[:bs]
    logits = torch.randn(bs * block, vocabulary, generator=g).mul(2).to(dtype)
    temperatures = torch.rand(bs, generator=g) * 1.5 + 0.3
    rows = logits.view(bs, block, vocabulary)[:, :drafts].float()
    rows = rows / temperatures.view(-1, 1, 1) + torch.randn(rows.shape, generator=g) * 0.4
    scores, ids = rows.topk(width, -1)
    order = torch.rand(ids.shape, generator=g).argsort(-1)
    q, ids = scores.softmax(-1).gather(-1, order), ids.gather(-1, order)
    choice = ids.new_zeros(bs, drafts)
    if drafts:
        choice = torch.multinomial(q.view(-1, width), 1, generator=g).view(bs, drafts)
    anchors = torch.randint(0, vocabulary, (bs, 1), generator=g)
    start = torch.randint(0, 2**20, (bs, 1), generator=g)
    kept = None
    if filtered:
        kept = torch.rand(bs * block, vocabulary, generator=g)
        kept[kept < 0.5] = 0.0
        kept[:, 0] = 0.5
    found = Round(
        logits,
        kept,
        logits.new_empty(0),
        None,
        None,
        torch.cat([anchors, ids.gather(-1, choice.unsqueeze(-1)).squeeze(-1)], 1),
        ids,
        q,
        choice,
        temperatures,
        torch.where(kind == GREEDY, 1, vocabulary + 1).int(),
        (kind == SEEDED) | ((kind == GREEDY) & (torch.rand(bs, generator=g) < 0.5)),
        torch.randint(-(2**63), 2**63 - 1, (bs,), generator=g),
        start + torch.arange(block),
        vocabulary,
    ).read_again()
    if drafts:  # those of greedy and seeded requests follow the target for a while
        lengths = torch.randint(0, block, (bs, 1), generator=g)
        follows = (torch.arange(drafts) < lengths) & (kind != UNSEEDED).unsqueeze(1)
        own = found.row_tokens.view(bs, block)[:, :-1]
        found.block_tokens[:, 1:] = torch.where(follows, own, found.block_tokens[:, 1:])
    return found.on_device()


def smallest_margin(given: Round, p: torch.Tensor) -> float:
    """How near a coin of a request without a seed comes to its ``h``."""
    at = given.by_block
    if given.ids is None or not at.any():
        return 1.0
    w = verification.prefix_weights(p, given.q, given.choice)
    h = verification.accept_probabilities(p, given.q, w)
    own = block_seeds(given.seeds, given.seeded, given.positions[:, 0])
    u = coins(own.unsqueeze(1).expand_as(h), given.positions[:, :-1])
    return float((u - h)[at].abs().min())
