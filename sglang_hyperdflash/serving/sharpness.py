"""How sharp a drafter's law is made before drafts are drawn from it.

Drawing each draft from a marginal of many tokens loses where the target is sure: with p a point and
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
from sglang_hyperdflash.draft.propose import SHARPNESS, Proposal, law
from sglang_hyperdflash.serving.exact import Verdict, walked_worth
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

VARIABLE = "HYPERDFLASH_SHARPNESS"
ADAPTIVE = "adaptive"


def read_sharpness(environment: Mapping[str, str] = os.environ) -> float | None:
    """``t`` that the user fixes; None: learnt.

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
            f"{VARIABLE} is {ADAPTIVE} or a number from 0 (argmax drafts) to 1 (drafts drawn from "
            f"the drafter's own law); found {text!r}. Set it so, or unset it."
        )
    return found


class Sharpness:
    """How sharp q is: learnt from past rounds, one choice for each verification, unless given.

    Counts, for every ``t`` of ``SHARPNESS``, what the verified rows would have accepted. Only rows
    whose prefix was accepted count: others say what the target makes of a text that is not there,
    and of a request with a seed the next round's drafts use their noise again. So the ``t`` in use
    is judged rightly, the others on prefixes that it drafted: an estimate, which acceptance alone
    depends on.

    Args:
        memory: learnt rows after which a row's weight has fallen to 1/e.
        fixed: ``t`` of every request; nothing is learnt.
    """

    # One round of so many is learnt from: it takes two hundred launches, and q changes slowly.
    EVERY = 4

    def __init__(
        self, device: torch.device | str, memory: float = 300.0, fixed: float | None = None
    ) -> None:
        self._rounds = 0
        self.fixed = fixed
        self.memory = memory
        self.gains = torch.zeros(2, len(SHARPNESS), dtype=torch.float64, device=device)
        self.gains[:, -1] = 1e-3  # before the first round: q as the drafter has it
        self.values = torch.tensor(SHARPNESS, device=device)

    def of(self, seeded: torch.Tensor) -> torch.Tensor:
        """``t`` of each request, ``[bs]`` fp32."""
        if self.fixed is not None:
            return torch.full_like(seeded, self.fixed, dtype=self.values.dtype)
        return self.values[self.gains.argmax(-1)][seeded.long()]

    def due(self) -> bool:
        """Whether this round is to be learnt from; called once a round."""
        if self.fixed is not None:
            return False
        self._rounds += 1
        return self._rounds % self.EVERY == 1

    def learn(
        self, proposal: Proposal, sampling: Sampling, seeded: torch.Tensor, verdict: Verdict
    ) -> None:
        """Count one round."""
        bs, drafts, width = proposal.ids.shape
        depth = torch.arange(drafts, device=proposal.ids.device)
        accepted = verdict.accept_len.unsqueeze(1)
        reached = (depth <= accepted) & ~(sampling.greedy | verdict.broken).unsqueeze(1)
        emitted = torch.where(depth < accepted, proposal.tokens, verdict.bonus.unsqueeze(1))
        each, scores = sampling.repeated(drafts), proposal.scores.view(-1, width)
        gains = []
        for t in SHARPNESS:
            q = law(scores, each, torch.full_like(scores[:, 0], t)).view(bs, drafts, width)
            choice = (proposal.noise + q.log()).argmax(-1, keepdim=True)
            same = proposal.ids.gather(2, choice).squeeze(2) == emitted
            kept = kept_shares(q, verdict.p, proposal.choice)
            gain = torch.where(seeded.unsqueeze(1), same.double(), kept)
            # A row that is not a law, or a prefix worth nothing: a NaN would stay for ever.
            gains.append(gain.nan_to_num(nan=0.0).masked_fill(~reached, 0.0).sum(1))
        rule = torch.stack([~seeded, seeded]).double()
        rows = rule @ reached.sum(1, keepdim=True).double()
        self.gains.mul_(torch.exp(-rows / self.memory)).add_(rule @ torch.stack(gains, 1))


def kept_shares(q: torch.Tensor, p: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    """How much of what a block's prefix is worth its next draft keeps, in the mean over drafts.

        sum_c min(w p(c), q(c)) / w       # w: exact.prefix_worth of the prefix under the same q

    That is the overlap of p and q behind a prefix of worth one, and more behind one of less: a law
    that is flat enough makes up for it. Behind a prefix that q never drafts w is one.

    Args:
        q, p: ``[bs, D, K]`` fp32, the drafter's law and the target's; choice: ``[bs, D, 1]`` int64,
            the drafts.

    Returns:
        ``[bs, D]`` fp64, from 0 to 1.
    """
    chosen, drafted = (t.gather(2, choice).squeeze(2) for t in (p, q))
    worth = walked_worth(chosen, drafted)[:, :-1]
    kept = torch.minimum(worth.to(p).unsqueeze(-1) * p, q).sum(-1)
    return (kept / worth).clamp(max=1.0)
