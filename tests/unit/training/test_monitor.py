"""A run's scalars: what TensorBoard and W&B receive, what a full disk and a missing package do."""

import errno
import json
import resource
import signal
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from sglang_hyperdflash.tools.atomic import WriteFailed
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.monitor import Monitor, TensorBoard, check_reporters
from sglang_hyperdflash.training.recipe import Recipe
from sglang_hyperdflash.training.trainer import Trainer


def trainer_at(folder, step: int = 0, main: bool = True):
    """What a monitor reads of a trainer."""
    trainer = SimpleNamespace(
        folder=folder,
        state={"step": step},
        records=[],
        recipe=Recipe(steps=5),
        losses=("loss", "ce"),
        world=SimpleNamespace(is_main=main),
        optimizer=SimpleNamespace(param_groups=[{"lr": 0.5}]),
    )
    trainer.measured = lambda: Trainer.measured(trainer)
    return trainer


def report(loss: float):
    counts = {"hits": torch.tensor([3, 1]), "rows": torch.tensor([4, 4]), "tokens": 7}
    return {"loss": loss, "ce": loss, "gradient_norm": 0.25, "data_wait": 0.125, **counts}


def read(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {
        name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]
    }


def monitored(trainer, losses: dict[int, float], report_to=("tensorboard",)) -> None:
    with Monitor(trainer, "stage 1", report_to) as monitor:
        for step, loss in losses.items():
            trainer.state["step"] = step
            monitor(trainer, report(loss))


def test_tensorboard_reads_every_step(tmp_path):
    trainer = trainer_at(tmp_path)
    with Monitor(trainer, "stage 1", ("tensorboard",)) as monitor:
        for step, loss in {1: 2.5, 2: 1.5}.items():
            trainer.state["step"] = step
            monitor(trainer, report(loss))
            held_out = {"own": {"tau": 1.5 * step, "position_acceptance": [0.5]}}
            trainer.records.append({"step": step, "tau": 1.25 * step, "held_out": held_out})
    found = read(tmp_path)
    assert found["train/loss"] == [(1, 2.5), (2, 1.5)]
    # Found as: the tau of the last checkpoint was in no scalar.
    assert found["held_out/tau"] == [(1, 1.25), (2, 2.5)]
    assert found["held_out/own/tau"] == [(1, 1.5), (2, 3.0)]
    assert found["position_accuracy/1"][0] == (1, 0.75)
    assert found["position_accuracy/2"][0] == (1, 0.25)
    assert found["train/learning_rate"] == [(1, 0.5), (2, 0.5)]
    assert found["train/gradient_norm"] == [(1, 0.25), (2, 0.25)]
    assert found["train/data_wait_seconds"] == [(1, 0.125), (2, 0.125)]
    assert all(rate > 0 for _, rate in found["train/answer_tokens_per_second"])


def test_a_resumed_run_purges_the_steps_that_it_repeats(tmp_path):
    monitored(trainer_at(tmp_path), {1: 1.0, 2: 2.0, 3: 3.0})
    monitored(trainer_at(tmp_path, step=2), {3: 30.0})
    assert read(tmp_path)["train/loss"] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_only_the_main_process_writes(tmp_path):
    monitored(trainer_at(tmp_path, main=False), {1: 1.0})
    monitored(trainer_at(tmp_path), {1: 1.0}, report_to=("none",))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_error_with_the_path(tmp_path, capfd):
    """Found as: a thread's traceback, and an error without a path."""
    reporter = TensorBoard(trainer_at(tmp_path), "stage 1")
    reporter.log({"train/loss": 1.0}, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        with pytest.raises(WriteFailed, match=rf"cannot write {tmp_path}/tensorboard: ") as caught:
            reporter.log({"train/loss": 1.0}, 2)
        reporter.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.__cause__.errno == errno.EFBIG
    assert "Traceback" not in capfd.readouterr().err


def test_the_errors_of_other_threads_are_not_hidden(tmp_path, monkeypatch):
    """Found as: an OSError of any thread of the process disappeared, even after the run."""
    seen = []
    monkeypatch.setattr(threading, "excepthook", lambda thread: seen.append(thread.exc_type))
    monitored(trainer_at(tmp_path), {1: 1.0})
    thread = threading.Thread(target=(tmp_path / "none").read_bytes)
    thread.start()
    thread.join()
    assert seen == [FileNotFoundError]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "tensorboard").write_text("a file")
    with pytest.raises(WriteFailed, match=r"cannot write .*tensorboard"):
        TensorBoard(trainer_at(tmp_path), "stage 1")


def test_a_missing_package_is_refused_before_any_work(monkeypatch):
    check_reporters(("none",))
    monkeypatch.setattr(sys, "path", [])
    sys.modules.pop("wandb", None)
    with pytest.raises(HyperDFlashConfigError, match=r"wandb is not installed. Run `pip install"):
        check_reporters(("none", "wandb"))


class FakeRun:
    """A W&B run that records what it receives."""

    def __init__(self, **options) -> None:
        self.options, self.logged, self.finished = options, [], False

    def log(self, scalars, step) -> None:
        self.logged.append((step, scalars["train/loss"]))

    def finish(self) -> None:
        self.finished = True


def test_wandb_receives_every_step_and_a_resumed_training_its_run(tmp_path, monkeypatch):
    runs = []

    class Error(Exception):
        pass

    def init(**options):
        runs.append(FakeRun(**options))
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=Error))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    (tmp_path / ".hyperdflash.json").write_text(json.dumps({"run_id": "ab12"}))
    for step in (0, 1):
        trainer = trainer_at(tmp_path / "stage-1", step)
        monitored(trainer, {step + 1: 2.0 + step}, report_to=("wandb",))
    first, second = runs
    assert first.logged == [(1, 2.0)] and second.logged == [(2, 3.0)] and second.finished
    expected = {"project": "hyperdflash", "id": "ab12-stage-1", "group": "ab12", "resume": "allow"}
    assert expected.items() <= first.options.items() and first.options["id"] == second.options["id"]
    assert first.options["config"]["steps"] == 5

    def fail(**_options):
        raise Error("no API key")

    monkeypatch.setattr(sys.modules["wandb"], "init", fail)
    with pytest.raises(HyperDFlashConfigError, match=r"does not start: no API key. Run `wandb lo"):
        monitored(trainer_at(tmp_path / "stage-1"), {}, report_to=("wandb",))
