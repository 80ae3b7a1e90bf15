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


def manager(algorithm: str) -> SimpleNamespace:
    """A scheduler's part that updates weights, with a draft worker."""

    def runners(role: str):
        return lambda: [(role, f"runner of the {role}")]

    runner = SimpleNamespace(spec_algorithm=SimpleNamespace(name=algorithm))
    return SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=runner, weight_update_runners=runners("target")),
        draft_worker=SimpleNamespace(weight_update_runners=runners("draft")),
    )


@pytest.mark.parametrize(
    ("algorithm", "selected", "roles"),
    [
        (ALGORITHM, (), ["target"]),
        (ALGORITHM, ("all",), ["target"]),
        (ALGORITHM, ("target",), ["target"]),
        (ALGORITHM, ("draft",), ["draft"]),
        ("EAGLE", (), ["target", "draft"]),
        ("DFLASH", ("all",), ["target", "draft"]),
    ],
)
def test_an_update_reaches_the_target_alone_and_other_algorithms_as_ever(
    algorithm, selected, roles
):
    found = target_by_default(original("_select_runners"), manager(algorithm), *selected)
    assert [role for role, _ in found] == roles


@pytest.mark.parametrize(
    ("algorithm", "action", "selector", "roles", "stops"),
    [
        (ALGORITHM, "checksum", "all", ["target", "draft"], 0),
        (ALGORITHM, "snapshot", "target", ["target"], 0),
        (ALGORITHM, "compare", "all", ["target", "draft"], 0),
        (ALGORITHM, "reset_tensors", "all", ["target"], 1),
        (ALGORITHM, "reset_tensors", "draft", ["draft"], 0),
        ("EAGLE", "checksum", "all", ["target", "draft"], 0),
        ("EAGLE", "reset_tensors", "all", ["target", "draft"], 0),
    ],
)
def test_looking_at_weights_ends_no_recording(
    monkeypatch, algorithm, action, selector, roles, stops
):
    looked, stopped = [], []

    def runners(role: str):
        return lambda: [(role, SimpleNamespace(check_weights=lambda **at: looked.append(at)))]

    updates = manager(algorithm)
    updates.tp_worker.weight_update_runners = runners("target")
    updates.draft_worker.weight_update_runners = runners("draft")
    if algorithm == ALGORITHM:
        updates.draft_worker.recorder = SimpleNamespace(stop=stopped.append)
    updates._select_runners = partial(target_by_default, original("_select_runners"), updates)
    updates.tp_cpu_group = None
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)
    request = CheckWeightsReqInput(action=action, selector=selector)
    assert read_what_is_selected(original("check_weights"), updates, request).success
    assert [(at["role"], at["action"]) for at in looked] == [(role, action) for role in roles]
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

    def original(self, *given):
        asked.append(given)
        return True, "done"

    done, message = keep_graphs(original, updater, "folder", "auto", recapture_cuda_graph=True)
    assert done == (algorithm != ALGORITHM) == bool(asked)
    assert done or "recapture_cuda_graph" in message
    assert keep_graphs(original, updater, "folder", "auto") == (True, "done")
    assert asked[-1] == ("folder", "auto", None, False)
    # Without graphs there is nothing to refuse.
    runner.decode_cuda_graph_runner = "eager"
    assert keep_graphs(original, updater, "folder", "auto", None, True) == (True, "done")
    assert asked[-1] == ("folder", "auto", None, True)
