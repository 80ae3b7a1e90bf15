"""Whether a candidate drafts better than the drafter that is served now, on held-out requests.

Both replay the same requests. The candidate is better when the 99 % interval of the difference of
tau, by bootstrap over requests, is above zero on the newest ones; and when on older ones, of the
store's reservoir, its tau is at most a twentieth lower. The older ones are what protects one part
of the traffic from another: text that floods the store and is easy to draft raises the mean, but a
candidate that forgot the rest for it is not published. Their interval does not decide: of 64
requests it is a tenth wide on either side, and an equal candidate would never pass.

A store can be poisoned. What the judge notices:

* Tokens that the target would hardly say: every sample carries the target's own states, and the
  next token must be likely under them. Random tokens and rows that are out of step fail this. Such
  a sample judges nothing, so a store of them publishes nothing. One that is poisoned in part may
  worsen the candidate, which the honest part of the held-out requests shows.
* Real requests of one kind in great number: see above.

What it cannot notice: states *and* tokens that were forged to fit each other, mixed into new and
old shards alike. Who can write them into the store, whose folder is its owner's alone, could
publish a drafter directly. Whatever is published, the server's answers stay the target's, and the
server returns to the version before where acceptance falls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_hyperdflash.training.process_group import ProcessGroup
from sglang_hyperdflash.training.replay import Replay
from sglang_hyperdflash.training.samples import InMemory, Source, States, collate
from sglang_hyperdflash.training.vocabulary import vocabulary_logits

LEVEL, RESAMPLES = 0.99, 4000
# Share of the served drafter's tau that a candidate may lose on older requests, as measured.
TOLERANCE = 0.05
# Requests that an interval needs.
LEAST = 16
# Nats by which tokens may be less likely than the target's own samples. At temperature 0 they are
# likelier, at 1 equal, and random ones of any vocabulary exceed it by far.
SURPRISE = 2.0
ROWS = 1024  # of logits in memory at once


class Chosen(InMemory):
    """Some samples of a source."""

    def __init__(self, source: Source, indices: Sequence[int]) -> None:
        self._source, self._indices = source, indices
        super().__init__([source.samples[i] for i in indices])

    def prefetch(self, indices: list[int]) -> None:
        """See :class:`~sglang_hyperdflash.training.samples.Source`."""
        self._source.prefetch([self._indices[i] for i in indices])

    def states(self, indices: list[int]) -> States:
        """See :class:`~sglang_hyperdflash.training.samples.Source`."""
        return self._source.states([self._indices[i] for i in indices])


@dataclass(frozen=True)
class Comparison:
    """Of two drafters on the same requests: tau of both, and the interval of the difference.

    Attributes:
        requests: that count; without any, the numbers are 0.
    """

    requests: int
    tau: float = 0.0
    served: float = 0.0
    low: float = 0.0
    high: float = 0.0

    @classmethod
    def of(cls, candidate: torch.Tensor, served: torch.Tensor) -> Comparison:
        """From histograms of accepted drafts, ``[requests, B]`` each (``Replay.histograms``).

        tau is of all rounds together, so a long answer counts for more than a short one.
        """
        whole = (candidate.sum(1) > 0) & (served.sum(1) > 0)
        if not bool(whole.any()):
            return cls(0)
        generator = torch.Generator().manual_seed(0)
        count = int(whole.sum())
        drawn = torch.randint(count, (RESAMPLES, count), generator=generator)
        drawn = torch.cat([torch.arange(count).unsqueeze(0).expand(1, -1), drawn])
        taus = []
        for histogram in (candidate[whole].double(), served[whole].double()):
            rounds = histogram.sum(1)
            tokens = (histogram * torch.arange(1, histogram.shape[1] + 1)).sum(1)
            taus.append(tokens[drawn].sum(1) / rounds[drawn].sum(1))
        tail = (1 - LEVEL) / 2
        ends = torch.tensor([tail, 1 - tail], dtype=torch.float64)
        low, high = (taus[0] - taus[1])[1:].quantile(ends).tolist()
        return cls(count, taus[0][0].item(), taus[1][0].item(), low, high)


def is_better(newest: Comparison, older: Comparison) -> bool:
    """Whether the candidate should be served; see the module's text."""
    if newest.requests < LEAST or newest.low <= 0:
        return False
    return older.requests < LEAST or older.tau >= (1 - TOLERANCE) * older.served


def compare(
    candidate: Replay, served: Replay, source: Source, indices: Sequence[int], world: ProcessGroup
) -> Comparison:
    """Replay some samples with both, spread over the processes, each of which must call this."""
    chosen = Chosen(source, indices)
    said = torch.zeros(len(indices))
    for i in range(world.rank, len(indices), world.size):
        said[i] = float(_is_likely(candidate, chosen, i))
    said = world.sum(said) > 0
    found = [replay.measure(chosen, world=world)[0][said] for replay in (candidate, served)]
    return Comparison.of(*found)


@torch.no_grad()
def _is_likely(replay: Replay, source: Source, index: int) -> bool:
    """Whether a sample's answers are what the target says after the states that it came with."""
    target, device = replay.target, replay.mask_embedding.device
    rows, states = collate([source.samples[index]]), source.states([index])
    answer = rows.loss_mask[0, 1:]
    said = rows.tokens[0, 1:][answer].to(device)
    surprise = torch.zeros((), device=device)
    taught = states.residual[0, :-1][answer.to(states.residual.device)]
    for state, token in zip(taught.split(ROWS), said.split(ROWS), strict=True):
        final = target.final(state.to(device).float())
        log_p = vocabulary_logits(target.lm_head, final).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        surprise += (-log_p.gather(-1, token.unsqueeze(-1)).squeeze(-1) - entropy).sum()
    return bool(surprise <= SURPRISE * len(said))
