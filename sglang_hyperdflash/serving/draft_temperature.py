"""The temperature at which drafts are drawn, relative to the request's own.

Drawing each draft from a flat marginal loses where the target's entropy is low: with p a point and
q = (.6, .4) a drawn draft is accepted .52 of the time, the argmax .6. Verification is exact for any
q, so q has a temperature of its own, ``softmax(s / (T t))``; at ``t = 0`` drafts are argmaxes, as
those of SGLang's DFLASH.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import torch

from sglang_hyperdflash.draft.filters import Sampling
from sglang_hyperdflash.draft.propose import DRAFT_TEMPERATURES, Proposal, draft_distribution
from sglang_hyperdflash.serving.exact import Verdict, walked_worth
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

VARIABLE = "HYPERDFLASH_DRAFT_TEMPERATURE"
ADAPTIVE = "adaptive"


def read_draft_temperature(environment: Mapping[str, str] = os.environ) -> float | None:
    """The ``t`` that the user set; None: learnt.

    Raises:
        HyperDFlashConfigError: the variable is not of its form.
    """
    text = environment.get(VARIABLE, "").strip()
    if text in ("", ADAPTIVE):
        return None
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0.0 <= found <= 1.0:
        raise HyperDFlashConfigError(
            f"{VARIABLE}: expected {ADAPTIVE}, or a number from 0 (argmax drafts) to 1 (drafts "
            f"drawn at the request's own temperature); found {text!r}. Correct or unset it."
        )
    return found


class DraftTemperature:
    """The draft temperature of each request: learnt from past rounds, or given.

    Estimates, for every ``t`` of ``DRAFT_TEMPERATURES``, how much of a draft the verified rows
    would have accepted: separately for seeded and unseeded requests, and by the target's
    uncertainty on the request's text so far. Low-entropy texts favour argmaxes; a class of texts
    with few rows uses the mean of all classes. Only rows whose prefix was accepted count: the
    others follow a text that is not emitted, and a seeded request's next drafts reuse their noise.
    So the estimate of the ``t`` in use is unbiased; the others are judged on prefixes that it
    drafted. Only acceptance depends on them.

    Args:
        slots: rows of the request pool.
        memory: learnt rows of a kind after which a row's weight has fallen to 1/e.
        fixed: ``t`` of every request; nothing is learnt.
    """

    # Doubt from which on a request is of the next kind; one that has none yet (-1) is of the first.
    KINDS = (0.0, 0.02, 0.1, 0.3)
    # What a request's doubt keeps of what it was, a round.
    KEEP = 0.5
    # Rows of a kind that all kinds' mean counts for.
    PRIOR_ROWS = 30.0
    # One round of so many is learnt from: it takes some sixty launches.
    EVERY = 2
    # Candidates up to which all ``t`` are tried at once; a head may have a whole vocabulary.
    AT_ONCE = 1024

    def __init__(
        self,
        device: torch.device | str,
        slots: int,
        memory: float = 1000.0,
        fixed: float | None = None,
    ) -> None:
        self._rounds = 0
        self.fixed = fixed
        self.memory = memory
        self.values = torch.tensor(DRAFT_TEMPERATURES, device=device)
        self.kinds = torch.tensor(self.KINDS, device=device)
        self.doubt = torch.full((slots,), -1.0, device=device)
        # Without a seed and with one; kinds of text.
        shape = (2, len(self.KINDS) + 1, len(DRAFT_TEMPERATURES))
        self.gains = torch.zeros(shape, dtype=torch.float64, device=device)
        self.gains[..., -1] = 1e-3  # before the first round: q as the drafter has it
        self.rows = torch.full_like(self.gains[..., :1], 1e-3)

    def enter(self, slots: torch.Tensor) -> None:
        """Requests begin in ``slots [n]`` int64: nothing is known of their texts."""
        self.doubt[slots] = -1.0

    def of(self, seeded: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """``t`` of each request, ``[bs]`` fp32.

        Args:
            seeded: ``[bs]`` bool; slots: ``[bs]`` int64, different rows of the request pool.
        """
        if self.fixed is not None:
            return torch.full_like(seeded, self.fixed, dtype=self.values.dtype)
        mean = self.gains.sum(1, keepdim=True) / self.rows.sum(1, keepdim=True)
        best = (self.gains + self.PRIOR_ROWS * mean).argmax(-1)
        return self.values[best[seeded.long(), self._kind(slots)]]

    def _kind(self, slots: torch.Tensor) -> torch.Tensor:
        """How unsure of each text the target was, ``[bs]`` int64: 0 where nothing is known."""
        return torch.bucketize(self.doubt[slots], self.kinds, right=True)

    def learn(
        self,
        proposal: Proposal,
        sampling: Sampling,
        seeded: torch.Tensor,
        slots: torch.Tensor,
        verdict: Verdict,
    ) -> None:
        """Take in one round of the requests in ``slots [bs]``; once a round."""
        if self.fixed is not None:
            return
        depth = torch.arange(proposal.ids.shape[1], device=proposal.ids.device)
        accepted = verdict.accept_len.unsqueeze(1)
        reached = (depth <= accepted) & ~(sampling.greedy | verdict.broken).unsqueeze(1)
        self._rounds += 1
        if self._rounds % self.EVERY == 1:
            emitted = torch.where(depth < accepted, proposal.tokens, verdict.bonus.unsqueeze(1))
            gain = self._gain(proposal, sampling, seeded, emitted, verdict.p)
            # A row that is not a law, or a prefix worth nothing: a NaN would stay for ever.
            gain = gain.nan_to_num(nan=0.0).masked_fill(~reached.unsqueeze(-1), 0.0).sum(1)
            kinds = self.gains.shape[1]
            mine = seeded.long() * kinds + self._kind(slots)
            rule = (torch.arange(2 * kinds, device=mine.device).unsqueeze(1) == mine).double()
            rows = (rule @ reached.sum(1, keepdim=True).double()).view_as(self.rows)
            fade = torch.exp(-rows / self.memory)
            self.rows.mul_(fade).add_(rows)
            self.gains.mul_(fade).add_((rule @ gain).view_as(self.gains))
        self._doubt(verdict.p, reached, slots)

    def _gain(
        self,
        proposal: Proposal,
        sampling: Sampling,
        seeded: torch.Tensor,
        emitted: torch.Tensor,
        p: torch.Tensor,
    ) -> torch.Tensor:
        """What each row would keep at each ``t``: ``[bs, D, len(DRAFT_TEMPERATURES)]`` fp64.

        Args:
            emitted: ``[bs, D]`` int64; p: ``[bs, D, K]``, the target's at the candidates.
        """
        bs, drafts, width = proposal.ids.shape
        found = []
        for values in self.values.split(len(DRAFT_TEMPERATURES) if width <= self.AT_ONCE else 1):
            tried = len(values)
            scores = proposal.scores.unsqueeze(2).expand(-1, -1, tried, -1).reshape(-1, width)
            each = sampling.repeated(drafts * tried)
            q = draft_distribution(scores, each, values.repeat(bs * drafts)).view(
                bs, drafts, tried, width
            )
            choice = (proposal.noise.unsqueeze(2) + q.log()).argmax(-1)
            same = proposal.ids.gather(2, choice) == emitted.unsqueeze(-1)
            kept = kept_shares(q, p, proposal.choice)
            found.append(torch.where(seeded.view(-1, 1, 1), same.double(), kept))
        return torch.cat(found, -1)

    def _doubt(self, p: torch.Tensor, reached: torch.Tensor, slots: torch.Tensor) -> None:
        """How unsure the target was of each text: ``1 - max p`` in the mean of the reached rows."""
        rows = reached.sum(1)
        now = (1.0 - p.amax(-1)).nan_to_num(nan=1.0).masked_fill(~reached, 0.0).sum(1)
        before = self.doubt[slots]
        now = now / rows.clamp(min=1)
        now = torch.where(before < 0, now, self.KEEP * before + (1.0 - self.KEEP) * now)
        self.doubt[slots] = torch.where(rows > 0, now.clamp(min=0.0), before)


def kept_shares(q: torch.Tensor, p: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    """How much of what a block's prefix is worth its next draft keeps, in the mean over drafts.

        sum_c min(w p(c), q(c)) / w       # w: exact.prefix_worth of the prefix under the same q

    That is the overlap of p and q behind a prefix of worth one, and more behind one of less: a law
    that is flat enough makes up for it. Behind a prefix that q never drafts w is one.

    Args:
        q: ``[bs, D, T, K]`` fp32, the drafter's distribution at T draft temperatures.
        p: ``[bs, D, K]`` fp32, the target's; choice: ``[bs, D, 1]`` int64, the drafts.

    Returns:
        ``[bs, D, T]`` fp64, from 0 to 1.
    """
    drafted = q.gather(3, choice.unsqueeze(2).expand(-1, -1, q.shape[2], -1)).squeeze(-1)
    worth = walked_worth(p.gather(2, choice), drafted)[:, :-1].unsqueeze(-1)
    kept = torch.minimum(worth.to(p) * p.unsqueeze(2), q).sum(-1, keepdim=True)
    return (kept / worth).clamp(max=1.0).squeeze(-1)
