"""The draft head inside the draft's CUDA graph: from hidden rows to candidates, and greedy drafts.

One captured graph serves every batch. It holds what no request's parameters change: the K likeliest
tokens of each row, what a dependency head reads of it, and the drafts of greedy requests, each
after the one before it. A sampled round draws from these buffers after the replay, without waiting
for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method
from sglang.srt.models.dflash import candidate_topk
from sglang.srt.speculative.dflash_utils import is_dense_head_weight

from sglang_hyperdflash.draft.propose import Candidates, propose_greedy
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from triton_ops.copies import Copies


def check_head(lm_head: Any, k: int) -> None:
    """Refuse an LM head without K candidates of every rank's part of the vocabulary.

    Seam: what ``models/dflash.py: candidate_topk`` reads of it.

    Raises:
        HyperDFlashConfigError: expected, found and what to do.
    """
    method, shard = getattr(lm_head, "quant_method", None), getattr(lm_head, "shard_indices", None)
    dense = is_dense_head_weight(getattr(lm_head, "weight", None))
    if shard is None or not (dense or should_apply_lm_head_quant_method(lm_head, method)):
        raise HyperDFlashConfigError(
            "expected a target whose LM head SGLang's DFLASH reads candidates from (a dense "
            f"weight, or a supported quantization); found {type(lm_head).__name__} with "
            f"{type(method).__name__}. Serve the target with an unquantized LM head."
        )
    if k > int(shard.num_org_elements):
        raise HyperDFlashConfigError(
            f"the drafter scores {k} candidates per draft; this rank's part of the vocabulary has "
            f"{int(shard.num_org_elements)} tokens. Lower --tp-size, or dependency.top_k of "
            "hyperdflash_config in the drafter's config.json."
        )


def candidates_of(
    rows: torch.Tensor, lm_head: Any, k: int, head: torch.nn.Module | None
) -> Candidates:
    """Candidates ``[bs, D, K]`` of draft rows ``[bs, D, d]``; the same on every rank.

    Seam: ``models/dflash.py: candidate_topk`` gathers K values of every vocabulary shard.
    """
    flat = rows.reshape(-1, rows.shape[-1])
    ids, scores, _ = candidate_topk(flat, lm_head, k)
    shape = (*rows.shape[:2], k)
    gates = None if head is None else head.gates(flat).view(*rows.shape[:2], -1)
    return Candidates(ids.view(shape), scores.float().view(shape), gates)


class CandidateBuffers:
    """Static buffers that the draft's CUDA graph writes, for every captured batch of one width.

    Seam: ``draft_worker_common.make_draft_sampler_capture_hook`` calls it while the graph is
    captured; after a replay :meth:`of` reads what that replay wrote.

    Args:
        width: rows of a block, the anchor's included. k: candidates of a draft.
        head: the dependency head, or None. most: requests of the largest captured batch.
        copies: of as many requests and more, or None.
    """

    def __init__(
        self,
        width: int,
        k: int,
        lm_head: Any,
        head: Any,
        most: int,
        device: torch.device | str,
        copies: Copies | None = None,
    ) -> None:
        self.width, self.k, self.lm_head, self.head = width, k, lm_head, head
        self.copies = copies
        shape = (most, width - 1, k)
        self.ids = torch.empty(shape, dtype=torch.int64, device=device)
        self.scores = torch.empty(shape, dtype=torch.float32, device=device)
        self.greedy = torch.empty(shape[:2], dtype=torch.int64, device=device)
        self.gates = None
        if head is not None:
            rank = head.gate.out_features
            self.gates = torch.empty((*shape[:2], rank), dtype=torch.float32, device=device)

    def __call__(self, hidden_states: torch.Tensor, input_ids: torch.Tensor) -> None:
        """Write candidates and greedy drafts of rows ``[bs * width, d]``."""
        rows = hidden_states.view(-1, self.width, hidden_states.shape[-1])
        candidates = candidates_of(rows[:, 1:], self.lm_head, self.k, self.head)
        bs = len(candidates.ids)
        self.ids[:bs].copy_(candidates.ids)
        self.scores[:bs].copy_(candidates.scores)
        if self.gates is not None:
            self.gates[:bs].copy_(candidates.gates)
        anchors = input_ids.view(bs, self.width)[:, 0]
        self.greedy[:bs].copy_(propose_greedy(candidates, anchors, self.head, self.copies))

    def of(self, bs: int) -> Candidates:
        """The candidates of the batch that was just replayed."""
        gates = None if self.gates is None else self.gates[:bs]
        return Candidates(self.ids[:bs], self.scores[:bs], gates)
