"""The worker's part of a windowed drafter: SGLang's compact draft cache over a pool of our own.

SGLang's compact cache (``--speculative-draft-window-size``) gives the draft a private
``req_to_token`` of the last W tokens, but still one pool slot per target token. Here the rows name
slots of :class:`DraftWindow` instead, so the pool is as large as the windows in use.
"""

from __future__ import annotations

import dataclasses

import torch
from sglang.srt.mem_cache.kv_loc_plan import IdSpace, IdSpaceKind
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_utils import draft_tp_context

from sglang_hyperdflash.serving.draft_kv_size import POOL_RATIO, pool_ratio
from sglang_hyperdflash.serving.window_slots import DraftWindow
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError


def ring_size(max_total_num_tokens: int, window: int, block: int, batch: int) -> int:
    """Ring slots of a pool of ``pool_ratio()`` slots per target token.

    Raises:
        HyperDFlashConfigError: the pool cannot hold one window.
    """
    ring = int(max_total_num_tokens * pool_ratio()) - batch * block
    if ring < window:
        raise HyperDFlashConfigError(
            f"the drafter's pool of {pool_ratio():g} slots per target token has {max(ring, 0)} "
            f"left for windows of {window} tokens beside the blocks of {batch} requests. Raise "
            f"{POOL_RATIO}, --mem-fraction-static or --max-total-tokens, or lower "
            "--max-running-requests."
        )
    return ring


class WindowedWorker(DFlashWorkerV2):
    """Overrides of ``DFlashWorkerV2`` that do nothing while ``window`` is None."""

    window: DraftWindow | None = None
    _rows: torch.Tensor | None = None
    _extend_lens: list[int] | None = None
    _slots: torch.Tensor | None = None

    def alloc_memory_pool(
        self, memory_pool_config=None, req_to_token_pool=None, token_to_kv_pool_allocator=None
    ) -> None:
        """Seam: the draft pool is as large as ``memory_pool_config`` says; ours says less."""
        if self.draft_window_size is None:
            super().alloc_memory_pool(
                memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator
            )
            return
        size, block, page = req_to_token_pool.size, int(self.block_size), int(self.page_size)
        tokens = int(memory_pool_config.max_total_num_tokens)
        self.window = DraftWindow(
            tokens=tokens + page + 1,
            ring=ring_size(tokens, int(self.draft_window_size), block, size),
            window=int(self.draft_window_size),
            block=block,
            batch=size,
            device=self.device,
        )
        pages = -(-self.window.size // page)
        # A row of W tokens and the block, not one of the context's length.
        rows = ReqToTokenPool(size, self.window.window + block, self.device, False)
        with draft_tp_context(self.draft_parallel_layout):
            self._draft_worker.alloc_memory_pool(
                memory_pool_config=dataclasses.replace(
                    memory_pool_config, max_total_num_tokens=pages * page
                ),
                req_to_token_pool=rows,
                token_to_kv_pool_allocator=token_to_kv_pool_allocator,
            )
        self._name_slots()

    def _name_slots(self) -> None:
        """Seam: ``KVIndexTranslator._spaces``: how a runner's pool names a round's write slots."""
        translator = self.draft_model_runner.kv_index_translator
        translator._spaces[IdSpaceKind.FULL] = IdSpace(
            key=("hyperdflash window", id(self.window)), write=self.window.block_slots
        )

    def forward_batch_generation(self, batch, *args, **kwargs):
        """One round, or a prefill; remembers whose tokens the hooks below are given."""
        self._rows, self._extend_lens = batch.req_pool_indices, batch.extend_lens
        return super().forward_batch_generation(batch, *args, **kwargs)

    def _compute_compact_draft_seq_lens(self, seq_lens: torch.Tensor) -> torch.Tensor:
        if self.window is None:
            return super()._compute_compact_draft_seq_lens(seq_lens)
        table = self.model_runner.req_to_token_pool.req_to_token
        self._slots, visible = self.window.view(table, self._rows, seq_lens)
        return visible.to(torch.int32)

    def _rebuild_compact_draft_cache(self, *, req_pool_indices, draft_prefix_lens, **rest) -> None:
        if self.window is None:
            super()._rebuild_compact_draft_cache(
                req_pool_indices=req_pool_indices, draft_prefix_lens=draft_prefix_lens, **rest
            )
            return
        table = self.draft_model_runner.req_to_token_pool.req_to_token
        self.window.lay_out(table, req_pool_indices, self._slots, draft_prefix_lens.long())

    def _draft_write_ids(self, plan) -> torch.Tensor:
        """The target's own ids: the append below turns them into slots."""
        return super()._draft_write_ids(plan) if self.window is None else plan.write_virtual

    def _append_target_hidden_to_draft_kv_by_loc(
        self, *, target_hidden, cache_loc, positions, cache_loc_2d=None, commit_lens=None, **rest
    ) -> None:
        if self.window is None or target_hidden is None:
            pass
        elif cache_loc_2d is not None:
            kept = self._block_pos_offsets < commit_lens.unsqueeze(1)
            cache_loc = self.window.enter(cache_loc_2d.reshape(-1).long(), kept.reshape(-1))
            cache_loc_2d = cache_loc.view_as(cache_loc_2d)
        else:
            last = self._last_of_each(len(cache_loc))
            self.window.forget(cache_loc)
            cache_loc = self.window.enter(
                cache_loc[last].long(), torch.ones_like(last, dtype=torch.bool)
            )
            # Older rows are never read, so they are not projected either.
            target_hidden, positions = target_hidden[last], positions[last]
        super()._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=target_hidden,
            cache_loc=cache_loc,
            positions=positions,
            cache_loc_2d=cache_loc_2d,
            commit_lens=commit_lens,
            **rest,
        )

    def _last_of_each(self, tokens: int) -> torch.Tensor:
        """Rows ``[k]`` int64 of a prefill that a window can still reach, on the device."""
        limit = self.window.per_request(len(self._extend_lens))
        rows, end = [], 0
        for length in self._extend_lens:
            end += int(length)
            rows.append(torch.arange(max(end - limit, end - int(length)), end))
        if end != tokens:
            raise RuntimeError(f"prefill of {tokens} tokens, but requests of {end}")
        return torch.cat(rows).to(self.device, non_blocking=True)
