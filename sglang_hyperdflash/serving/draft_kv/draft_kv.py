"""The drafter's K/V of committed tokens: where they are written, and what a draft pass reads.

Written right after every target pass, in the same stream, so that radix hits, chunked prefill and
retraction find them. A windowed drafter has SGLang's compact draft cache
(``--speculative-draft-window-size``), which gives it a ``req_to_token`` of its own, but there still
one pool slot per target token. Here its rows name slots of :class:`DraftWindow` instead, so the
pool is as large as the windows in use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.kv_loc_plan import IdSpace, IdSpaceKind
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.speculative.spec_utils import draft_tp_context
from sglang.srt.utils.common import async_h2d

from sglang_hyperdflash.serving.batch import Block
from sglang_hyperdflash.serving.draft_kv.attention import graph_context
from sglang_hyperdflash.serving.draft_kv.window import DraftWindow
from sglang_hyperdflash.serving.runners import Runners
from sglang_hyperdflash.serving.settings import POOL_RATIO
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

logger = logging.getLogger(__name__)


def ring_size(tokens: int, ratio: float, window: int, block: int, batch: int) -> int:
    """Ring slots of a pool of ``ratio`` slots per target token.

    Below one window for each of ``batch`` requests, they evict each other's tokens: acceptance
    falls, answers do not change.

    Raises:
        HyperDFlashConfigError: the pool cannot hold one window.
    """
    ring = int(tokens * ratio) - batch * block
    more = f"Raise {POOL_RATIO} or lower --max-running-requests"
    if ring < window:
        raise HyperDFlashConfigError(
            f"the drafter's pool of {ratio:g} slots per target token has {max(ring, 0)} "
            f"left for windows of {window} tokens besides the blocks of {batch} requests. {more}, "
            "or raise --mem-fraction-static or --max-total-tokens."
        )
    share = ring / (window * batch)
    logger.log(
        logging.INFO if share >= 1 else logging.WARNING,
        f"HYPERDFLASH: the draft window's ring has {ring} slots: {share:.2f} of {batch} requests x "
        f"{window} tokens" + ("." if share >= 1 else f"; acceptance falls when more run. {more}."),
    )
    return ring


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


@dataclass(frozen=True)
class DraftContext:
    """What a draft pass reads of every request's context.

    Attributes:
        lengths: ``[bs]`` tokens it sees, on the device.
        ends_cpu: these and the block's rows, or bounds, ``[bs]`` int32 on the host.
        plan: SGLang's ``KVLocPlan`` in the drafter's own slots.
    """

    lengths: torch.Tensor
    ends_cpu: torch.Tensor
    plan: Any


class DraftKV:
    """K/V in the same slots as the target's: what its cache keeps, the drafter finds, too.

    Args:
        pool_ratio: slots of a windowed drafter's pool per target token.
    """

    def __init__(self, runners: Runners, pool_ratio: float) -> None:
        self.runners, self.pool_ratio = runners, pool_ratio

    def allocate(self, config: Any, req_to_token_pool: Any, allocator: Any) -> None:
        """Make the drafter's pool; seam: ``DFlashWorkerV2.alloc_memory_pool``."""
        with draft_tp_context(self.runners.draft_layout):
            self.runners.allocate_draft(config, req_to_token_pool, allocator)

    @contextlib.contextmanager
    def build_context(self) -> Iterator[None]:
        """While the draft's attention backends and graphs are built."""
        yield

    def context(self, batch: Any, block: Block) -> DraftContext:
        """All of every request's context."""
        ends = block.ends_cpu
        if ends is None:  # what is allocated includes the rows in flight
            ends = torch.tensor([req.kv.kv_allocated_len for req in batch.reqs])
        return DraftContext(batch.seq_lens, ends.to(torch.int32), block.plan)

    def write_prefill(
        self, batch: Any, residual: torch.Tensor, plan: Any, positions: torch.Tensor
    ) -> None:
        """Write all rows of a prefill: what the target gave ``[N, m * d]``, at ``positions``."""
        self._write(residual, self.runners.draft_slots(plan), positions)

    def write(self, residual: torch.Tensor, block: Block, lengths: torch.Tensor) -> None:
        """Write a block's first ``lengths [bs]`` rows, its anchor and accepted drafts.

        Captured target graphs share one ``residual [bs * B, m * d]``: the next pass overwrites it.
        """
        slots, positions = self._committed_slots(block, lengths), block.positions.flatten()
        self._write(residual, slots, positions, slots.view(block.tokens.shape), lengths)

    def forget_padding(self) -> None:
        """Rounds of made-up requests wrote to the slot that pads batches; it is never read."""

    def _committed_slots(self, block: Block, lengths: torch.Tensor) -> torch.Tensor:
        """Slots ``[bs * B]`` of a block's rows, as the draft pool names them.

        Seam: ``DFlashWorkerV2._draft_write_ids``.
        """
        return self.runners.draft_slots(block.plan)

    def _write(
        self,
        residual: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        slots_2d: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
    ) -> None:
        """Reduce and write; seam: ``DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc``."""
        self.runners.write_draft_kv(
            target_hidden=residual,
            cache_loc=slots,
            cache_loc_2d=slots_2d,
            positions=positions,
            commit_lens=lengths,
        )


class WindowedDraftKV(DraftKV):
    """K/V of the last W tokens of the contexts in use, in a pool of their own."""

    window: DraftWindow

    def allocate(self, config: Any, req_to_token_pool: Any, allocator: Any) -> None:
        runners, size = self.runners, req_to_token_pool.size
        block, page, window = runners.block, runners.page_size, runners.window
        tokens = int(config.max_total_num_tokens)
        self.window = DraftWindow(
            tokens=tokens + page + 1,
            ring=ring_size(tokens, self.pool_ratio, window, block, size),
            window=window,
            block=block,
            batch=size,
            device=runners.device,
        )
        pages = -(-self.window.size // page)
        # A row of W tokens and the block, not one of the context's length; a decode node has more
        # rows than requests that run.
        count = len(req_to_token_pool.req_to_token) - 1
        rows = ReqToTokenPool(count, window + block, runners.device, False)
        super().allocate(
            dataclasses.replace(config, max_total_num_tokens=pages * page), rows, allocator
        )
        # Seam: ``KVIndexTranslator._spaces``, how a runner's pool names a round's write slots.
        runners.draft.kv_index_translator._spaces[IdSpaceKind.FULL] = IdSpace(
            key=("hyperdflash window", id(self.window)), write=self.window.scratch_slots
        )

    @contextlib.contextmanager
    def build_context(self) -> Iterator[None]:
        """A draft row is a window and a block long; backends size buffers by the context's length.

        Seam: ``model_config.context_len``, read while backends and graphs are built.
        """
        config = self.runners.draft.model_config
        context = config.context_len
        config.context_len = graph_context(context, self.runners.window, self.runners.block)
        try:
            yield
        finally:
            config.context_len = context

    def context(self, batch: Any, block: Block) -> DraftContext:
        """What is left of every request's window."""
        runner, rows = self.runners.draft, batch.req_pool_indices
        table = self.runners.target.req_to_token_pool.req_to_token
        slots, visible = self.window.view(table, rows, batch.seq_lens)
        draft_table = runner.req_to_token_pool.req_to_token
        self.window.write_table(draft_table, rows, slots, visible, block.width)
        lengths = visible.to(torch.int32)
        if getattr(runner.attn_backend, "needs_cpu_seq_lens", True):
            # FlashInfer plans by the exact lengths, which only the device knows: this waits for it.
            ends = lengths.cpu() + block.width
        else:
            most = self.window.window + block.width
            ends = torch.full(lengths.shape, most, dtype=torch.int32, device="cpu")
        plan = block.plan.reads_from(
            runner.kv_index_translator,
            seq_lens=lengths,
            seq_lens_cpu=ends,
            read_extent=block.width,
        )
        return DraftContext(lengths, ends, plan)

    def write_prefill(
        self, batch: Any, residual: torch.Tensor, plan: Any, positions: torch.Tensor
    ) -> None:
        """Write the rows that a window can still reach; older ones are not even reduced."""
        ids = plan.write_virtual
        prompts = [len(req.origin_input_ids) + len(req.output_ids) for req in batch.reqs]
        limit = self.window.per_request(len(prompts))
        entering = entering_rows(batch.prefix_lens, batch.extend_lens, prompts, limit)
        rows = async_h2d(entering, dtype=torch.int64, device=torch.device(self.runners.device))
        self.window.forget(ids)
        slots = self.window.enter(ids[rows].long(), torch.ones_like(rows, dtype=torch.bool))
        self._write(residual[rows], slots, positions[rows])

    def _committed_slots(self, block: Block, lengths: torch.Tensor) -> torch.Tensor:
        """New slots of the rows that are committed; the others have none."""
        kept = self.window.columns[: block.width] < lengths.unsqueeze(1)
        return self.window.enter(block.slots.long(), kept.flatten())

    def arrive(self, req: Any, prefill: bool) -> None:
        """Forget stale slots of a request's tokens whose K/V were not computed here.

        Another node's, after a hand-over or a resumed retraction, or those restored from a cache
        below the device.
        """
        end, count = req.kv.kv_committed_len, req.kv.kv_committed_len
        if prefill:
            end, count = req.prefix_len, req.host_loaded_length * req.needs_host_load_back()
        if count:
            table = self.runners.target.req_to_token_pool.req_to_token
            self.window.forget(table[req.kv.req_pool_idx, end - count : end].long())

    def forget_padding(self) -> None:
        self.window.forget(torch.zeros(1, dtype=torch.int64, device=self.runners.device))
