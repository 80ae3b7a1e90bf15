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
from dataclasses import dataclass

import torch

from sglang_hyperdflash.draft.filters import Sampling, filter_mask
from sglang_hyperdflash.draft.propose import Draws, Proposal
from triton_ops.gumbel import RESIDUAL_STREAM, block_seeds, coins, gumbel_argmax
from triton_ops.operator import define
from triton_ops.rows import row_statistics


@dataclass(frozen=True)
class Rows:
    """The target's rows of a round, ``N = bs * B``: ``p(v) = exp(y_v - largest) / total``.

    Attributes:
        tokens: ``[N]`` int64, the target's own of a greedy or seeded request; past the vocabulary
            where the row is broken.
        logits: ``[N, V]``, final; kept: ``[N, V]`` fp32, zero where a filter forbids, or None.
        largest, total: ``[N]`` fp32: ``triton_ops.rows``. All None where tokens are all that is
            known, those of greedy requests.
    """

    tokens: torch.Tensor
    logits: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    largest: torch.Tensor | None = None
    total: torch.Tensor | None = None


@dataclass(frozen=True)
class Committed:
    """What a round commits.

    Attributes:
        tokens: ``[bs, B]`` int64: accepted drafts, then the bonus token; past the vocabulary where
            its row of logits is broken, which ends the request.
        accept_lens: ``[bs]`` int32, how many of them count: 1 + accepted drafts.
        next_anchors: ``[bs]`` int64: the bonus tokens, 0 where broken, since they are embedded.
        packed: all three in one tensor, which ranks share.
    """

    tokens: torch.Tensor
    accept_lens: torch.Tensor
    next_anchors: torch.Tensor
    packed: torch.Tensor


def weights_of(
    logits: torch.Tensor, sampling: Sampling, renorm: tuple[Callable, Callable] | None = None
) -> torch.Tensor:
    """What requests sample from, ``[bs, B, V]`` fp32: probabilities, zero where filtered.

    Kept entries are those of the softmax: they do not sum to one where a filter took mass, unless
    ``renorm`` normalised them. Broken rows hold anything.

    Args:
        logits: ``[bs, B, V]``; sampling: of the bs requests.
        renorm: FlashInfer's ``(top_k_renorm_probs, top_p_renorm_probs)``, on CUDA.
    """
    temperatures = sampling.temperatures.view(-1, 1, 1)
    return filtered(torch.softmax(logits.float() / temperatures, dim=-1), sampling, renorm)


def filtered(
    probs: torch.Tensor, sampling: Sampling, renorm: tuple[Callable, Callable] | None = None
) -> torch.Tensor:
    """A softmax ``probs [bs, B, V]`` after the filters, as :func:`weights_of`; may reuse it."""
    if not sampling.filters:
        return probs
    if renorm is None:
        flat = probs.flatten(0, 1)
        flat.masked_fill_(~filter_mask(flat, sampling.repeated(probs.shape[1])), 0.0)
        return probs
    # The kernels search a threshold in a loop: a row of NaN would have none.
    probs.nan_to_num_(nan=1.0 / probs.shape[-1])
    return _renormed(probs, sampling, *renorm)


def _renormed(
    probs: torch.Tensor, sampling: Sampling, top_k_renorm: Callable, top_p_renorm: Callable
) -> torch.Tensor:
    """Top-k and top-p in the order SGLang's sampler has them, then min-p; reuses ``probs``."""
    weights, block = probs, probs.shape[1]

    def renormed(kernel: Callable, share: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
        return kernel(share.flatten(0, 1), limits.repeat_interleave(block)).view_as(share)

    if sampling.need_top_k:
        weights = renormed(top_k_renorm, probs, sampling.top_ks.to(torch.int32))
    if sampling.need_top_p:
        # Joint: both shares are of the whole mass.
        top_ps = sampling.top_ps.float()
        if sampling.need_top_k and sampling.any_sequential:
            torch.where(sampling.sequential.view(-1, 1, 1), weights, probs, out=probs)
        # The kernel stops where its sum has reached the whole: a row without top-p keeps its tail.
        full = (top_ps >= 1.0).view(-1, 1, 1)
        share = renormed(top_p_renorm, probs, top_ps)
        torch.where(full, probs, share, out=share)
        weights = weights.masked_fill_(share <= 0, 0.0) if sampling.need_top_k else share
    if sampling.need_min_p:
        floor = sampling.min_ps.view(-1, 1, 1) * weights.amax(-1, keepdim=True)
        weights.masked_fill_(weights < floor, 0.0)
    return weights


def read_rows(
    logits: torch.Tensor,
    kept: torch.Tensor | None,
    sampling: Sampling,
    draws: Draws,
    positions: torch.Tensor,
    all_draw: bool,
) -> Rows:
    """Read the final ``logits [bs * B, V]`` of requests' rows at ``positions [bs, B]``.

    Args:
        kept: ``[bs * B, V]`` of :func:`weights_of`, or None without filters.
        all_draw: rounds without drafts; seeded requests draw with the same noise at every width,
            all others with noise of their own that no block uses.
    """
    found = row_statistics(
        *(logits, sampling.temperatures, sampling.top_ks, draws.seeded, draws.seeds),
        *(positions, kept, all_draw),
    )
    return Rows(found[0], logits, kept, *found[1:])


def verify_block(
    rows: Rows,
    block_tokens: torch.Tensor,
    positions: torch.Tensor,
    proposal: Proposal | None,
    sampling: Sampling,
    draws: Draws,
    vocabulary: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept a prefix of every block and add the bonus token.

    Args:
        block_tokens, positions: ``[bs, B]`` int64: the anchor's, then the drafts'.
        proposal: what the drafts are from; None where all requests are greedy, or B is 1.
        sampling, draws: of the bs requests.

    Returns:
        What ranks share, of :func:`unpack`; and ``p [bs, D, K]`` fp32, the target's probabilities
        of the drafter's candidates.
    """
    target = rows.logits, rows.kept, rows.tokens, rows.largest, rows.total, block_tokens
    requests = sampling.temperatures, sampling.top_ks, draws.seeded, draws.seeds, positions
    ids, q, choice = (None,) * 3
    if proposal is not None:
        ids, q, choice = proposal.ids, proposal.q, proposal.choice
    correct_drafts, weight, p = accept(*target, ids, q, choice, *requests, vocabulary)
    drawn = proposal is not None and draws.any_unseeded
    packed = finish(*target, ids, q, correct_drafts, weight, *requests, drawn, vocabulary)
    return packed, p


def packed_size(bs: int, block: int) -> int:
    """Words of 64 bits: tokens, next anchors, and accept lengths of 32 bits."""
    return bs * (block + 1) + (bs + 1) // 2


def unpack(packed: torch.Tensor, bs: int, block: int) -> Committed:
    """The parts of a round's packed result, which share its memory."""
    tokens, anchors, lens = packed.split([bs * block, bs, (bs + 1) // 2])
    return Committed(tokens.view(bs, block), lens.view(torch.int32)[:bs], anchors, packed)


def accept_reference(
    logits: torch.Tensor | None,
    kept: torch.Tensor | None,
    row_tokens: torch.Tensor,
    largest: torch.Tensor | None,
    total: torch.Tensor | None,
    block_tokens: torch.Tensor,
    ids: torch.Tensor | None,
    q: torch.Tensor | None,
    choice: torch.Tensor | None,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    seeded: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocabulary: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``hyperdflash::accept``: how many drafts of each block are accepted.

    Returns:
        ``correct_drafts [bs]`` int32; ``weight [bs]`` fp64, ``w`` of the accepted prefix, 1 of a
        greedy or seeded request; ``p [bs, D, K]`` fp32, NaN at broken rows.
    """
    bs, block = block_tokens.shape
    row_tokens = row_tokens.view(bs, block)
    # A broken row's token is no draft's.
    matches = block_tokens[:, 1:] == row_tokens[:, :-1]
    correct_drafts = matches.int().cumprod(1).sum(1)
    weight = torch.ones(bs, dtype=torch.float64, device=positions.device)
    if ids is None:
        return correct_drafts.int(), weight, weight.new_empty(bs, block - 1, 0).float()
    p = _at_candidates(logits, kept, largest, total, ids, temperatures)
    by_block = ~(seeded | (top_ks <= 1))
    if not by_block.any():
        return correct_drafts.int(), weight, p
    w = prefix_weights(p, q, choice)
    h = accept_probabilities(p, q, w)
    # A broken row ends the block before it: no later row counts for its prefix.
    h = torch.where(row_tokens[:, 1:] == vocabulary, w[:, 1:], h)
    own = block_seeds(seeds, seeded, positions[:, 0])
    u = coins(own.unsqueeze(1).expand(bs, block - 1), positions[:, :-1])
    # Strict: a draft the target gives no mass is never accepted, whatever the coin.
    reached = torch.arange(1, block, device=u.device) * (u < h)
    correct_drafts = torch.where(by_block, reached.amax(1), correct_drafts)
    weight = torch.where(by_block, w.gather(1, correct_drafts.unsqueeze(1)).squeeze(1), weight)
    return correct_drafts.int(), weight, p


def prefix_weights(p: torch.Tensor, q: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    """``w_0 .. w_D`` of every block, ``[bs, D + 1]`` fp64; 0 after a broken row.

    ``log w_k`` is the sum so far less the largest sum so far: a walk held at 0 from above.

    Args:
        p, q: ``[bs, D, K]`` of the candidates; choice: ``[bs, D]`` int64, the drafts among them.
    """
    p, q = (t.gather(2, choice.unsqueeze(2)).squeeze(2) for t in (p, q))
    return weights_along(p.nan_to_num(nan=0.0), q)


def weights_along(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """``w_0 .. w_D`` of prefixes whose tokens have ``p`` and ``q [bs, D, ...]``; fp64."""
    least = torch.finfo(torch.float32).tiny
    steps = torch.log(p.double()) - torch.log(q.double().clamp(min=least))
    total = torch.cat([torch.zeros_like(steps[:, :1]), steps.cumsum(1)], 1)
    return torch.exp(total - total.cummax(1).values)


def accept_probabilities(p: torch.Tensor, q: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``h_1 .. h_D`` of every block, ``[bs, D]`` fp64; the last k whose coin is below is accepted.

    Args:
        p, q: ``[bs, D, K]`` of the candidates; w: ``[bs, D + 1]``.
    """
    p, q = p[:, 1:].double().nan_to_num(nan=0.0), q[:, 1:].double()
    inner = w[:, 1:-1]
    # The target's mass outside the candidates, where q is zero.
    outside = (1.0 - p.sum(-1)).clamp(min=0.0) * inner
    above = (inner.unsqueeze(-1) * p - q).clamp(min=0.0).sum(-1) + outside
    below = above + (1.0 - inner)
    # 0 / 0: p and q are equal, and so the next draft is accepted anyway.
    chances = torch.where(below == 0, 1.0, above / below.clamp(min=1e-300))
    return torch.cat([chances, w[:, -1:]], 1)


def _at_candidates(
    logits: torch.Tensor,
    kept: torch.Tensor | None,
    largest: torch.Tensor,
    total: torch.Tensor,
    ids: torch.Tensor,
    temperatures: torch.Tensor,
) -> torch.Tensor:
    """The target's probability of each candidate, ``[bs, D, K]`` fp32."""
    bs, drafts, _ = ids.shape

    def of_drafts(values: torch.Tensor) -> torch.Tensor:
        return values.view(bs, drafts + 1, -1)[:, :-1]

    y = of_drafts(logits).gather(2, ids).float() / temperatures.view(-1, 1, 1)
    p = torch.exp(y - of_drafts(largest)) / of_drafts(total)
    if kept is not None:
        p = p.masked_fill((of_drafts(kept).gather(2, ids) == 0) & ~p.isnan(), 0.0)
    return p


def finish_reference(
    logits: torch.Tensor | None,
    kept: torch.Tensor | None,
    row_tokens: torch.Tensor,
    largest: torch.Tensor | None,
    total: torch.Tensor | None,
    block_tokens: torch.Tensor,
    ids: torch.Tensor | None,
    q: torch.Tensor | None,
    correct_drafts: torch.Tensor,
    weight: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    seeded: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    draws: bool,
    vocabulary: int,
) -> torch.Tensor:
    """``hyperdflash::finish``: the bonus token, and what is committed, packed (:func:`unpack`).

    Args:
        draws: whether anyone's bonus token is drawn from what is left of ``p``.
    """
    bs, block = block_tokens.shape
    at = correct_drafts.long()
    rows = torch.arange(bs, device=at.device) * block + at
    bonus = row_tokens[rows]
    broken = bonus == vocabulary
    if draws:
        y = logits.index_select(0, rows).float() / temperatures.unsqueeze(-1)
        p = torch.exp(y - largest[rows].unsqueeze(-1)) / total[rows].unsqueeze(-1)
        if kept is not None:
            p.masked_fill_(kept.index_select(0, rows) == 0, 0.0)
        own = block_seeds(seeds, seeded, positions[:, 0])
        where = positions.gather(1, at.unsqueeze(1)).squeeze(1)
        drawn = residual_draw(p, ids, q, at, weight, own, where)
        bonus = torch.where(seeded | (top_ks <= 1) | broken, bonus, drawn)
    packed = torch.zeros(packed_size(bs, block), dtype=torch.int64, device=at.device)
    committed = unpack(packed, bs, block)
    committed.tokens[:, :-1] = block_tokens[:, 1:]
    committed.tokens.scatter_(1, at.unsqueeze(1), bonus.unsqueeze(1))
    committed.accept_lens.copy_(correct_drafts + 1)
    committed.next_anchors.copy_(bonus.masked_fill(broken, 0))
    return packed


def residual_draw(
    p: torch.Tensor,
    ids: torch.Tensor,
    q: torch.Tensor,
    correct_drafts: torch.Tensor,
    weight: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """A draw from ``(w p - q)+`` at the first rejected draft, from ``p`` after the last; ``[bs]``.

    Args:
        p: ``[bs, V]`` fp32 of the row after the accepted drafts; weight: ``[bs]`` fp64, their w.
        ids, q: ``[bs, D, K]``; correct_drafts, seeds, positions: ``[bs]`` int64.
    """
    bs, drafts, width = ids.shape
    at = correct_drafts.clamp(max=drafts - 1).view(bs, 1, 1).expand(-1, 1, width)
    ids, q = (t.gather(1, at).squeeze(1) for t in (ids, q))
    left = (p * weight.to(p).unsqueeze(-1)).scatter_add_(-1, ids, -q).clamp_(min=0)
    # p and q equal up to rounding leave nothing: the rejection was rounding too.
    rejected = (correct_drafts < drafts) & (left.sum(-1) > 0)
    left = torch.where(rejected.unsqueeze(-1), left, p)
    return gumbel_argmax(left, seeds ^ RESIDUAL_STREAM, positions)


_TARGET = (
    "Tensor? logits, Tensor? kept, Tensor row_tokens, Tensor? largest, Tensor? total,"
    " Tensor block_tokens, Tensor? ids, Tensor? q, "
)
_REQUESTS = "Tensor temperatures, Tensor top_ks, Tensor seeded, Tensor seeds, Tensor positions, "


def _fake_accept(*given):
    block_tokens, ids, q = given[5:8]
    bs, block = block_tokens.shape
    p = block_tokens.new_empty(bs, block - 1, 0, dtype=torch.float32)
    return (
        block_tokens.new_empty(bs, dtype=torch.int32),
        block_tokens.new_empty(bs, dtype=torch.float64),
        p if ids is None else torch.empty_like(q),
    )


accept = define(
    f"accept({_TARGET}Tensor? choice, {_REQUESTS}int vocabulary) -> (Tensor, Tensor, Tensor)",
    accept_reference,
    "triton_ops.accept_kernel:launch",
    _fake_accept,
)
finish = define(
    f"finish({_TARGET}Tensor correct_drafts, Tensor weight, {_REQUESTS}bool draws, int vocabulary)"
    " -> Tensor",
    finish_reference,
    "triton_ops.finish_kernel:launch",
    lambda *given: given[5].new_empty(packed_size(*given[5].shape)),
)
