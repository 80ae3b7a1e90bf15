"""Two exact verifications of a drafted block, both for drafts drawn from any ``q``.

**Coupled**, for a request with a seed: ``y_k = argmax_v(log p_k[v] + g(seed, position_k, v))`` on
every row; drafts are accepted while ``x_k = y_k`` and the y's are emitted. The output is a function
of the seed and the target alone.

**Block verification**, for one without (Sun et al. 2403.10444, algorithm 2): what a whole prefix is
worth decides, so a draft that p wants makes up for one before it that p wanted less. With w_0 = 1,

    w_k = min(w_{k-1} p_k(x_k) / q_k(x_k), 1)
    h_k = sum (w_k p_{k+1} - q_{k+1})+ / sum (q_{k+1} - w_k p_{k+1})+       # h_D = w_D
    accepted = the last k with u_k < h_k

and the next token is from ``(w_k p_{k+1} - q_{k+1})+`` of that k, after the last draft from ``p``.
On average it accepts no fewer than a coin for each draft does (2211.17192). The coins ``u`` and
that draw have streams of their own: a draft's noise must not decide its acceptance. Refused drafts
do decide it here, so their noise may not come again: every block of such a request has noise of its
own.

Greedy rows compare with the argmax of the logits. A block is never longer than its first broken
row: one whose target logits hold a NaN or +inf, or nothing finite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from sglang_hyperdflash.draft.filters import Sampling, filter_mask
from sglang_hyperdflash.draft.propose import Proposal
from triton_ops.gumbel import RESIDUAL_STREAM, coins
from triton_ops.gumbel_op import gumbel_argmax

# Blocks of one request that start at different places draw from different streams. Odd.
BLOCK_STREAM = -0x61C8864680B583EB


@dataclass(frozen=True)
class Draws:
    """Which noise each request of a batch draws from.

    Attributes:
        seeds: ``[bs]`` int64; seeded: ``[bs]`` bool, verified coupled.
        any_seeded, any_unseeded: of the requests that are not greedy, known without a device read.
        any_greedy: as well; a pass over all logits is for them alone.
    """

    seeds: torch.Tensor
    seeded: torch.Tensor
    any_seeded: bool = True
    any_unseeded: bool = True
    any_greedy: bool = True

    def of_block(self, start: torch.Tensor) -> Draws:
        """The noise of blocks after positions ``start [bs]``: the seed's own where seeded."""
        if not self.any_unseeded:
            return self
        own = self.seeds + (start + 1) * BLOCK_STREAM  # wraps
        return replace(self, seeds=torch.where(self.seeded, self.seeds, own))


@dataclass(frozen=True)
class Verdict:
    """What a round emits.

    Attributes:
        correct_drafts: ``[bs]`` int32, accepted; bonus: ``[bs]`` int64, the token after them.
        broken: ``[bs]`` bool: the bonus is not a token, its row was broken.
        p: ``[bs, D, K]`` fp32, the target's probabilities of the drafter's candidates.
    """

    correct_drafts: torch.Tensor
    bonus: torch.Tensor
    broken: torch.Tensor
    p: torch.Tensor


def weights_of(
    logits: torch.Tensor, sampling: Sampling, renorm: tuple[Callable, Callable] | None = None
) -> torch.Tensor:
    """What the target samples from, ``[N, V]`` fp32: probabilities, zero where filtered.

    Kept entries are those of the softmax: they do not sum to one where a filter took mass, unless
    ``renorm`` normalised them. A broken row is NaN in column 0.

    Args:
        renorm: FlashInfer's ``(top_k_renorm_probs, top_p_renorm_probs)``, on CUDA.
    """
    probs = torch.softmax(logits.float() / sampling.temperatures.unsqueeze(-1), dim=-1)
    return filtered(probs, sampling, renorm)


def filtered(
    probs: torch.Tensor, sampling: Sampling, renorm: tuple[Callable, Callable] | None = None
) -> torch.Tensor:
    """``probs [N, V]`` of a softmax after the filters, as :func:`weights_of`; may reuse them."""
    if not sampling.filters:
        return probs
    broken = probs[:, 0].isnan()
    if renorm is None:
        probs = probs.masked_fill_(~filter_mask(probs, sampling), 0.0)
    else:
        # The kernels search a threshold in a loop: a row of NaN would have none.
        probs.masked_fill_(broken.unsqueeze(-1), 1.0 / probs.shape[-1])
        probs = _renormed(probs, sampling, *renorm)
    probs[:, 0].masked_fill_(broken, float("nan"))
    return probs


def _renormed(
    probs: torch.Tensor, sampling: Sampling, top_k_renorm: Callable, top_p_renorm: Callable
) -> torch.Tensor:
    """Top-k and top-p in the order SGLang's sampler has them, then min-p."""
    weights = probs
    if sampling.need_top_k:
        weights = top_k_renorm(probs, sampling.top_ks.to(torch.int32))
    if sampling.need_top_p:
        # Joint: both shares are of the whole mass.
        share = probs
        if sampling.sequential is not None:
            share = torch.where(sampling.sequential.unsqueeze(-1), weights, probs)
        inside = top_p_renorm(share, sampling.top_ps.float()) > 0
        # The kernel stops where its sum has reached the whole: a row without top-p keeps its tail.
        inside |= (sampling.top_ps >= 1.0).unsqueeze(-1)
        weights = weights.masked_fill(~inside, 0.0)
    if sampling.need_min_p:
        floor = sampling.min_ps.unsqueeze(-1) * weights.amax(-1, keepdim=True)
        weights = weights.masked_fill(weights < floor, 0.0)
    return weights


def verify_block(
    proposal: Proposal,
    logits: torch.Tensor,
    weights: torch.Tensor,
    sampling: Sampling,
    draws: Draws,
    positions: torch.Tensor,
) -> Verdict:
    """Accept a prefix of every block.

    Args:
        logits: ``[bs * B, V]``, final; weights: ``[bs * B, V]`` of :func:`weights_of`, B = D + 1.
        sampling: of the bs requests.
        positions: ``[bs, B]`` int64 of the tokens that are fed: the anchor's, then the drafts'.
    """
    bs, block = positions.shape
    broken_rows = weights[:, 0].isnan().view(bs, block)
    target_tokens = _target_tokens(logits, weights, sampling, draws, positions)
    p = _at_candidates(weights, proposal.ids, sampling)
    matches = (proposal.tokens == target_tokens[:, :-1]) & ~broken_rows[:, :-1]
    correct_drafts = matches.int().cumprod(1).sum(1)
    by_block = ~(draws.seeded | sampling.greedy)
    if draws.any_unseeded:
        w = prefix_weights(proposal, p)
        h = accept_probabilities(proposal, p, w)
        # A broken row ends the block before it: no later row counts for its prefix.
        h = torch.where(broken_rows[:, 1:], w[:, 1:], h)
        u = coins(draws.seeds.unsqueeze(1).expand(bs, block - 1), positions[:, :-1])
        # Strict: a draft the target gives no mass is never accepted, whatever the coin.
        reached = torch.arange(1, block, device=u.device) * (u < h)
        correct_drafts = torch.where(by_block, reached.amax(1), correct_drafts)
    at = correct_drafts.unsqueeze(1)
    bonus = target_tokens.gather(1, at).squeeze(1)
    if draws.any_unseeded:
        weight = w.gather(1, at).squeeze(1)
        drawn = _residual_draw(proposal, weights, weight, draws.seeds, positions, correct_drafts)
        bonus = torch.where(by_block, drawn, bonus)
    broken = broken_rows.gather(1, at).squeeze(1)
    return Verdict(correct_drafts.to(torch.int32), bonus.masked_fill(broken, 0), broken, p)


def prefix_weights(proposal: Proposal, p: torch.Tensor) -> torch.Tensor:
    """``w_0 .. w_D`` of every block, ``[bs, D + 1]`` fp64; 0 after a broken row.

    ``log w_k`` is the sum so far less the largest sum so far: a walk held at 0 from above.

    Args:
        p: ``[bs, D, K]`` of :func:`_at_candidates`.
    """
    p, q = (t.gather(2, proposal.choice).squeeze(2) for t in (p, proposal.q))
    return weights_along(p.nan_to_num(nan=0.0), q)


def weights_along(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """``w_0 .. w_D`` of prefixes whose tokens have ``p`` and ``q [bs, D, ...]``; fp64."""
    least = torch.finfo(torch.float32).tiny
    steps = torch.log(p.double()) - torch.log(q.double().clamp(min=least))
    total = torch.cat([torch.zeros_like(steps[:, :1]), steps.cumsum(1)], 1)
    return torch.exp(total - total.cummax(1).values)


def accept_probabilities(proposal: Proposal, p: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``h_1 .. h_D`` of every block, ``[bs, D]`` fp64; the last k whose coin is below is accepted.

    Args:
        p: ``[bs, D, K]`` of :func:`_at_candidates`; w: ``[bs, D + 1]``.
    """
    p, q = p[:, 1:].double().nan_to_num(nan=0.0), proposal.q[:, 1:].double()
    inner = w[:, 1:-1]
    # The target's mass outside the candidates, where q is zero.
    outside = (1.0 - p.sum(-1)).clamp(min=0.0) * inner
    above = (inner.unsqueeze(-1) * p - q).clamp(min=0.0).sum(-1) + outside
    below = above + (1.0 - inner)
    # 0 / 0: p and q are equal, and so the next draft is accepted anyway.
    chances = torch.where(below == 0, 1.0, above / below.clamp(min=1e-300))
    return torch.cat([chances, w[:, -1:]], 1)


def draw_rows(
    logits: torch.Tensor,
    weights: torch.Tensor,
    sampling: Sampling,
    draws: Draws,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Tokens ``[bs]`` int64 of rounds without drafts; arbitrary at broken rows.

    Seeded requests draw with the same noise at every width, all others with noise of their own
    that no block uses.

    Args:
        logits, weights: ``[bs, V]``; positions: ``[bs]`` int64, of the anchors.
    """
    seeds = torch.where(draws.seeded, draws.seeds, draws.seeds ^ RESIDUAL_STREAM)
    drawn = gumbel_argmax(weights, seeds, positions)
    return torch.where(sampling.greedy, logits.argmax(-1), drawn)


def _target_tokens(
    logits: torch.Tensor,
    weights: torch.Tensor,
    sampling: Sampling,
    draws: Draws,
    positions: torch.Tensor,
) -> torch.Tensor:
    """The target's own token of every row ``[bs, B]``; arbitrary for requests without a seed."""
    bs, block = positions.shape
    if not (draws.any_greedy or draws.any_seeded):
        return positions.new_zeros(bs, block)
    greedy = logits.argmax(-1).view(bs, block)
    if not draws.any_seeded:
        return greedy
    seeds = draws.seeds.repeat_interleave(block)
    drawn = gumbel_argmax(weights, seeds, positions.reshape(-1)).view(bs, block)
    return torch.where(sampling.greedy.unsqueeze(1), greedy, drawn)


def _at_candidates(weights: torch.Tensor, ids: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The target's normalised probability of each candidate, ``[bs, D, K]``."""
    bs, drafts, _ = ids.shape
    rows = weights.view(bs, drafts + 1, -1)[:, :-1]
    p = rows.gather(2, ids)
    return p / rows.sum(-1, keepdim=True) if sampling.filters else p


def _residual_draw(
    proposal: Proposal,
    weights: torch.Tensor,
    weight: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    correct_drafts: torch.Tensor,
) -> torch.Tensor:
    """A draw from ``(w p - q)+`` at the first rejected draft, from ``p`` after the last; ``[bs]``.

    Args:
        weight: ``[bs]`` fp64, ``w`` of the accepted prefix.
    """
    bs, block = positions.shape
    rows = torch.arange(bs, device=weights.device) * block + correct_drafts
    p = weights.index_select(0, rows)
    p = p / p.sum(-1, keepdim=True)
    at = correct_drafts.clamp(max=block - 2).view(bs, 1, 1).expand(-1, 1, proposal.ids.shape[-1])
    ids, q = (t.gather(1, at).squeeze(1) for t in (proposal.ids, proposal.q))
    left = (p * weight.to(p).unsqueeze(-1)).scatter_add_(-1, ids, -q).clamp_(min=0)
    # p and q equal up to rounding leave nothing: the rejection was rounding too.
    rejected = (correct_drafts < block - 1) & (left.sum(-1) > 0)
    left = torch.where(rejected.unsqueeze(-1), left, p)
    where = positions.gather(1, correct_drafts.unsqueeze(1)).squeeze(1)
    return gumbel_argmax(left, seeds ^ RESIDUAL_STREAM, where)
