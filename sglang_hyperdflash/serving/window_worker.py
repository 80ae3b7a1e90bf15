"""The worker's part of a windowed drafter: SGLang's compact draft cache over a pool of our own.

SGLang's compact cache (``--speculative-draft-window-size``) gives the draft a private
``req_to_token`` of the last W tokens, but still one pool slot per target token. Here the rows name
slots of :class:`DraftWindow` instead, so the pool is as large as the windows in use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence

import torch
from sglang.srt.mem_cache.kv_loc_plan import IdSpace, IdSpaceKind
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_utils import draft_tp_context
from sglang.srt.utils.common import async_h2d

from sglang_hyperdflash.serving.draft_kv.attention import graph_context
from sglang_hyperdflash.serving.draft_kv.size import POOL_RATIO, pool_ratio
from sglang_hyperdflash.serving.window_slots import DraftWindow
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

logger = logging.getLogger(__name__)


def ring_size(max_total_num_tokens: int, window: int, block: int, batch: int) -> int:
    """Ring slots of a pool of ``pool_ratio()`` slots per target token.

    Raises:
        HyperDFlashConfigError: the pool cannot hold one window.
    """
    ring = int(max_total_num_tokens * pool_ratio()) - batch * block
    if ring < window:
        raise HyperDFlashConfigError(
            f"the drafter's pool of {pool_ratio():g} slots per target token has {max(ring, 0)} "
            f"left for windows of {window} tokens besides the blocks of {batch} requests. Raise "
            f"{POOL_RATIO}, --mem-fraction-static or --max-total-tokens, or lower "
            "--max-running-requests."
        )
    return ring


def report_ring(ring: int, window: int, batch: int) -> None:
    """Say how many of the requests that may run at once keep a whole window.

    Below 1, requests evict each other's tokens: acceptance falls, answers do not change.
    """
    share = ring / (window * batch)
    text = (
        f"the draft window's ring has {ring} slots: {share:.2f} of {batch} requests x {window} "
        "tokens"
    )
    if share >= 1:
        logger.info("HYPERDFLASH: %s.", text)
        return
    logger.warning(
        "HYPERDFLASH: %s. When more run with full windows, acceptance falls; raise %s or lower "
        "--max-running-requests.",
        text,
        POOL_RATIO,
    )


def entering_rows(
    prefixes: Sequence[int], extends: Sequence[int], ends: Sequence[int], limit: int
) -> list[int]:
    """Rows of a prefill whose tokens the first drafted block can still reach.

    Args:
        prefixes: tokens of each request before this step. extends: its rows in this step. ends: its
            length when its whole prompt is computed, later chunks included. limit: of a window.
    """
    rows, first = [], 0
    for prefix, extend, end in zip(prefixes, extends, ends, strict=True):
        skipped = min(max(end - limit - prefix, 0), extend)
        rows += range(first + skipped, first + extend)
        first += extend
    return rows


class WindowedWorker(DFlashWorkerV2):
    """Overrides of ``DFlashWorkerV2`` that do nothing while ``window`` is None."""

    window: DraftWindow | None = None
    _rows: torch.Tensor | None = None
    _prefill: tuple[list[int], list[int], list[int]] | None = None
    _slots: torch.Tensor | None = None
    _visible: torch.Tensor | None = None

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
        report_ring(self.window.ring, self.window.window, size)
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
        self._rows = batch.req_pool_indices
        if self.window is not None and batch.forward_mode.is_extend():
            ends = [len(req.origin_input_ids) + len(req.output_ids) for req in batch.reqs]
            self._prefill = (list(batch.prefix_lens), list(batch.extend_lens), ends)
        return super().forward_batch_generation(batch, *args, **kwargs)

    @contextlib.contextmanager
    def _own_context(self) -> Iterator[None]:
        """A draft row is a window and a block long; backends size buffers by the context's length.

        Seam: ``model_config.context_len``, read while backends and graphs are built.
        """
        config = self.draft_model_runner.model_config
        context = config.context_len
        if self.window is not None:
            config.context_len = graph_context(context, self.window.window, self.window.block)
        try:
            yield
        finally:
            config.context_len = context

    def init_attention_backends(self) -> None:
        """Seam: a draft backend keeps the context length that it is built with."""
        with self._own_context():
            super().init_attention_backends()

    def init_cuda_graphs(self) -> None:
        """Seam: graphs too."""
        with self._own_context():
            super().init_cuda_graphs()

    def _fill_compact_seq_lens_cpu_bound(
        self, *, batch_seq_lens_cpu, nxt_kv_lens_cpu, out: torch.Tensor
    ) -> None:
        """Host lengths of a backend that plans by them, FlashInfer: the device's own and the block.

        How much of a window is left, only the device knows, so this waits for it; with an upper
        bound FlashInfer would merge parts of the answer that nobody computed.
        """
        backend = self.draft_model_runner.attn_backend
        if self.window is not None and getattr(backend, "needs_cpu_seq_lens", True):
            out.copy_(self._visible + int(self.block_size))
            return
        super()._fill_compact_seq_lens_cpu_bound(
            batch_seq_lens_cpu=batch_seq_lens_cpu, nxt_kv_lens_cpu=nxt_kv_lens_cpu, out=out
        )

    def _compute_compact_draft_seq_lens(self, seq_lens: torch.Tensor) -> torch.Tensor:
        if self.window is None:
            return super()._compute_compact_draft_seq_lens(seq_lens)
        table = self.model_runner.req_to_token_pool.req_to_token
        self._slots, visible = self.window.view(table, self._rows, seq_lens)
        self._visible = visible.to(torch.int32)
        return self._visible

    def _rebuild_compact_draft_cache(self, *, req_pool_indices, draft_prefix_lens, **rest) -> None:
        if self.window is None:
            super()._rebuild_compact_draft_cache(
                req_pool_indices=req_pool_indices, draft_prefix_lens=draft_prefix_lens, **rest
            )
            return
        table = self.draft_model_runner.req_to_token_pool.req_to_token
        width = int(self.block_size)
        visible = draft_prefix_lens.long()
        self.window.write_table(table, req_pool_indices, self._slots, visible, width)

    def _draft_write_ids(self, plan) -> torch.Tensor:
        """The target's own ids: the append below turns them into slots."""
        return super()._draft_write_ids(plan) if self.window is None else plan.write_virtual

    def _append_target_hidden_to_draft_kv_by_loc(
        self, *, target_hidden, cache_loc, positions, cache_loc_2d=None, commit_lens=None, **rest
    ) -> None:
        if self.window is None or target_hidden is None:
            pass
        elif cache_loc_2d is not None:
            columns = self._block_pos_offsets[: cache_loc_2d.shape[1]]
            kept = columns < commit_lens.unsqueeze(1)
            cache_loc = self.window.enter(cache_loc_2d.reshape(-1).long(), kept.reshape(-1))
            cache_loc_2d = cache_loc.view_as(cache_loc_2d)
        else:
            last = self._entering(len(cache_loc))
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

    def _entering(self, tokens: int) -> torch.Tensor:
        """Rows ``[k]`` int64 of a prefill that a window can still reach, on the device."""
        prefixes, extends, ends = self._prefill
        if sum(extends) != tokens:
            raise RuntimeError(f"prefill of {tokens} tokens, but requests of {sum(extends)}")
        limit = self.window.per_request(len(extends))
        rows = entering_rows(prefixes, extends, ends, limit)
        return async_h2d(rows, dtype=torch.int64, device=torch.device(self.device))
