"""The two model runners of a server, and what SGLang's DFLASH worker does with them for a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel


def from_all_ranks(value: Any) -> list[Any]:
    """What every tensor-parallel rank gives, in their order.

    Seam: ``GroupCoordinator.all_gather_object``; control requests reach all ranks of this group.
    """
    group = get_parallel().tp_group
    return group.all_gather_object(value) if group.world_size > 1 else [value]


@dataclass(frozen=True)
class Runners:
    """What the parts of a round read of SGLang's worker; read in one place, once.

    Attributes:
        target_worker: SGLang's worker of the target; it launches its passes.
        target: the target's ``ModelRunner``; its pools are made after the worker.
        draft: the drafter's ``ModelRunner``; likewise.
        draft_model: the loaded drafter.
        device: of both models.
        gpu_id: the device's number.
        block: rows of a whole block, its anchor's too.
        window: tokens that a windowed drafter sees of a context; None for all.
        page_size: tokens of a page of the target's K/V.
        draft_layout: the ranks that the drafter is split over (``draft_tp_context``).
        tp_sync: gives all ranks rank 0's tensors.
        full_embedding: ``[V, d]`` with attention data parallelism; None where ranks share one.
        logits_processor: the target's, which may leave logits in their shards; or None.
        can_skip_logits: whether a greedy batch needs no more than their argmaxes.
        allocate_draft: makes the drafter's K/V pool.
        draft_slots: slots of a plan's rows, as the drafter's pool names them.
        write_draft_kv: reduces rows of the target and writes the drafter's K/V.
    """

    target_worker: Any
    target: Any
    draft: Any
    draft_model: Any
    device: str
    gpu_id: int
    block: int
    window: int | None
    page_size: int
    draft_layout: Any
    tp_sync: Any
    full_embedding: torch.Tensor | None
    logits_processor: Any
    can_skip_logits: Callable[[Any, Any], bool]
    allocate_draft: Callable[..., None]
    draft_slots: Callable[[Any], torch.Tensor]
    write_draft_kv: Callable[..., None]

    @classmethod
    def of(cls, worker: Any) -> Runners:
        """Those of a constructed worker; seam: attributes of ``DFlashWorkerV2``."""
        window = worker.draft_window_size
        return cls(
            target_worker=worker.target_worker,
            target=worker.target_worker.model_runner,
            draft=worker.draft_model_runner,
            draft_model=worker.draft_model,
            device=worker.device,
            gpu_id=worker.gpu_id,
            block=int(worker.block_size),
            window=None if window is None else int(window),
            page_size=int(worker.page_size),
            draft_layout=worker.draft_parallel_layout,
            tp_sync=worker._tp_sync,
            full_embedding=worker._full_embed_gpu,
            logits_processor=worker._target_logits_processor,
            can_skip_logits=worker._can_skip_verify_logits,
            allocate_draft=worker.draft_worker.alloc_memory_pool,
            draft_slots=worker._draft_write_ids,
            write_draft_kv=worker._append_target_hidden_to_draft_kv_by_loc,
        )

    @property
    def vocabulary(self) -> int:
        """V of the target's logits."""
        return int(self.target.model_config.vocab_size)
