"""Attention backends and, on CUDA, decode graphs of each width, swapped with the worker's state.

An attention backend may keep buffers of one width, and a graph was captured with them; a width has
both for the target and, where it drafts, for the drafter. Built as EAGLE's adaptive steps build
theirs (``EagleWorkerV2.build_adaptive_runtime_state``). A width without a graph runs eagerly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.draft_worker_common import make_draft_sampler_capture_hook
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context
from sglang.srt.utils import is_cuda

from sglang_hyperdflash.serving.draft_kv.attention import bound_graph_buffers
from sglang_hyperdflash.tools.errors import SeamError

logger = logging.getLogger(__name__)

# Free memory, GB, below which SGLang captures no draft graph (``DFlashWorkerV2.init_cuda_graphs``).
LEAST_FREE = 1.0
# Of a ``ModelRunner``.
SWAPPED = ("attn_backend", "decode_cuda_graph_runner")
# What one width has of a runner.
RunnerState = dict[str, Any]


def state_of(runner: Any) -> RunnerState:
    """The runner's own, as SGLang built it.

    Raises:
        SeamError: an attribute is gone.
    """
    missing = [name for name in SWAPPED if name not in vars(runner)]
    if missing:
        raise SeamError(f"SGLang seam ModelRunner lost {', '.join(missing)}")
    return {name: vars(runner)[name] for name in SWAPPED}


def captured(runner: Any) -> bool:
    """Whether the runner replays decode graphs; without any, SGLang sets None or the eager one."""
    return runner.decode_cuda_graph_runner not in (None, runner.eager_runner)


def on_recapture(runner: Any, again: Callable[[Callable[[], None]], None]) -> None:
    """Have ``again`` called, with SGLang's own, where an update of weights captures graphs anew.

    Seam: ``WeightUpdater.recapture_cuda_graph``, of ``/update_weights_from_disk`` with
    ``recapture_cuda_graph``.

    Raises:
        SeamError: the runner has no such updater.
    """
    try:
        updater = runner.weight_updater
        ours = partial(again, updater.recapture_cuda_graph)
        runner.weight_updater = replace(updater, recapture_cuda_graph=ours)
    except (AttributeError, TypeError) as error:
        raise SeamError(f"SGLang seam ModelRunner.weight_updater changed: {error}") from error


def _settings(width: int) -> AbstractContextManager:
    """Seam: backends and graph runners read the width from the server's resolved settings."""
    return get_spec().override(speculative_num_draft_tokens=width)


def _build(
    runner: Any, width: int, bound_to: int | None = None, capture: bool = True
) -> RunnerState:
    """A backend of its own, and a decode graph if the runner has one at full width.

    Args:
        bound_to: the block whose contexts its graphs' indices hold. capture: False for no graph.
    """
    # FlashInfer's workspace (384 MiB; 2 GiB under deterministic inference) is the first backend's:
    # passes follow one another on one stream, and nothing in it outlives its pass.
    backend = runner._get_attention_backend(init_new_workspace=runner.init_new_workspace)
    # As ``ModelRunner.init_attention_backends`` does for the first one.
    runner.kv_index_translator.bind_and_verify_backends([backend])
    if bound_to is not None:
        bound_graph_buffers(backend, bound_to)
    graphs = runner.decode_cuda_graph_runner
    if captured(runner) and not capture:
        graphs = runner.eager_runner
    elif captured(runner):
        graphs = runner._decode_cuda_graph_runner_cls()(
            runner,
            attn_backend=backend,
            speculative_num_steps=get_spec().speculative_num_steps,
            speculative_num_draft_tokens=width,
        )
    return {"attn_backend": backend, "decode_cuda_graph_runner": graphs}


def target_state(worker: Any, width: int, capture: bool = True) -> RunnerState:
    """The target's backend and, if told to capture, graph of ``width`` rows a request."""
    runner = worker.target_worker.model_runner
    with _settings(width):
        room = capture and _room_for_graph(
            worker, runner, f"width {width} verifies without a CUDA graph"
        )
        return _build(runner, width, capture=room)


def _room_for_graph(worker: Any, runner: Any, otherwise: str) -> bool:
    """Whether there is memory for what the block's graphs took once more; alike on all ranks.

    SGLang asks for ``LEAST_FREE`` of the drafter's whole block; its own reserve is for one width's
    graphs. Seams: ``SpecTpSync.available_memory_gb``, as ``DFlashWorkerV2.init_cuda_graphs`` asks
    it; ``ModelRunner.graph_memory_usage``.
    """
    if not (is_cuda() and captured(runner)):
        return True
    group, taken = get_parallel().tp_group, sum(runner.graph_memory_usage.values())
    if group.world_size > 1:
        taken = max(group.all_gather_object(taken))
    free = worker._tp_sync.available_memory_gb(
        SpecTpSyncSite.DFLASH_MEM, worker.device, worker.gpu_id, group=group
    )
    if free < LEAST_FREE + taken:
        logger.warning(
            "HYPERDFLASH: %s: %.2f GB of GPU memory are free, the block's graphs took %.2f. Lower "
            "--mem-fraction-static or --cuda-graph-max-bs-decode, or name fewer widths.",
            otherwise,
            free,
            taken,
        )
    return free >= LEAST_FREE + taken


def capture_draft(worker: Any) -> None:
    """Capture the drafter's whole block once more, if it has a graph and there is memory.

    The old one is as good wherever weights were written in place. Its sampler's hook stays.
    Seam: ``ModelRunner.init_decode_cuda_graph``, in the contexts of
    ``DFlashWorkerV2.init_cuda_graphs``.
    """
    runner = worker.draft_model_runner
    if captured(runner) and _room_for_graph(worker, runner, "the drafter keeps its old graphs"):
        with (
            worker._own_context(),
            draft_pp_context(),
            draft_tp_context(worker.draft_parallel_layout),
        ):
            runner.init_decode_cuda_graph()


def draft_state(worker: Any, width: int) -> RunnerState:
    """The drafter's; the worker's width is ``width``, its sampler is captured with the graph.

    Without memory for a graph the width drafts eagerly, and the worker has no sampler.
    """
    runner = worker.draft_model_runner
    hooks = runner.capture_tail_hooks
    runner.capture_tail_hooks = []
    try:
        with (
            _settings(width),
            worker._own_context(),
            draft_tp_context(worker.draft_parallel_layout),
        ):
            capture = _room_for_graph(worker, runner, f"width {width} drafts without a CUDA graph")
            if not capture:
                worker._draft_sampler = None
            if worker._draft_sampler is not None:
                hook = make_draft_sampler_capture_hook(worker._draft_sampler)
                runner.capture_tail_hooks.append(hook)
            # A wide round may have just moved a request past its context's end.
            return _build(runner, width, bound_to=worker.block, capture=capture)
    finally:
        runner.capture_tail_hooks = hooks
