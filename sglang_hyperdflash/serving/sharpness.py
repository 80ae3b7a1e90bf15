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
from sglang_hyperdflash.serving.exact import Verdict
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
    and of a request with a seed the next round's drafts use their noise again.

    Args:
        memory: learnt rounds after which a row's weight has fallen to 1/e.
        fixed: ``t`` of every request; nothing is learnt.
    """

    # One round of so many is learnt from: it takes two hundred launches, and q changes slowly.
    EVERY = 4

    def __init__(
        self, device: torch.device | str, memory: int = 200, fixed: float | None = None
    ) -> None:
        self._rounds = 0
        self.fixed = fixed
        self.keep = 1.0 - 1.0 / memory
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
        emitted = emitted.view(-1, 1)
        each, scores = sampling.repeated(drafts), proposal.scores.view(-1, width)
        p, noise = verdict.p.view(-1, width), proposal.noise.view(-1, width)
        coupled = seeded.repeat_interleave(drafts)
        gains = []
        for t in SHARPNESS:
            q = law(scores, each, torch.full_like(scores[:, 0], t))
            overlap = torch.minimum(p, q).sum(-1)
            draft = proposal.ids.view(-1, width).gather(
                1, (noise + q.log()).argmax(-1, keepdim=True)
            )
            gain = torch.where(coupled, (draft == emitted).squeeze(1).to(overlap), overlap)
            # A broken drafter's NaN would stay for ever.
            gain = gain.double().nan_to_num(nan=0.0).view(bs, drafts)
            gains.append(gain.masked_fill(~reached, 0.0).sum(1))
        table = torch.stack(gains, 1)  # [bs, len(SHARPNESS)]
        rule = torch.stack([~seeded, seeded]).to(table)
        self.gains.mul_(self.keep).add_(rule @ table)
