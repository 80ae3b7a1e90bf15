"""Whose weights an update reaches, in a scheduler of ours and in any other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

from sglang_hyperdflash import ALGORITHM
from sglang_hyperdflash.serving.scheduler.weight_updates import keep_graphs, target_by_default


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
    # The server's process has it wrapped; what is wrapped is SGLang's own.
    original = SchedulerWeightUpdaterManager._select_runners
    original = getattr(original, "__wrapped__", original)
    found = target_by_default(original, manager(algorithm), *selected)
    assert [role for role, _ in found] == roles


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
