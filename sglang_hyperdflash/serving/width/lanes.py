"""One lane per verify width: the parts of both model runners that depend on the rows of a request.

An attention backend may keep buffers of one width, and a CUDA graph was captured with them; a width
has both for the target and, where it drafts, for the drafter. Built as EAGLE's adaptive steps build
theirs (``EagleWorkerV2.build_adaptive_runtime_state``). A width without a graph runs eagerly.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.draft_worker_common import (
    make_draft_block_spec_info,
    make_draft_sampler_capture_hook,
)
from sglang.srt.speculative.spec_utils import draft_tp_context
from sglang.srt.utils import get_available_gpu_memory, is_cuda

from sglang_hyperdflash.serving.draft_kv.attention import bound_graph_buffers
from sglang_hyperdflash.serving.drafting.candidates import CandidateBuffers
from sglang_hyperdflash.serving.runners import Runners, from_all_ranks

logger = logging.getLogger(__name__)

# Free memory, GB, below which SGLang captures no draft graph (``DFlashWorkerV2.init_cuda_graphs``).
LEAST_FREE = 1.0


@dataclass
class RunnerState:
    """A model runner's attention backend and decode graphs of one width."""

    runner: Any
    attn_backend: Any
    graphs: Any

    def install(self) -> None:
        """From now on the runner runs with these."""
        self.runner.attn_backend = self.attn_backend
        self.runner.decode_cuda_graph_runner = self.graphs


@dataclass
class Lane:
    """A verify width.

    Attributes:
        width: rows of a request, the anchor's included.
        spec_info: SGLang's description of the drafter's block.
        draft_buffers: what the draft's graphs of this width write; None without them.
        states: of the target and, where the width drafts, of the drafter.
    """

    width: int
    spec_info: Any
    draft_buffers: CandidateBuffers | None = None
    states: list[RunnerState] = field(default_factory=list)


class Lanes:
    """All widths of a worker, of which one is active.

    Args:
        new_buffers: makes candidates' buffers of a width for so many requests.
        draft_context: holds while the drafter's backends and graphs are built.
        widths: those that the policy chooses from.
        eager: extra widths without CUDA graphs, which take memory: they are rarely used.
    """

    def __init__(
        self,
        runners: Runners,
        new_buffers: Callable[[int, int], CandidateBuffers],
        draft_context: Callable[[], AbstractContextManager],
        widths: Collection[int],
        eager: Collection[int] = (),
    ) -> None:
        self.runners, self.block = runners, runners.block
        self._new_buffers, self._draft_context = new_buffers, draft_context
        self._eager = {*eager} - {*widths}
        self.active = self._lane(self.block)
        self._lanes = {self.block: self.active}
        self._others = sorted({*widths, *self._eager} - {self.block}, reverse=True)

    def _lane(self, width: int) -> Lane:
        device = self.runners.device
        return Lane(width, make_draft_block_spec_info(draft_token_num=width, device=device))

    def activate(self, width: int) -> Lane:
        """The lane of a width; the runners have its backends and graphs."""
        if width != self.active.width:
            self.active = self._lanes[width]
            for state in self.active.states:
                state.install()
        return self.active

    def build(self, candidates: CandidateBuffers | None) -> None:
        """Take over the block's lane that SGLang has built, and build every other.

        Called right after ``DFlashWorkerV2.init_cuda_graphs``.

        Args:
            candidates: what the draft's graphs of the block write; None without them.
        """
        lane, target, draft = self.active, self.runners.target, self.runners.draft
        lane.draft_buffers = candidates
        for runner in (target, draft):
            graphs = runner.decode_cuda_graph_runner
            lane.states.append(RunnerState(runner, runner.attn_backend, graphs))
        for width in self._others:
            other, started = self._lane(width), time.perf_counter()
            # Backends and graph runners read the width from the server's resolved settings.
            with get_spec().override(speculative_num_draft_tokens=width):
                graphs = width not in self._eager and self._room(target, f"width {width} verifies")
                other.states.append(_build(target, width, graphs))
                if width > 1:
                    other.states.append(self._build_draft(other, draft, candidates))
            self._lanes[width] = other
            taken = time.perf_counter() - started
            logger.info(f"HYPERDFLASH: width {width} has its backends and graphs ({taken:.1f} s)")

    def _build_draft(
        self, lane: Lane, draft: Any, of_block: CandidateBuffers | None
    ) -> RunnerState:
        """The drafter's backend and, where there is memory, its graphs and their buffers."""
        width = lane.width
        graphs = captured(draft) and self._room(draft, f"width {width} drafts")
        if graphs and of_block is not None:
            lane.draft_buffers = self._new_buffers(width, len(of_block.ids))
        with (
            _capture_hooks(draft, lane.draft_buffers),
            self._draft_context(),
            draft_tp_context(self.runners.draft_layout),
        ):
            # A wide round may have just moved a request past its context's end.
            return _build(draft, width, graphs, bound_to=self.block)

    def _room(self, runner: Any, doing: str) -> bool:
        """Whether there is memory for what the block's graphs took once more; alike on all ranks.

        SGLang asks for ``LEAST_FREE`` of the drafter's whole block; its own reserve is for one
        width's graphs. Seam: ``ModelRunner.graph_memory_usage``.
        """
        if not (is_cuda() and captured(runner)):
            return True
        taken = max(from_all_ranks(sum(runner.graph_memory_usage.values())))
        free = get_available_gpu_memory(self.runners.device, self.runners.gpu_id)
        free = min(from_all_ranks(free))
        if free >= LEAST_FREE + taken:
            return True
        logger.warning(
            f"HYPERDFLASH: {doing} without a CUDA graph: {free:.2f} GB of GPU memory are free, the "
            f"block's graphs took {taken:.2f}. Lower --mem-fraction-static or "
            "--cuda-graph-max-bs-decode, or name fewer widths."
        )
        return False


def captured(runner: Any) -> bool:
    """Whether the runner replays decode graphs; without any, SGLang sets None or the eager one."""
    return runner.decode_cuda_graph_runner not in (None, runner.eager_runner)


@contextmanager
def _capture_hooks(runner: Any, candidates: CandidateBuffers | None) -> Iterator[None]:
    """Capture graphs with this lane's head; seam: ``ModelRunner.capture_tail_hooks``."""
    hooks, runner.capture_tail_hooks = runner.capture_tail_hooks, []
    if candidates is not None:
        runner.capture_tail_hooks.append(make_draft_sampler_capture_hook(candidates))
    try:
        yield
    finally:
        runner.capture_tail_hooks = hooks


def _build(runner: Any, width: int, graphs: bool, bound_to: int | None = None) -> RunnerState:
    """A backend of its own, and decode graphs if the runner has some at full width.

    Args:
        graphs: False for none. bound_to: the block whose contexts its graphs' indices hold.
    """
    # FlashInfer's workspace (384 MiB; 2 GiB under deterministic inference) is the first backend's:
    # passes follow one another on one stream, and nothing in it outlives its pass.
    backend = runner._get_attention_backend(init_new_workspace=runner.init_new_workspace)
    # As ``ModelRunner.init_attention_backends`` does for the first one.
    runner.kv_index_translator.bind_and_verify_backends([backend])
    if bound_to is not None:
        bound_graph_buffers(backend, bound_to)
    graph_runner = runner.decode_cuda_graph_runner
    if captured(runner):
        graph_runner = runner.eager_runner
        if graphs:
            graph_runner = runner._decode_cuda_graph_runner_cls()(
                runner,
                attn_backend=backend,
                speculative_num_steps=get_spec().speculative_num_steps,
                speculative_num_draft_tokens=width,
            )
    return RunnerState(runner, backend, graph_runner)
