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
from sglang_hyperdflash.draft.propose import (
    DRAFT_TEMPERATURES,
    Draws,
    Proposal,
    draft_distribution,
    draft_scale,
)
from sglang_hyperdflash.serving.verification.exact import Committed
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from triton_ops.gumbel import block_seeds, gumbel_noise
from triton_ops.operator import define
from triton_ops.verification import weights_along

DRAFT_TEMPERATURE = "HYPERDFLASH_DRAFT_TEMPERATURE"
# Learnt rows after which a row's weight has fallen to 1/e.
MEMORY = 1000.0
# Only one round in so many is learnt from: on a CPU learning takes a hundred small operations.
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
        # Of requests without a seed and with one: drafts accepted at each ``t``, and the best of
        # these, which drafting reads.
        shape = (2, len(DRAFT_TEMPERATURES))
        self.accepted = torch.zeros(shape, dtype=torch.float64, device=device)
        self.current = torch.zeros(2, device=device)
        self.reset()

    def reset(self) -> None:
        """Forget all rounds: q is then as the drafter has it."""
        self._rounds = 0
        self.accepted.zero_()[:, -1] = 1e-3
        self.current.fill_(DRAFT_TEMPERATURES[-1] if self.fixed is None else self.fixed)

    def learn(
        self,
        proposal: Proposal,
        p: torch.Tensor,
        committed: Committed,
        positions: torch.Tensor,
        sampling: Sampling,
        draws: Draws,
        vocabulary: int,
    ) -> None:
        """Take in one round of bs requests; call once per round.

        Args:
            p: ``[bs, D, K]`` of ``exact.verify_block``; positions: ``[bs, B]`` int64.
        """
        self._rounds += 1
        if self.fixed is not None or self._rounds % EVERY != 1:
            return
        s = sampling
        learn_op(
            *(proposal.ids, proposal.scores, proposal.choice, p),
            *(committed.tokens, committed.accept_lens, s.temperatures, s.top_ks, s.top_ps),
            *(s.min_ps, draws.seeded, draws.seeds, positions, s.filters, s.any_sequential),
            *(self.values, self.accepted, self.current, vocabulary, MEMORY),
        )


def learn_reference(
    ids: torch.Tensor,
    scores: torch.Tensor,
    choice: torch.Tensor,
    p: torch.Tensor,
    tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    seeded: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    filters: bool,
    sequential: bool,
    values: torch.Tensor,
    accepted: torch.Tensor,
    current: torch.Tensor,
    vocabulary: int,
    memory: float,
) -> None:
    """``hyperdflash::learn``: update ``accepted [2, T]`` and ``current [2]`` in place.

    Args:
        ids, scores, choice: of a :class:`Proposal`; tokens, accept_lens: of :class:`Committed`.
        values: ``[T]`` fp32, draft temperatures; memory: rows after which one has faded to 1/e.
    """
    (bs, drafts, width), tried = ids.shape, len(values)
    sampling = Sampling(temperatures, top_ks, top_ps, min_ps, filters, filters, filters, sequential)
    # q of every draft at every t, [bs, D, T, K].
    each = scores.unsqueeze(2).expand(-1, -1, tried, -1).reshape(-1, width)
    repeated = sampling.repeated(drafts * tried)
    q = draft_distribution(each, repeated, *draft_scale(repeated, values.repeat(bs * drafts)))
    q = q.view(bs, drafts, tried, width)
    last = (accept_lens - 1).long().unsqueeze(1)
    broken = tokens.gather(1, last) == vocabulary
    reached = torch.arange(drafts, device=q.device) <= last
    reached &= ~(sampling.greedy.unsqueeze(1) | broken)
    gain = accepted_shares(q, p, choice)
    if seeded.any():  # they accept a draft that is emitted, all others by block verification
        own = block_seeds(seeds, seeded, positions[:, 0]).repeat_interleave(drafts)
        noise = gumbel_noise(own, positions[:, :drafts].reshape(-1), ids.view(-1, width))
        found = (noise.view(bs, drafts, 1, width) + q.log()).argmax(-1)
        same = ids.gather(2, found) == tokens[:, :drafts].unsqueeze(-1)
        gain = torch.where(seeded.view(-1, 1, 1), same.double(), gain)
    # A row of NaN would stay for ever.
    gain = gain.nan_to_num(nan=0.0).masked_fill(~reached.unsqueeze(-1), 0.0).sum(1)
    classes = torch.stack([~seeded, seeded]).double()
    rows = classes @ reached.sum(1, keepdim=True).double()
    accepted.mul_(torch.exp(-rows / memory)).add_(classes @ gain)
    current.copy_(values[accepted.argmax(-1)])


def accepted_shares(q: torch.Tensor, p: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    """The mean share of a prefix's weight that its next draft keeps.

        sum_c min(w p(c), q(c)) / w       # w: weights_along the prefix under the same q

    That is the overlap of p and q after a prefix of weight one, and more after a lighter one, which
    a flat enough q makes up for. After a prefix that q never drafts w is one.

    Args:
        q: ``[bs, D, T, K]`` fp32, the drafter's distribution at T draft temperatures.
        p: ``[bs, D, K]`` fp32, the target's; choice: ``[bs, D]`` int64, the drafts.

    Returns:
        ``[bs, D, T]`` fp64, from 0 to 1.
    """
    choice = choice.unsqueeze(2)
    drafted = q.gather(3, choice.unsqueeze(2).expand(-1, -1, q.shape[2], -1)).squeeze(-1)
    weight = weights_along(p.gather(2, choice), drafted)[:, :-1].unsqueeze(-1)
    left = torch.minimum(weight.to(p) * p.unsqueeze(2), q).sum(-1, keepdim=True)
    return (left / weight).clamp(max=1.0).squeeze(-1)


learn_op = define(
    "learn(Tensor ids, Tensor scores, Tensor choice, Tensor p, Tensor tokens, Tensor accept_lens,"
    " Tensor temperatures, Tensor top_ks, Tensor top_ps, Tensor min_ps, Tensor seeded,"
    " Tensor seeds, Tensor positions, bool filters, bool sequential, Tensor values,"
    " Tensor(a!) accepted, Tensor(b!) current, int vocabulary, float memory) -> ()",
    learn_reference,
    "triton_ops.learn_kernel:launch",
    lambda *arguments: None,
)
