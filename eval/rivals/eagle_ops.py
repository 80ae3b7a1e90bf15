"""Torch forms of the Triton helpers that SGLang's EAGLE worker calls without a GPU (top-k 1).

With one candidate a step the tree is a chain, so every function is a gather or a comparison.
"""

import torch

from sglang_hyperdflash.seams import replace

OPS = "sglang.kernels.ops.speculative"


@replace(f"{OPS}.cache_locs:assign_draft_cache_locs_contiguous_func", "fffc7b57bab5")
def assign_draft_cache_locs(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    topk: int,
    num_cols: int,
    positions: torch.Tensor | None = None,
    mrope: torch.Tensor | None = None,
) -> None:
    """``out_cache_loc = req_to_token[req, seq_len : seq_len + topk * num_cols]``, in place."""
    columns = seq_lens.long()[:, None] + torch.arange(topk * num_cols)
    slots = req_to_token[req_pool_indices.long()[:, None], columns]
    out_cache_loc.copy_(slots.reshape(-1))


@replace(f"{OPS}.spec_tree:build_tree_kernel_efficient_func", "b137949fdf7e")
def build_chain(
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode,
) -> None:
    """Positions and links of a verify chain of ``n`` tokens a request, in place.

    The mask is left alone: the reference attention is causal over a chain by itself.
    """
    n, bs = num_verify_tokens, len(seq_lens)
    steps = torch.arange(n)
    positions.copy_((seq_lens.long()[:, None] + steps).reshape(-1))
    retrieve_index.copy_(torch.arange(bs * n).view(bs, n))
    retrieve_next_token.copy_(torch.where(steps < n - 1, steps + 1, -1).expand(bs, n))
    retrieve_next_sibling.fill_(-1)


@replace(f"{OPS}.spec_tree:verify_tree_greedy_func", "dae05d6e8dcf")
def verify_chain_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept the longest prefix of ``candidates [bs, n]`` that the target's argmax repeats."""
    depth = accept_index.shape[1]
    correct = candidates[:, 1:depth] == target_predict[:, : depth - 1]
    accepted = correct.int().cumprod(1).sum(1)
    _write_accepted(accept_index, retrieve_index, accepted)
    predicts.copy_(target_predict.reshape(-1))
    accept_token_num.copy_(accepted)
    return predicts, accept_index, accept_token_num


def verify_chain_sampled(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Point-mass acceptance of ``candidates [bs, n]`` under ``target_probs [bs, n, V]``, in place.

    Raises ``ValueError`` for a threshold below 1, which would change the output's distribution.
    """
    if threshold_single < 1.0 or threshold_acc < 1.0:
        raise ValueError("the torch chain sampler is exact: accept thresholds must be 1.0.")
    depth = accept_index.shape[1]
    chain, probs, coins = candidates[:, :depth], target_probs[:, :depth], uniform_samples
    bonus_coins = uniform_samples_for_final_sampling.reshape(-1)
    accepted, bonus = accept_sampled(chain, probs, coins[:, : depth - 1], bonus_coins)
    _write_accepted(accept_index, retrive_index, accepted)
    emitted = torch.cat([chain[:, 1:], chain[:, :1]], dim=1).long()
    emitted.scatter_(1, accepted.long().unsqueeze(1), bonus.unsqueeze(1))
    kept = accept_index >= 0
    predicts[accept_index[kept].long()] = emitted[kept].to(predicts.dtype)
    accept_token_num.copy_(accepted)


def accept_sampled(
    candidates: torch.Tensor, probs: torch.Tensor, coins: torch.Tensor, bonus_coins: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept a prefix of every drafted chain and draw the bonus token, losslessly.

    A greedy draft ``x`` is a point mass: it is accepted with probability ``p(x)``; at the first
    rejection a token is drawn from ``p`` without ``x``, renormalised; after the last draft, from
    the last row. The emitted tokens then follow ``p`` exactly.

    ``candidates [bs, B]`` int64 are the anchor and B-1 drafts. Row k of ``probs [bs, B, V]`` is the
    target's distribution after candidates ``0..k``. ``coins [bs, B-1]`` and ``bonus_coins [bs]``
    are uniform in [0, 1). Returns the numbers of accepted drafts ``[bs]`` int32, 0 to B-1, and the
    bonus tokens ``[bs]`` int64.
    """
    bs, block = candidates.shape
    requests = torch.arange(bs, device=probs.device)
    drafts = candidates[:, 1:].long()
    p_draft = probs[:, :-1].gather(2, drafts.unsqueeze(-1)).squeeze(-1)
    # The comparison is strict: a draft without mass is never accepted, whatever the coin.
    accept_len = (coins < p_draft).int().cumprod(1).sum(1)
    weights = probs[requests, accept_len]  # [bs, V]
    rejected = drafts.gather(1, accept_len.clamp(max=block - 2).unsqueeze(1)).squeeze(1)
    without = weights.clone()
    without[requests, rejected] = 0.0
    # Where p(x) is 1 up to rounding and the coin above it, no other mass is left: x is kept.
    usable = (accept_len < block - 1) & (without.sum(-1) > 0)
    weights = torch.where(usable.unsqueeze(-1), without, weights)
    return accept_len.to(torch.int32), draw(weights, bonus_coins)


def draw(weights: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
    """Draw one index per row by inverse CDF; ``weights [N, V]`` need not be normalised.

    A broken row raises nothing: NaN counts as no mass, and a row without mass gives index 0.
    """
    weights = torch.nan_to_num(weights.double(), nan=0.0, posinf=0.0, neginf=0.0).clamp_(min=0)
    cumulative = weights.cumsum(-1)
    threshold = coins.double().unsqueeze(-1) * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    # Rounding can push the threshold onto the total: fall back to the last index with mass.
    positions = torch.arange(weights.shape[-1], device=weights.device)
    last = torch.where(weights > 0, positions, 0).amax(-1)
    return torch.minimum(index, last)


def _write_accepted(index: torch.Tensor, rows: torch.Tensor, accepted: torch.Tensor) -> None:
    """``rows`` of the anchor and the accepted drafts into ``index [bs, depth]``, -1 elsewhere."""
    depth = index.shape[1]
    kept = torch.arange(depth) <= accepted.unsqueeze(1)
    index.copy_(torch.where(kept, rows[:, :depth], -1))


@replace(f"{OPS}.eagle:fill_bonus_tokens_func", "0c0844c876f9")
def fill_bonus_tokens(accept_tokens, accept_lens, bonus_tokens, accept_stride, batch_size) -> None:
    """The last accepted token of every request into ``bonus_tokens [bs]``."""
    last = torch.arange(batch_size) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.reshape(-1)[last])


@replace(f"{OPS}.gather_spec_extras:gather_spec_extras", "d2e35aaf6abd")
def gather_spec_extras(indices, topk_p_buf, topk_index_buf, output_tokens_buf, hidden_states_buf):
    """The rows ``indices`` of four buffers; the last may be None."""
    buffers = (topk_p_buf, topk_index_buf, output_tokens_buf, hidden_states_buf)
    return tuple(None if buffer is None else buffer[indices] for buffer in buffers)


def top_k_renorm(probs: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """Keep the ``top_ks [N]`` largest of ``probs [N, V]`` (ties at the pivot too), renormalised."""
    descending = probs.sort(-1, descending=True).values
    ranks = top_ks.reshape(-1, 1).long().clamp(1, probs.shape[-1]) - 1
    kept = probs * (probs >= descending.gather(1, ranks))
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Keep the smallest set of ``probs [N, V]`` with mass ``top_ps [N]``, renormalised."""
    descending, order = probs.sort(-1, descending=True)
    mass_before = descending.cumsum(-1) - descending
    kept = descending * (mass_before < top_ps.reshape(-1, 1))
    kept = kept / kept.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, order, kept)
