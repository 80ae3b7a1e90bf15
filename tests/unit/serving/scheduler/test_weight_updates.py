"""Whose weights an update reaches, in a scheduler of ours and in any other."""

import asyncio
import json
import os
import shutil
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from safetensors.torch import load_file, save_file
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

from sglang_hyperdflash import ALGORITHM
from sglang_hyperdflash.draft.config import load_config
from sglang_hyperdflash.draft.published import DRAFTER_FORMAT, publish
from sglang_hyperdflash.serving.drafting.replace import read_drafter
from sglang_hyperdflash.serving.scheduler import weight_updates
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError


@pytest.mark.parametrize(
    ("algorithm", "action", "selector", "reached", "stops"),
    [
        (ALGORITHM, "checksum", "all", ["target", "draft"], 0),
        (ALGORITHM, "reset_tensors", "all", ["target"], 1),
        (ALGORITHM, "reset_tensors", "draft", ["draft"], 0),
        ("EAGLE", "reset_tensors", "all", ["target", "draft"], 0),
    ],
)
def test_what_an_update_reaches_and_ends(algorithm, action, selector, reached, stops):
    """The target by default; looking at weights ends no recording."""
    recorder = Mock() if algorithm == ALGORITHM else None
    spec = SimpleNamespace(spec_algorithm=SimpleNamespace(name=algorithm))
    target, draft = SimpleNamespace(model_runner=spec), SimpleNamespace(recorder=recorder)
    updates = SimpleNamespace(tp_worker=target, draft_worker=draft)

    def select(_, name: str) -> list[tuple[str, object]]:
        return [(role, None) for role in ("target", "draft") if name in ("all", role)]

    def check(_, asked) -> list[str]:
        selected = weight_updates.target_by_default(select, updates, asked.selector)
        return [role for role, _ in selected]

    request = SimpleNamespace(action=action, selector=selector)
    assert weight_updates.read_what_is_selected(check, updates, request) == reached
    assert recorder is None or recorder.stop.call_count == stops


def updates(algorithm: str, load=None) -> SimpleNamespace:
    """SGLang's updater in a scheduler whose target has captured graphs."""
    runners = {"decode_cuda_graph_runner": "graphs", "eager_runner": "eager"}
    runner = SimpleNamespace(spec_algorithm=SimpleNamespace(name=algorithm), **runners)
    draft = SimpleNamespace(load_drafter=load, draft_model=SimpleNamespace())
    parts = {"tp_worker": SimpleNamespace(model_runner=runner), "draft_worker": draft}
    return SimpleNamespace(**parts, offload_tags=set())


@pytest.fixture
def one_rank(monkeypatch):
    state = SimpleNamespace(enable_dp_attention_local_control_broadcast=False)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: state)
    return state


@pytest.mark.parametrize("algorithm", [ALGORITHM, "EAGLE"])
def test_graphs_are_not_captured_again_where_every_width_has_its_own(algorithm, one_rank):
    load, one = Mock(return_value=SimpleNamespace(success=True)), updates(algorithm)

    def update(recapture: bool) -> bool:
        request = UpdateWeightFromDiskReqInput(model_path="target", recapture_cuda_graph=recapture)
        return weight_updates.load_target_or_drafter(load, one, request).success

    assert update(True) == (algorithm != ALGORITHM) and update(False)
    one.tp_worker.model_runner.decode_cuda_graph_runner = "eager"  # nothing to refuse
    assert update(True) and load.call_count == 2 + (algorithm != ALGORITHM)


def test_a_drafter_reaches_the_draft_alone_and_a_refusal_ends_nothing(one_rank):
    load, target = Mock(), Mock()
    one = updates(ALGORITHM, load)

    def update(load_format: str = DRAFTER_FORMAT, to: SimpleNamespace = one):
        named = {"model_path": "anything", "load_format": load_format, "token_step": 3}
        request = UpdateWeightFromDiskReqInput(**named)
        return weight_updates.load_target_or_drafter(target, to, request)

    assert update().success and load.call_args.args == ("anything", 3)
    load.side_effect = HyperDFlashConfigError("does not fit")
    assert update().message == "does not fit" and not update().success
    one.offload_tags.add("weights")
    assert "released" in update().message
    one.draft_worker.draft_model._derived_weight_cache_error = "quantized"
    assert update().message == "quantized"
    one_rank.enable_dp_attention_local_control_broadcast = True
    assert "local-control" in update().message
    assert not target.called and update("auto") is target.return_value
    assert update(to=updates("EAGLE", load)) is target.return_value


@pytest.mark.parametrize("wrong", [None, "damaged", "refused"])
def test_a_drafter_is_sent_without_sglang_s_lock(tmp_path, drafter_dir, wrong):
    number = publish(tmp_path, drafter_dir)
    folder = tmp_path / f"{number:06}"
    if wrong == "damaged":
        with (folder / "model.safetensors").open("r+b") as file:
            file.seek(-4, 2)
            file.write(b"torn")
    answers = [SimpleNamespace(success=wrong is None, message="refused"), Mock(success=True)]
    manager = SimpleNamespace(
        server_args=SimpleNamespace(speculative_algorithm=ALGORITHM),
        auto_create_handle_loop=Mock(),
        update_weights_from_tensor_communicator=AsyncMock(return_value=answers),
    )
    original = AsyncMock(return_value="SGLang's")

    def send(load_format: str | None) -> Any:
        named = {"model_path": str(folder), "load_format": load_format, "token_step": number}
        request = UpdateWeightFromDiskReqInput(**named)
        return asyncio.run(weight_updates.send_drafter_at_once(original, manager, request))

    success, message, _ = send(DRAFTER_FORMAT)
    assert success == (wrong is None) and (wrong or "replaced") in message
    sent = manager.update_weights_from_tensor_communicator.await_count
    assert sent == (wrong != "damaged") and not original.called
    assert send(None) == "SGLang's"
    manager.server_args.speculative_algorithm = "EAGLE"
    assert send(DRAFTER_FORMAT) == "SGLang's"


@pytest.mark.parametrize("wrong", [None, "layers", "nan", "cut", "gone", "other rank"])
def test_no_rank_replaces_anything_unless_all_can_read_the_drafter(tmp_path, drafter_dir, wrong):
    folder = shutil.copytree(drafter_dir, tmp_path / "draft")
    raw = json.loads((drafter_dir / "config.json").read_text())
    tensors = load_file(drafter_dir / "model.safetensors")
    model = SimpleNamespace(raw_config=raw, hyperdflash_config=load_config(drafter_dir))
    if wrong == "layers":
        (folder / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 2}))
    elif wrong == "nan":
        broken = {"norm.weight": tensors["norm.weight"] / 0}
        save_file(tensors | broken, folder / "model.safetensors")
    elif wrong == "cut":
        os.truncate(folder / "model.safetensors", 4096)
    elif wrong == "gone":  # as where this rank's node has no such folder
        shutil.rmtree(folder)
    other = "rank 1: no such file" if wrong == "other rank" else ""
    if wrong is None:
        given = read_drafter(str(folder), model, lambda said: [said, other])
        assert given.keys() == tensors.keys()
        return
    said: list[str] = []
    with pytest.raises(HyperDFlashConfigError):
        read_drafter(str(folder), model, lambda mine: said.append(mine) or [mine, other])
    assert bool(said[0]) == (wrong != "other rank"), "every rank says what it has"
