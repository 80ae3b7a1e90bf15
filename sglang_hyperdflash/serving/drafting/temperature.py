"""The temperature at which drafts are drawn, relative to the request's own.

Drawing each draft from a flat marginal loses where the target's entropy is low: with p a point and
q = (.6, .4) a drawn draft is accepted .52 of the time, the argmax .6. Verification is exact for any
q, so q has a temperature of its own, ``softmax(s / (T t))``; at ``t = 0`` drafts are argmaxes, as
those of SGLang's DFLASH. Low-entropy text favours argmaxes.
"""

from __future__ import annotations

import math
import os

import torch

from sglang_hyperdflash.draft.filters import Sampling
from sglang_hyperdflash.draft.propose import DRAFT_TEMPERATURES, Proposal, draft_distribution
from sglang_hyperdflash.serving.verification.exact import Verdict, weights_along
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

DRAFT_TEMPERATURE = "HYPERDFLASH_DRAFT_TEMPERATURE"
# Learnt rows after which a row's weight has fallen to 1/e.
MEMORY = 1000.0
# Only one round in so many is learnt from: learning takes some fifty launches.
EVERY = 2


def read_draft_temperature() -> float | None:
    """The ``t`` that the user set; None: learnt.

    Raises:
        HyperDFlashConfigError: the variable is not of its form.
    """
    text = os.environ.get(DRAFT_TEMPERATURE, "").strip() or "adaptive"
    if text == "adaptive":
        return None
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0.0 <= found <= 1.0:
        raise HyperDFlashConfigError(
            f"{DRAFT_TEMPERATURE}: expected adaptive, or a number from 0 (argmax drafts) to 1 "
            f"(drafts drawn at the request's own temperature); found {text!r}. Correct or unset it."
        )
    return found


class DraftTemperature:
    """One draft temperature for seeded and one for unseeded requests: learnt, or given.

    Estimates, for every ``t`` of ``DRAFT_TEMPERATURES``, how much of a draft the verified rows
    would have accepted. Only rows whose prefix was accepted count: the others follow text that is
    not emitted, and a seeded request's next drafts reuse their noise. So the estimate of the ``t``
    in use is unbiased; the others are judged on prefixes that it drafted. Only acceptance depends
    on them.

    Args:
        fixed: ``t`` of every request; nothing is learnt.
    """

    def __init__(self, device: torch.device | str, fixed: float | None = None) -> None:
        self.fixed = fixed
        self.values = torch.tensor(DRAFT_TEMPERATURES, device=device)
        # Drafts accepted at each ``t``, without a seed and with one.
        shape = (2, len(DRAFT_TEMPERATURES))
        self.accepted = torch.zeros(shape, dtype=torch.float64, device=device)
        self.reset()

    def reset(self) -> None:
        """Forget all rounds: q is then as the drafter has it."""
        self._rounds = 0
        self.accepted.zero_()[:, -1] = 1e-3

    def of(self, seeded: torch.Tensor) -> torch.Tensor:
        """``t`` of each request, ``[bs]`` fp32, of ``seeded [bs]`` bool."""
        if self.fixed is not None:
            return torch.full_like(seeded, self.fixed, dtype=self.values.dtype)
        return self.values[self.accepted.argmax(-1)[seeded.long()]]

    def learn(
        self, proposal: Proposal, sampling: Sampling, seeded: torch.Tensor, verdict: Verdict
    ) -> None:
        """Take in one round of requests, ``seeded [bs]`` bool; call once per round."""
        self._rounds += 1
        if self.fixed is not None or self._rounds % EVERY != 1:
            return
        (bs, drafts, width), tried = proposal.ids.shape, len(self.values)
        # q of every draft at every t, [bs, D, T, K].
        scores = proposal.scores.unsqueeze(2).expand(-1, -1, tried, -1).reshape(-1, width)
        each = sampling.repeated(drafts * tried)
        q = draft_distribution(scores, each, self.values.repeat(bs * drafts))
        q = q.view(bs, drafts, tried, width)
        depth = torch.arange(drafts, device=q.device)
        accepted = verdict.correct_drafts.unsqueeze(1)
        reached = (depth <= accepted) & ~(sampling.greedy | verdict.broken).unsqueeze(1)
        # A seeded request accepts a draft that is emitted, any other by block verification.
        emitted = torch.where(depth < accepted, proposal.tokens, verdict.bonus.unsqueeze(1))
        choice = (proposal.noise.unsqueeze(2) + q.log()).argmax(-1)
        same = proposal.ids.gather(2, choice) == emitted.unsqueeze(-1)
        shares = accepted_shares(q, verdict.p, proposal.choice)
        gain = torch.where(seeded.view(-1, 1, 1), same.double(), shares)
        # A row of NaN would stay for ever.
        gain = gain.nan_to_num(nan=0.0).masked_fill(~reached.unsqueeze(-1), 0.0).sum(1)
        classes = torch.stack([~seeded, seeded]).double()
        rows = classes @ reached.sum(1, keepdim=True).double()
        self.accepted.mul_(torch.exp(-rows / MEMORY)).add_(classes @ gain)


def accepted_shares(q: torch.Tensor, p: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    """The mean share of a prefix's weight that its next draft keeps.

        sum_c min(w p(c), q(c)) / w       # w: exact.prefix_weights of the prefix under the same q

    That is the overlap of p and q after a prefix of weight one, and more after a lighter one, which
    a flat enough q makes up for. After a prefix that q never drafts w is one.

    Args:
        q: ``[bs, D, T, K]`` fp32, the drafter's distribution at T draft temperatures.
        p: ``[bs, D, K]`` fp32, the target's; choice: ``[bs, D, 1]`` int64, the drafts.

    Returns:
        ``[bs, D, T]`` fp64, from 0 to 1.
    """
    drafted = q.gather(3, choice.unsqueeze(2).expand(-1, -1, q.shape[2], -1)).squeeze(-1)
    weight = weights_along(p.gather(2, choice), drafted)[:, :-1].unsqueeze(-1)
    left = torch.minimum(weight.to(p) * p.unsqueeze(2), q).sum(-1, keepdim=True)
    return (left / weight).clamp(max=1.0).squeeze(-1)
