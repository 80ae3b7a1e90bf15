"""The draft head inside the draft's CUDA graph: from hidden rows to candidates, and greedy drafts.

One captured graph serves every batch. It holds what no request's parameters change: the K likeliest
tokens of each row, what a dependency head reads of it, and the drafts of greedy requests, each
behind the last. A sampled round draws from these buffers after the replay, without waiting for the
device.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method
from sglang.srt.models.dflash import candidate_topk
from sglang.srt.speculative.dflash_utils import is_dense_head_weight

from sglang_hyperdflash.draft.propose import Candidates, propose_greedy
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError


def supports_candidates(lm_head: Any) -> bool:
    """Whether SGLang's ``candidate_topk`` reads this head."""
    method = getattr(lm_head, "quant_method", None)
    dense = is_dense_head_weight(getattr(lm_head, "weight", None))
    known = hasattr(lm_head, "org_vocab_size") and hasattr(lm_head, "shard_indices")
    return known and (dense or should_apply_lm_head_quant_method(lm_head, method))


def check_candidates(k: int, lm_head: Any) -> None:
    """Every rank takes K candidates of its part of the vocabulary.

    Raises:
        HyperDFlashConfigError: a part is smaller.
    """
    shard = getattr(lm_head, "shard_indices", None)
    if shard is not None and k > int(shard.num_org_elements):
        raise HyperDFlashConfigError(
            f"the drafter's dependency head scores {k} candidates per draft; this rank's part of "
            f"the vocabulary has {int(shard.num_org_elements)} tokens. Lower --tp-size, or "
            "dependency.top_k of hyperdflash_config in the drafter's config.json."
        )


def candidates_of(
    rows: torch.Tensor, drafts: int, lm_head: Any, k: int, head: torch.nn.Module | None
) -> Candidates:
    """Candidates ``[bs, D, K]`` of draft rows ``[bs * D, d]``; the same on every rank.

    Seam: ``models/dflash.py: candidate_topk`` gathers K values of every vocabulary shard.
    """
    ids, scores, _ = candidate_topk(rows, lm_head, k)
    shape = (-1, drafts, k)
    gates = None if head is None else head.gates(rows).view(-1, drafts, head.gate.out_features)
    return Candidates(ids.view(shape), scores.float().view(shape), gates)


class CandidateSampler:
    """Static buffers that the draft's graph writes.

    Seam: ``DFlashWorkerV2._draft_sampler``. The worker reads ``out`` after a replay and only then;
    that is where a sampled round draws its drafts.

    Args:
        worker: a ``SampledWorker``; max_bs: requests of the largest captured batch.
    """

    def __init__(self, worker: Any, lm_head: Any, max_bs: int) -> None:
        self.worker, self.lm_head, self.block_size = worker, lm_head, int(worker.block_size)
        drafts, k, device = self.block_size - 1, worker.num_candidates, worker.device
        self.head = worker.dependency
        self.ids = torch.empty((max_bs, drafts, k), dtype=torch.int64, device=device)
        self.scores = torch.empty((max_bs, drafts, k), dtype=torch.float32, device=device)
        self.first = torch.empty(max_bs * drafts, dtype=torch.int64, device=device)
        self.gates = None
        if self.head is not None:
            shape = (max_bs, drafts, self.head.gate.out_features)
            self.gates = torch.empty(shape, dtype=torch.float32, device=device)

    def __call__(self, hidden_states: torch.Tensor, input_ids: torch.Tensor | None = None) -> None:
        width, drafts = hidden_states.shape[-1], self.block_size - 1
        rows = hidden_states.view(-1, self.block_size, width)[:, 1:].reshape(-1, width)
        k = self.worker.num_candidates
        found = candidates_of(rows, drafts, self.lm_head, k, self.head)
        bs = len(found.ids)
        self.ids[:bs].copy_(found.ids)
        self.scores[:bs].copy_(found.scores)
        if self.head is None:
            # As argmax has it: the lowest id among equals.
            beaten = found.scores < found.scores.amax(-1, keepdim=True)
            first = found.ids.masked_fill(beaten, 1 << 62).amin(-1)
        else:
            self.gates[:bs].copy_(found.gates)
            anchor = input_ids.view(bs, self.block_size)[:, 0]
            first = propose_greedy(found, anchor, self.head)
        self.first[: len(rows)].copy_(first.view(-1))

    @property
    def out(self) -> torch.Tensor:
        """Drafts of the round just replayed, at least ``[bs * (B - 1)]``."""
        bs = self.worker.batch_size
        if self.worker.requests.greedy:
            if self.head is not None:
                self.worker.agree(self.first[: bs * (self.block_size - 1)])
            return self.first
        gates = None if self.gates is None else self.gates[:bs]
        return self.worker.draw_drafts(Candidates(self.ids[:bs], self.scores[:bs], gates))
