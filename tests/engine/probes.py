"""A server plugin that writes down what a server does, each part where its variable is set."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from triton_ops.copies import parts

PLUGIN = "from tests.engine.probes import load  # noqa: F401\n"
# Every verified block, the last positions that models are given, the state after the start.
BLOCKS, POSITIONS, STATE = "TEST_BLOCKS", "TEST_POSITIONS", "TEST_STATE"
FILES = {BLOCKS: "blocks.jsonl", POSITIONS: "positions.json", STATE: "state.json"}
most: dict[str, list[int]] = {}  # positions so far


def record_blocks(self, requests, block, *_) -> None:
    """A line ``[request, position of the anchor, block, copies, drafter's first choices]``."""
    if block.width > 1:
        names = [req.rid for req in requests.reqs]
        rows = (part.tolist() for part in parts(self.copies.rows[: len(names)])[:2])
        lines = zip(
            names, block.positions[:, 0].tolist(), block.tokens.tolist(), *rows, strict=True
        )
        with open(os.environ[BLOCKS], "a") as out:
            out.writelines(json.dumps(line) + "\n" for line in lines)


def record_positions(self, forward_batch, *args, **kwargs) -> None:
    """The last position of the target and of the drafter, and where their K/V then end."""
    if len(forward_batch.positions):
        verifies = forward_batch.forward_mode.is_target_verify()
        rows = getattr(forward_batch.spec_info, "draft_token_num", 0) if verifies else 0
        ends = int(forward_batch.seq_lens.max()) + rows
        name = "drafter" if self.is_draft_worker else "target"
        before = most.get(name, [0, 0])
        most[name] = [max(int(forward_batch.positions.max()), before[0]), max(ends, before[1])]
        if most[name] != before:
            Path(os.environ[POSITIONS]).write_text(json.dumps(most))


def digest(tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def write_state(result, self) -> Any:
    """What a scheduler and its worker know when everything is built, before any request."""
    import torch

    worker, pool = self.draft_worker, self.req_to_token_pool
    allocator = self.token_to_kv_pool_allocator
    control, window = worker.width_control, getattr(worker.draft_kv, "window", None)
    classes = control.policy.classes if control.policy else ()
    found = {
        "rows": [list(pool.free_slots), pool.req_generation.tolist()],
        "slots": [allocator.available_size(), digest(allocator.free_pages)],
        "window": int((window.slot_of >= 0).sum()) if window else 0,
        "seeds drawn": worker.request_state.seeds.drawn,
        "widths": [worker.lanes.active.width, worker._last_width],
        "random": digest(torch.get_rng_state()),
        "forced": control.forced,
        "trials": sum(sum(kind.trials) for kind in classes),
    }
    Path(os.environ[STATE]).write_text(json.dumps(found))
    return result


def time_two_sizes() -> None:
    """However slow: a server stops timing after ten seconds."""
    from sglang_hyperdflash.serving.width import timing

    timing.LIMIT, timing.sizes_up_to = float("inf"), lambda most: [1, 4]


def load() -> None:
    """SGLang's plugin entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_hyperdflash.seams import when_imported

    if BLOCKS in os.environ:
        end = "sglang_hyperdflash.serving.drafting.copies.CopyHistory.end"
        HookRegistry.register(end, record_blocks, HookType.BEFORE)
    if POSITIONS in os.environ:
        run = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
        HookRegistry.register(run, record_positions, HookType.BEFORE)
    if STATE in os.environ:
        when_imported("sglang_hyperdflash.serving.width.timing", time_two_sizes)
        built = "sglang.srt.managers.scheduler.Scheduler.init_rank_consensus_checker"
        HookRegistry.register(built, write_state, HookType.AFTER)
