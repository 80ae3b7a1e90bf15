"""A server that has timed its rounds is one that has timed nothing, but for its width policy."""

from __future__ import annotations

import json

import pytest

from sglang_hyperdflash.serving.draft_kv.size import POOL_RATIO
from sglang_hyperdflash.serving.scheduler.metrics import REQUESTS, SECONDS
from sglang_hyperdflash.serving.width.settings import FULL, WIDTH, WIDTHS
from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from tests.engine.conftest import FP32, greedy_all, ids, install_plugin
from tests.engine.drafters import with_window
from tests.engine.test_exact import sampled, tokens_of
from tests.engine.test_metrics import samples

# Writes what a scheduler and its worker know when everything is built, before any request.
STATE = """
import hashlib
import json
import os


def digest(tensor):
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def used(pool):
    # Buffers of K and of V that hold anything in a slot other than 0.
    return sum(int(b[1:].abs().float().sum() > 0) for b in (*pool.k_buffer, *pool.v_buffer))


def write(result, self):
    import torch

    worker, pool = self.draft_worker, self.req_to_token_pool
    control = worker.width_control
    window = getattr(worker.draft_kv, "window", None)
    found = {
        "row tokens": int(pool.req_to_token.abs().sum()),
        "free rows": list(pool.free_slots),
        "row generations": pool.req_generation.tolist(),
        "free slots": self.token_to_kv_pool_allocator.available_size(),
        "free pages": digest(self.token_to_kv_pool_allocator.free_pages),
        "target layers with K/V": used(self.token_to_kv_pool_allocator.get_kvcache()),
        "draft layers with K/V": 0 if window else used(worker.draft_model_runner.token_to_kv_pool),
        "window": int((window.slot_of >= 0).sum()) if window else 0,
        "seeds drawn": worker.request_state.seeds.drawn,
        "requests": repr(worker.request_state.current),
        "draft temperature": digest(worker.drafter.draft_temperature.accepted),
        "counts": "counts" in vars(worker.request_state),
        "widths": [worker.lanes.active.width, worker._last_width],
        "random": digest(torch.get_rng_state()),
        "forced": control.forced,
        "trials": sum(sum(kind.trials) for kind in control.policy.classes) if control.policy else 0,
    }
    with open(os.environ["TIMING_STATE_FILE"], "w") as file:
        json.dump(found, file)
    return result


def time_two_sizes():
    # However slow: a server stops after ten seconds.
    from sglang_hyperdflash.serving.width import timing

    timing.LIMIT, timing.sizes_up_to = float("inf"), lambda most: [1, 4]


def load():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang_hyperdflash.seams import when_imported

    when_imported("sglang_hyperdflash.serving.width.timing", time_two_sizes)
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.init_rank_consensus_checker", write, HookType.AFTER
    )
"""


@pytest.mark.parametrize("drafter", ["full", pytest.param("windowed", marks=pytest.mark.slow)])
def test_timing_leaves_nothing_but_the_table(
    servers, target_dir, drafter_dir, own_prompts, own_reference, tmp_path, drafter
):
    draft, environment = drafter_dir, install_plugin(tmp_path, "state", STATE)
    arguments = (*FP32, "--enable-metrics", "--random-seed", "7")
    if drafter == "windowed":
        draft = with_window(drafter_dir, tmp_path / "narrow", 32)
        arguments = (*arguments, "--max-running-requests", "8")
        environment[POOL_RATIO] = "0.0068"
    states, seeded = [], []
    for width in ("adaptive", FULL):
        file, name = tmp_path / f"{width}.json", f"timing-{drafter}-{width}"
        environment |= {"TIMING_STATE_FILE": str(file), WIDTH: width, WIDTHS: "1,2,4,7"}
        options = (*arguments, *hyperdflash_arguments(draft))
        server = servers.get(name, target_dir, *options, environment=environment)
        try:
            timed = {int(dict(labels)[REQUESTS]) for labels in samples(server, SECONDS)}
            assert timed == ({1, 4} if width != FULL else set())
            assert ids(greedy_all(server, own_prompts[:6], 4)) == own_reference[:6]
            seeded.append(tokens_of(server, own_prompts[:8], [sampled(i) for i in range(8)], 4))
        finally:
            servers.stop(name)
        states.append(json.loads(file.read_text()))
    assert states[0] == states[1]
    assert states[0]["row tokens"] == states[0]["target layers with K/V"] == 0
    assert seeded[0] == seeded[1]
