"""Two exact verifications of a drafted block, both for drafts drawn from any ``q``.

**Coupled**, for a request whose client gave a seed: on every row
``y_k = argmax_v(log p_k[v] + g(seed, position_k, v))``; drafts are accepted while ``x_k = y_k`` and
the y's are emitted. The output is a function of the seed and the target alone.

**Block verification**, for one without (Sun et al. 2403.10444, algorithm 2): what a whole prefix is
worth decides, so a draft that p wants makes up for one before it that p wanted less. With w_0 = 1,

    w_k = min(w_{k-1} p_k(x_k) / q_k(x_k), 1)
    h_k = sum (w_k p_{k+1} - q_{k+1})+ / sum (q_{k+1} - w_k p_{k+1})+       # h_D = w_D
    accepted = the last k with u_k < h_k

and the next token is from ``(w_k p_{k+1} - q_{k+1})+`` of that k, after the last draft from ``p``.
On average it accepts no fewer than a coin for each draft does (2211.17192). The coins ``u`` and
that draw have streams of their own: a draft's noise must not decide its acceptance. A rejection
depends on the noise of the rejected drafts, so a block must not reuse it: every block of such a
request has noise of its own.

Greedy rows compare with the argmax of the logits. A block is never longer than its first broken
row: one whose target logits hold a NaN or +inf, or nothing finite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_hyperdflash.draft.filters import Sampling, filter_mask
from sglang_hyperdflash.draft.propose import Draws, Proposal
from triton_ops.verification import accept, finish, row_statistics, unpacked


@dataclass(frozen=True)
class Rows:
    """The target's rows of a round, ``N = bs * B``: ``p(v) = exp(y_v - largest) / total``.

    Attributes:
        tokens: ``[N]`` int64, the target's own of a greedy or seeded request; past the vocabulary
            where the row is broken.
        logits: ``[N, V]``, final; kept: ``[N, V]`` fp32, zero where a filter forbids, or None.
        largest, total: ``[N]`` fp32: ``triton_ops.verification``. All None where tokens are all
            that is known, those of greedy requests.
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
    """

    tokens: torch.Tensor
    accept_lens: torch.Tensor
    next_anchors: torch.Tensor


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


def lay_out_rows(output: Any) -> None:
    """Make the logits of ``output`` rows in memory, as kernels read and adjust them.

    Seam: ``LogitsProcessor._gather_attn_tp_logits`` gives columns where the ranks' number does not
    divide the vocabulary.
    """
    if output.next_token_logits.stride(-1) != 1:
        output.next_token_logits = output.next_token_logits.contiguous()


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
    statistics = row_statistics(
        *(logits, sampling.temperatures, sampling.top_ks, draws.client_seeded, draws.seeds),
        *(positions, kept, all_draw),
    )
    return Rows(statistics[0], logits, kept, *statistics[1:])


def verify_block(
    rows: Rows,
    block_tokens: torch.Tensor,
    positions: torch.Tensor,
    proposal: Proposal | None,
    sampling: Sampling,
    draws: Draws,
    vocabulary: int,
) -> torch.Tensor:
    """Accept a prefix of every block and add the bonus token.

    Args:
        block_tokens, positions: ``[bs, B]`` int64: the anchor's, then the drafts'.
        proposal: what the drafts are from; None where all requests are greedy, or B is 1.
        sampling, draws: of the bs requests.

    Returns:
        What ranks share, of :func:`unpack`.
    """
    target = rows.logits, rows.kept, rows.tokens, rows.largest, rows.total, block_tokens
    requests = sampling.temperatures, sampling.top_ks, draws.client_seeded, draws.seeds, positions
    ids, q, choice = (None,) * 3
    if proposal is not None:
        ids, q, choice = proposal.ids, proposal.q, proposal.choice
    correct_drafts, weight = accept(*target, ids, q, choice, *requests, vocabulary)
    drawn = proposal is not None and draws.any_by_block
    return finish(*target, ids, q, correct_drafts, weight, *requests, drawn, vocabulary)


def unpack(packed: torch.Tensor, bs: int, block: int) -> Committed:
    """What a round's packed result says; its parts share the memory."""
    return Committed(*unpacked(packed, bs, block))
