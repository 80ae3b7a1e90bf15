"""Whose weights an update reaches, in a scheduler of ours and in any other."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.io_struct import CheckWeightsReqInput
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

from sglang_hyperdflash import ALGORITHM
from sglang_hyperdflash.serving.scheduler.weight_updates import (
    keep_graphs,
    read_what_is_selected,
    target_by_default,
)


def original(name: str):
    """SGLang's own method, which a server's process has wrapped."""
    found = getattr(SchedulerWeightUpdaterManager, name)
    return getattr(found, "__wrapped__", found)


def manager(algorithm: str, looked: list | None = None) -> SimpleNamespace:
    """A scheduler's part that updates weights; what looks at weights is noted."""
    runner = SimpleNamespace(check_weights=lambda **given: looked.append(given))
    spec = SimpleNamespace(spec_algorithm=SimpleNamespace(name=algorithm))
    target, draft = (SimpleNamespace(model_runner=spec) for _ in range(2))
    target.weight_update_runners = lambda: [("target", runner)]
    draft.weight_update_runners = lambda: [("draft", runner)]
    return SimpleNamespace(tp_worker=target, draft_worker=draft, tp_cpu_group=None)


@pytest.mark.parametrize(
    ("algorithm", "action", "selector", "roles", "stops"),
    [
        (ALGORITHM, "checksum", "all", ["target", "draft"], 0),
        (ALGORITHM, "reset_tensors", "all", ["target"], 1),
        (ALGORITHM, "reset_tensors", "draft", ["draft"], 0),
        ("EAGLE", "reset_tensors", "all", ["target", "draft"], 0),
    ],
)
def test_an_update_reaches_the_target_by_default_and_looking_at_weights_ends_no_recording(
    monkeypatch, algorithm, action, selector, roles, stops
):
    looked, stopped = [], []
    updates = manager(algorithm, looked)
    if algorithm == ALGORITHM:
        updates.draft_worker.recorder = SimpleNamespace(stop=stopped.append)
    updates._select_runners = partial(target_by_default, original("_select_runners"), updates)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)
    request = CheckWeightsReqInput(action=action, selector=selector)
    assert read_what_is_selected(original("check_weights"), updates, request).success
    assert [(each["role"], each["action"]) for each in looked] == [(role, action) for role in roles]
    assert len(stopped) == stops


@pytest.mark.parametrize("algorithm", [ALGORITHM, "EAGLE"])
def test_graphs_are_not_captured_again_where_every_width_has_its_own(algorithm):
    asked = []
    runner = SimpleNamespace(
        spec_algorithm=SimpleNamespace(name=algorithm),
        decode_cuda_graph_runner="graphs",
        eager_runner="eager",
    )
    updater = SimpleNamespace(get_model_runner=lambda: runner)

    def update(recapture: bool) -> bool:
        load = lambda self, *given: asked.append(given) or (True, "done")  # noqa: E731
        return keep_graphs(load, updater, "folder", "auto", None, recapture)[0]

    assert update(True) == (algorithm != ALGORITHM) and update(False)
    runner.decode_cuda_graph_runner = "eager"  # without graphs there is nothing to refuse
    assert update(True) and asked[-1] == ("folder", "auto", None, True)
    assert len(asked) == 2 + (algorithm != ALGORITHM)
