"""The last context feature of every request, which a drafter with fusion starts its blocks at.

One row of the drafter's width for each slot of the request pool: written where draft K/V are, read
inside the draft's CUDA graph. It only makes drafts better: any value leaves answers as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.utils.common import async_h2d
from torch.nn import functional as F

from sglang_hyperdflash.draft.fusion import FeatureFusion
from sglang_hyperdflash.serving.window_worker import WindowedWorker


def last_rows(lengths: torch.Tensor, stride: int | None) -> torch.Tensor:
    """Index ``[bs]`` int64 of each request's last row.

    Args:
        lengths: ``[bs]``, rows of each request. stride: rows between requests; None where they
            follow one another.
    """
    lengths = lengths.long()
    if stride is None:
        return lengths.cumsum(0) - 1
    return torch.arange(len(lengths), device=lengths.device) * stride + lengths - 1


def fused(
    fusion: FeatureFusion, embeddings: torch.Tensor, features: torch.Tensor, width: int
) -> torch.Tensor:
    """Block embeddings ``[N, d]`` with what the ``features [bs, d]`` add to their rows.

    Args:
        width: rows of a block; rows behind ``bs * width`` are padding.
    """
    rows = len(features) * width
    added = fusion(embeddings[:rows:width], features).repeat_interleave(width, 0)
    return embeddings + F.pad(added, (0, 0, 0, len(embeddings) - rows))


class LastFeatureWorker(WindowedWorker):
    """Overrides of ``DFlashWorkerV2`` that do nothing for a drafter without fusion."""

    def __init__(self, server_args, gpu_id, nccl_port, target_worker) -> None:
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self._fuses = getattr(self.draft_model, "fusion", None) is not None
        # Its requests come without a pass of the target here.
        self._arrive = self._fuses and server_args.disaggregation_mode == "decode"
        self._arrived: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()

    def alloc_memory_pool(
        self, memory_pool_config=None, req_to_token_pool=None, token_to_kv_pool_allocator=None
    ) -> None:
        """Seam: the request pool's rows are known here, before anything is captured."""
        super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
        if self._fuses:
            self.draft_model.allocate_last_features(len(req_to_token_pool.req_to_token))

    def forward_batch_generation(self, batch, *args, **kwargs):
        """One round, or a prefill; seam: ``DFlashWorkerV2.forward_batch_generation``."""
        if self._arrive and batch.reqs:
            self._forget_arrivals(batch.reqs)
        return super().forward_batch_generation(batch, *args, **kwargs)

    def _forget_arrivals(self, reqs: Sequence[Any]) -> None:
        """No features yet for requests whose prompt another node computed, or a backup holds."""
        new = []
        for req in reqs:
            mark = (req.kv.req_pool_idx, req.retraction_count)
            if self._arrived.get(req) != mark:
                self._arrived[req] = mark
                new.append(req.kv.req_pool_idx)
        if new:
            slots = async_h2d(new, dtype=torch.int64, device=torch.device(self.device))
            self.draft_model.last_features.index_fill_(0, slots, 0)

    def _append_target_hidden_to_draft_kv_by_loc(
        self, *, target_hidden, req_slots: torch.Tensor | None = None, **rest
    ) -> None:
        """Seam: where every pass of the target leaves what the drafter reads of it.

        Args:
            req_slots: whose rows the last are; None for this pass's requests.
        """
        super()._append_target_hidden_to_draft_kv_by_loc(target_hidden=target_hidden, **rest)
        if not self._fuses or target_hidden is None or not len(target_hidden):
            return
        slots, places = self._rows if req_slots is None else req_slots, rest.get("cache_loc_2d")
        if places is not None:
            rows = last_rows(rest["commit_lens"], places.shape[1])
        elif rest.get("extend_lens") is not None:
            rows = last_rows(rest["extend_lens"], None)
        else:  # of rounds without drafts, one behind the other
            rows = torch.arange(len(target_hidden), device=target_hidden.device)
        with torch.inference_mode():
            last = target_hidden[rows[-len(slots) :]]
            features = self.draft_model.project_target_hidden(last)
            kept = self.draft_model.last_features
            kept[slots.long()] = features.to(kept.dtype)
