"""Whose weights an update reaches, in a scheduler of ours and in any other."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from sglang_hyperdflash import ALGORITHM
from sglang_hyperdflash.serving.scheduler import weight_updates


@pytest.mark.parametrize(
    ("algorithm", "action", "selector", "reached", "stops"),
    [
        (ALGORITHM, "checksum", "all", ["target", "draft"], 0),
        (ALGORITHM, "reset_tensors", "all", ["target"], 1),
        (ALGORITHM, "reset_tensors", "draft", ["draft"], 0),
        ("EAGLE", "reset_tensors", "all", ["target", "draft"], 0),
    ],
)
def test_an_update_reaches_the_target_by_default_and_looking_at_weights_ends_no_recording(
    algorithm, action, selector, reached, stops
):
    recorder = Mock() if algorithm == ALGORITHM else None
    spec = SimpleNamespace(spec_algorithm=SimpleNamespace(name=algorithm))
    target, draft = SimpleNamespace(model_runner=spec), SimpleNamespace(recorder=recorder)
    updates = SimpleNamespace(tp_worker=target, draft_worker=draft)

    def select(_, name: str) -> list[tuple[str, object]]:
        return [(role, None) for role in ("target", "draft") if name in ("all", role)]

    def check(_, request) -> list[str]:
        return [
            role for role, _ in weight_updates.target_by_default(select, updates, request.selector)
        ]

    request = SimpleNamespace(action=action, selector=selector)
    assert weight_updates.read_what_is_selected(check, updates, request) == reached
    assert recorder is None or recorder.stop.call_count == stops


@pytest.mark.parametrize("algorithm", [ALGORITHM, "EAGLE"])
def test_graphs_are_not_captured_again_where_every_width_has_its_own(algorithm):
    load = Mock(return_value=(True, "done"))
    runners = {"decode_cuda_graph_runner": "graphs", "eager_runner": "eager"}
    runner = SimpleNamespace(spec_algorithm=SimpleNamespace(name=algorithm), **runners)
    updater = SimpleNamespace(get_model_runner=lambda: runner)

    def update(recapture: bool) -> bool:
        return weight_updates.keep_graphs(load, updater, "folder", "auto", None, recapture)[0]

    assert update(True) == (algorithm != ALGORITHM) and update(False)
    runner.decode_cuda_graph_runner = "eager"  # without graphs there is nothing to refuse
    assert update(True) and load.call_args.args == (updater, "folder", "auto", None, True)
    assert load.call_count == 2 + (algorithm != ALGORITHM)
