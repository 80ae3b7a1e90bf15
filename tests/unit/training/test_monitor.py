"""A run's scalars: what TensorBoard and W&B receive, and what a full disk does."""

import json
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from sglang_hyperdflash.tools.atomic import WriteFailed
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.monitor import Monitor, TensorBoard
from sglang_hyperdflash.training.recipe import Recipe
from sglang_hyperdflash.training.trainer import Trainer
from tests.unit.training.store.small import files_of


def trainer_at(folder, step: int = 0, main: bool = True):
    """What a monitor reads of a trainer."""
    trainer = SimpleNamespace(folder=folder, records=[], losses=("loss", "ce"))
    trainer.recipe, trainer.state = Recipe(steps=5), {"step": step}
    trainer.world = SimpleNamespace(is_main=main)
    trainer.measured = lambda: Trainer.measured(trainer)
    return trainer


def monitored(trainer, losses: dict[int, float], report_to=("tensorboard",)) -> None:
    """Steps of these losses, each with a checkpoint."""
    counts = {"hits": [3, 1], "rows": [4, 4], "tokens": 7, "parts": {"data": 0.125}}
    with Monitor(trainer, "stage 1", report_to) as monitor:
        for step, loss in losses.items():
            trainer.state["step"] = step
            report = {"step": step - 1, "loss": loss, "ce": loss, "gradient_norm": 0.25, "lr": 0.5}
            monitor(trainer, report | counts)
            held_out = {"own": {"tau": 1.5 * step, "position_acceptance": [0.5]}}
            trainer.records.append({"step": step, "tau": 1.25 * step, "held_out": held_out})


def test_tensorboard_has_every_step_once(tmp_path):
    """A resumed run purges those that it repeats."""
    monitored(trainer_at(tmp_path), {1: 2.5, 2: 1.5, 3: 1.0})
    monitored(trainer_at(tmp_path, step=2), {3: 30.0})
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    names = events.Tags()["scalars"]
    scalars = {name: [(e.step, e.value) for e in events.Scalars(name)] for name in names}
    assert scalars["train/loss"] == [(1, 2.5), (2, 1.5), (3, 30.0)]
    assert scalars["held_out/tau"] == [(1, 1.25), (2, 2.5), (3, 3.75)]
    assert scalars["held_out/own/tau"][-1] == (3, 4.5)
    assert scalars["position_accuracy/1"][0] == (1, 0.75)
    constant = {"train/learning_rate": 0.5, "train/gradient_norm": 0.25, "seconds/data": 0.125}
    for name, value in constant.items():
        assert scalars[name] == [(step, value) for step in (1, 2, 3)]
    assert all(rate > 0 for _, rate in scalars["train/answer_tokens_per_second"])


def test_only_the_main_process_writes(tmp_path):
    monitored(trainer_at(tmp_path, main=False), {1: 1.0})
    monitored(trainer_at(tmp_path), {1: 1.0}, report_to=("none",))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_and_a_place_that_is_a_file_are_named(tmp_path):
    reporter = TensorBoard(trainer_at(tmp_path / "full"), "stage 1")
    with files_of(64), pytest.raises(WriteFailed, match="full/tensorboard: "):
        reporter.log({"train/loss": 1.0}, 2)
    (tmp_path / "tensorboard").write_text("a file")
    with pytest.raises(WriteFailed, match=f"{tmp_path}/tensorboard: "):
        TensorBoard(trainer_at(tmp_path), "stage 1")


def test_wandb_receives_every_step_and_a_resumed_training_its_run(tmp_path, monkeypatch):
    refused, runs = type("Error", (Exception,), {}), (Mock(), Mock())
    init = Mock(side_effect=[*runs, refused("no API key")])
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=refused))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    (tmp_path / ".hyperdflash.json").write_text(json.dumps({"run_id": "ab12"}))
    for step, run in enumerate(runs):
        monitored(trainer_at(tmp_path / "stage-1", step), {step + 1: 2.0 + step}, ("wandb",))
        (scalars,), options = run.log.call_args_list[0]
        assert (options["step"], scalars["train/loss"]) == (step + 1, 2.0 + step)
        run.finish.assert_called_once()
    expected = {"project": "hyperdflash", "id": "ab12-stage-1", "group": "ab12", "resume": "allow"}
    for call in init.call_args_list:
        assert expected.items() <= call.kwargs.items() and call.kwargs["config"]["steps"] == 5
    with pytest.raises(HyperDFlashConfigError, match="no API key"):
        monitored(trainer_at(tmp_path / "stage-1"), {}, ("wandb",))
