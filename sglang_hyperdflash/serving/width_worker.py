"""The worker's part of a verify width that changes from round to round.

A round of width w verifies the anchor and ``w - 1`` drafts of every request. All that depends on
the width inside ``DFlashWorkerV2`` is swapped as a whole, as EAGLE's adaptive steps do. At width 1
nothing is drafted (``one_row``). A block that could pass the end of a context is such a round, too:
neither model has positions there.

What stays at the block size while serving: slots reserved for each request (a round in flight may
need them), and everything sized at start.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.runtime_context import get_disagg, get_exec, get_parallel
from sglang.srt.speculative.draft_worker_common import (
    build_block_pos_offsets,
    make_draft_block_spec_info,
)

from sglang_hyperdflash.serving import width_graphs
from sglang_hyperdflash.serving.draft_temperature import DraftTemperature
from sglang_hyperdflash.serving.one_row import OneRowWorker
from sglang_hyperdflash.serving.width.controller import WidthController
from sglang_hyperdflash.serving.width.settings import (
    FULL,
    WIDTH,
    WIDTHS,
    WidthSetting,
    read_setting,
)
from sglang_hyperdflash.serving.width.timing import time_rounds
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError, SeamError

logger = logging.getLogger(__name__)

# Of ``DFlashWorkerV2``: what depends on the width, and buffers that grow when they are first used.
BUFFERS = {
    "_draft_block_ids_buf": None,
    "_draft_block_positions_buf": None,
    "_draft_block_tokens_buf": None,
    "_draft_verify_out_cache_loc_buf": None,
    "_draft_block_end_buf": None,
    "_draft_seq_lens_cpu_buf": None,
    "_accept_bonus_buffer_cap": 0,
    "_accept_bonus_buffer_slot": 0,
    "_accept_len_buf": None,
    "_commit_lens_bufs": (),
    "_bonus_id_bufs": (),
    "_out_tokens_bufs": (),
    "_new_seq_lens_bufs": (),
}
SIZED = (
    "block_size",
    "speculative_num_draft_tokens",
    "_block_pos_offsets",
    "_draft_block_spec_info",
    "_draft_sampler",
)


def check_ranks_agree(setting: WidthSetting, gather: Callable[[Any], list[Any]]) -> None:
    """Refuse nodes whose environments name different widths: their rounds would not meet.

    Args:
        gather: every rank's object; seam: ``GroupCoordinator.all_gather_object``.

    Raises:
        HyperDFlashConfigError: on every rank, so that all of them end.
    """
    found = gather(setting)
    if any(other != setting for other in found):
        said = "; ".join(f"rank {i}: {one.mode} of {one.widths}" for i, one in enumerate(found))
        raise HyperDFlashConfigError(
            f"{WIDTH} and {WIDTHS} must be the same on all nodes; found {said}."
        )


def check_processors(has_one_row: bool, enabled: bool) -> None:
    """Custom logit processors need rounds of one row per request.

    Raises:
        HyperDFlashConfigError: they are enabled on a server that verifies whole blocks only.
    """
    if enabled and not has_one_row:
        raise HyperDFlashConfigError(
            "--enable-custom-logit-processor: expected a server that can verify one row per "
            "request; found attention data parallelism, recurrent layers, two-batch overlap or "
            "--enable-pd-role-switch, where only whole blocks are verified. Drop the flag."
        )


def block_fits(committed: Iterable[int], running: int, block: int, context: int) -> bool:
    """Whether a whole block ends before the last position of every request's context.

    Rounds of one row then fit as well: SGLang ends a request two tokens before its context's end,
    and runs it once more at most.

    Args:
        committed: tokens of each request that the host knows of.
        running: rows of the round that may still run under overlap scheduling; 0 without.
    """
    return max(committed) + running + block < context


class WidthStates:
    """The attributes of a worker, and of its model runners, at each of its widths.

    Args:
        worker: a ``DFlashWorkerV2``, at its full width. widths: all that it may be set to.
        eager: more widths, too seldom for graphs, which take memory.

    Raises:
        SeamError: an attribute is gone.
    """

    def __init__(self, worker: Any, widths: tuple[int, ...], eager: tuple[int, ...] = ()) -> None:
        missing = [name for name in (*SIZED, *BUFFERS) if name not in vars(worker)]
        if missing:
            raise SeamError(f"SGLang seam DFlashWorkerV2 lost {', '.join(missing)}")
        self.worker, self.full = worker, int(worker.block_size)
        self.graphed = {*widths, self.full}
        self.states: dict[int, dict[str, Any]] = {}
        self.runners: dict[int, list[tuple[Any, width_graphs.RunnerState]]] = {}
        for width in self.graphed | {*eager}:
            self.states[width] = {
                **BUFFERS,
                "block_size": width,
                "speculative_num_draft_tokens": width,
                "_block_pos_offsets": build_block_pos_offsets(length=width, device=worker.device),
                "_draft_block_spec_info": make_draft_block_spec_info(
                    draft_token_num=width, device=worker.device
                ),
                "_draft_sampler": None,
            }

    def activate(self, width: int) -> None:
        """Make the worker one of this width; what changed since stays with the width it had."""
        values = vars(self.worker)
        current = values["block_size"]
        if current == width:
            return
        left = self.states[current]
        for name in left:
            left[name] = values[name]
        values.update(self.states[width])
        for runner, state in self.runners.get(width, ()):
            vars(runner).update(state)

    def build_runners(self) -> None:
        """Backends and graphs of every width; the worker is at its full one, with its own."""
        worker = self.worker
        target, draft = worker.target_worker.model_runner, worker.draft_model_runner
        own = [(runner, width_graphs.state_of(runner)) for runner in (target, draft)]
        self.runners = {self.full: own}
        for width in sorted({*self.states} - {self.full}, reverse=True):
            self.activate(width)
            capture = width in self.graphed
            built = [(target, width_graphs.target_state(worker, width, capture))]
            if width > 1:
                if width_graphs.captured(draft):
                    worker._draft_sampler = worker._maybe_build_draft_sampler()
                built.append((draft, width_graphs.draft_state(worker, width)))
            self.activate(self.full)
            self.runners[width] = built

    def capture_again(self, theirs: Callable[[], None]) -> None:
        """All graphs anew, for other weights: the target's block by SGLang's ``theirs``.

        SGLang captures with the backend that the runner has, at the block's rows. The drafter's
        graphs hold the target's embeddings and head.
        """
        self.activate(self.full)
        self.runners = {}
        gc.collect()  # graphs and backends refer to each other; the new ones want their memory
        theirs()
        width_graphs.capture_draft(self.worker)
        self.build_runners()


class WidthWorker(OneRowWorker):
    """Overrides of ``DFlashWorkerV2`` for rounds of different widths."""

    def __init__(self, server_args, gpu_id, nccl_port, target_worker) -> None:
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self.block = int(self.block_size)
        setting = self._allowed(read_setting(self.block, self._drafts_causally()))
        if get_parallel().tp_size > 1:
            check_ranks_agree(setting, get_parallel().tp_group.all_gather_object)
        self.width_control = WidthController(setting, self.block)
        self._overlap = not server_args.disable_overlap_schedule
        self._has_one_row = not self._whole_blocks_only()
        check_processors(self._has_one_row, server_args.enable_custom_logit_processor)
        self._end_requests_early()
        self._rounds_width = self.block
        # Width 1 is for custom logit processors and the ends of contexts at least.
        self._states = WidthStates(self, setting.widths, eager=(1,) if self._has_one_row else ())
        logger.info("HYPERDFLASH widths: %s of %s", setting.mode, setting.widths)

    def _end_requests_early(self) -> None:
        """Where every round is a whole block: ``dflash_seams.end_requests_early`` reads it."""
        self.target_worker.rows_past_the_end = 0 if self._has_one_row else 2 * self.block

    def _time_rounds(self) -> None:
        """Time every width, if the policy chooses between them and this node decodes.

        Seam: the tensor-parallel group of CPU tensors, which gives every rank rank 0's numbers.
        """
        if self.width_control.policy is None or self.server_args.disaggregation_mode == "prefill":
            return
        group = get_parallel().tp_group
        share = partial(group.broadcast_object, src=0) if group.world_size > 1 else None
        self.width_control.costs = time_rounds(self, self.width_control, share)
        # What the worker remembers of the last round is of no request.
        self.requests = self._info = self._proposal = self._pending_of = None
        self._broken = self._greedy = None
        self._pending.take()
        self._rounds_width = self.block
        if self.window is not None:
            self.window.forget(torch.zeros(1, dtype=torch.int64, device=self.device))
        fixed = self.draft_temperature.fixed
        self.draft_temperature = DraftTemperature(self.device, fixed=fixed)
        self._states.activate(self.block)

    def _drafts_causally(self) -> bool:
        """Whether every draft layer is causal inside a block.

        Seam: ``DFlashAttention.attn``; SGLang reads ``is_causal`` of some configs only.
        """
        kinds = [layer.self_attn.attn.attn_type for layer in self.draft_model.layers]
        return all(kind == AttentionType.DECODER for kind in kinds)

    def _allowed(self, setting: WidthSetting) -> WidthSetting:
        return WidthSetting(FULL, (self.block,)) if self._whole_blocks_only() else setting

    def _whole_blocks_only(self) -> bool:
        """Whether ranks run different rounds, states follow each row, or one backend must stay.

        Two-batch overlap wraps the target's; a node that changes its role has no others' graphs,
        and slots that another node fills.
        """
        states = mambaish_config(self.model_runner.model_config) is not None
        wrapped = get_exec().overlap.enable_two_batch_overlap
        switched = get_disagg().enable_pd_role_switch
        return bool(get_parallel().attn_dp_enabled or states or wrapped or switched)

    def _needs_one_row(self) -> bool:
        """Whether nothing may be drafted in the round that starts.

        A custom logit processor may count its calls, so it is called once per token. A server
        without width 1 has none, and ends requests early (``dflash_seams.end_requests_early``).
        """
        if not self._has_one_row:
            return False
        if self._info.has_custom_logit_processor:
            return True
        context = self.target_worker.model_runner.model_config.context_len
        committed = (req.kv.kv_committed_len for req in self.requests.reqs)
        running = self._rounds_width if self._overlap else 0
        return not block_fits(committed, running, self.block, context)

    def init_cuda_graphs(self) -> None:
        """Seam: the last step of a start; every other width is built behind the block's."""
        super().init_cuda_graphs()
        self._states.build_runners()
        width_graphs.on_recapture(self.target_worker.model_runner, self._states.capture_again)
        self._time_rounds()

    def _write_before(self, width: int) -> None:
        """Write the draft K/V of passes before the one that starts, if it cannot wait for them."""
        # A window's slots are another's once the requests have changed.
        changed = self.window is not None and self._pending_of is not self.requests
        goes_on = self._prefill_waits or (width == 1 and not changed)
        if len(self._pending) and not goes_on:
            self.write_pending()

    def run_round(self, batch, *args, **kwargs):
        """One round of the next width, or a prefill; the batch has been read."""
        mode = batch.forward_mode
        idle = mode.is_extend() or mode.is_idle() or bool(batch.is_extend_in_batch)
        before = self._rounds_width
        if idle or self.requests is None:
            width = self.block
        elif self._needs_one_row():
            width = 1
        else:
            width = self.width_control.next(*self.requests.classes)
        if not idle:
            self._rounds_width = width
        # Between rounds without drafts nothing reads what a prefill writes.
        short = self._pending.fits(batch.extend_num_tokens or 0)
        self._prefill_waits = idle and short and before == 1 and self.window is None
        self._write_before(width)
        self._states.activate(width)
        if width == 1:
            result = self.one_row_round(batch, *args, **kwargs)
        else:
            result = super().run_round(batch, *args, **kwargs)
        if not (idle or self.width_control.setting.fixed):
            # SGLang's own gauge and the answers' ``spec_cap_length`` are then the mean width.
            result.cap_lens = torch.full_like(result.accept_lens, width)
        return result
