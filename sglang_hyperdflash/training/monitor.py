"""Progress of a training run: a terminal bar, and scalars for TensorBoard or Weights & Biases."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Collection
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from tqdm import tqdm

from sglang_hyperdflash.tools.atomic import write_failed
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.ownership import MANIFEST


class Monitor:
    """Called with every step's report, when the next step has begun; a context manager. Only the
    main process shows and writes.

    The bar gives loss, accuracy of the first and of all drafted positions, answer tokens per
    second and the simulated tau of the last checkpoint, once there is one.

    Args:
        profile: steps to trace into ``profile`` of the trainer's folder, after the first five.
    """

    def __init__(
        self, trainer, title: str, report_to: Collection[str] = ("none",), profile: int = 0
    ) -> None:
        step, total = trainer.state["step"], trainer.recipe.steps
        main = trainer.world.is_main
        names = [name for name in report_to if main and name in REPORTERS]
        self.reporters = [REPORTERS[name](trainer, title) for name in names]
        self.bar = tqdm(total=total, initial=step, desc=title, unit="step", disable=not main)
        self.then = time.monotonic()
        self.trainer = trainer
        self.profiler = None
        if main and profile:
            from torch.profiler import profile as torch_profile
            from torch.profiler import schedule, tensorboard_trace_handler

            self.profiler = torch_profile(
                schedule=schedule(wait=4, warmup=1, active=profile, repeat=1),
                on_trace_ready=tensorboard_trace_handler(str(trainer.folder / "profile")),
            )
        # A kill may have come between a checkpoint and the step that shows it.
        self.shown = max((r["step"] for r in trainer.records if r["step"] < step), default=0)

    def __call__(self, trainer, report: dict[str, Any]) -> None:
        self._show_checkpoint()
        if self.profiler is not None:
            self.profiler.step()
        now, step = time.monotonic(), report["step"] + 1
        pairs = zip(report["hits"], report["rows"], strict=True)
        accuracy = [hits / max(rows, 1) for hits, rows in pairs]
        rate = report["tokens"] / max(now - self.then, 1e-9)
        self.then = now
        measured = trainer.measured()
        self.bar.update(1)
        self.bar.set_postfix(
            loss=f"{report['loss']:.3f}",
            first=f"{accuracy[0]:.2f}",
            all=f"{sum(report['hits']) / max(sum(report['rows']), 1):.2f}",
            tokens_s=f"{rate:.0f}",
            **{name: f"{value:.4g}" for name, value in measured.items()},
        )
        scalars = {f"train/{name}": float(report[name]) for name in trainer.losses}
        scalars |= {f"position_accuracy/{k}": v for k, v in enumerate(accuracy, 1)}
        scalars["train/answer_tokens_per_second"] = rate
        scalars["train/gradient_norm"] = report["gradient_norm"]
        scalars |= {f"seconds/{part}": spent for part, spent in report["parts"].items()}
        scalars["train/learning_rate"] = report["lr"]
        for reporter in self.reporters:
            reporter.log(scalars, step)

    def _show_checkpoint(self) -> None:
        """Report the taus of the last checkpoint, once."""
        record = self.trainer.records[-1] if self.trainer.records else {"step": 0}
        if record["step"] <= self.shown:
            return
        self.shown = record["step"]
        scalars = {
            f"held_out/{name}/{kind}": found[kind]
            for name, found in record["held_out"].items()
            for kind in ("tau", "tau_sampled")
            if kind in found
        }
        scalars |= {f"held_out/{name}": v for name, v in self.trainer.measured().items()}
        for reporter in self.reporters:
            reporter.log(scalars, self.shown)

    def __enter__(self) -> Monitor:
        if self.profiler is not None:
            self.profiler.start()
        return self

    def __exit__(self, failure, *_exception) -> None:
        self.bar.close()
        if self.profiler is not None:
            self.profiler.stop()
        try:
            if failure is None:
                self._show_checkpoint()
        finally:
            for reporter in self.reporters:
                reporter.close()


class TensorBoard:
    """Scalars in ``tensorboard/`` of the trainer's folder; steps that a resumed run repeats are
    purged.

    torch's ``SummaryWriter`` has a thread, which would print a full disk's error as a traceback.
    This and :meth:`log` raise ``WriteFailed``.
    """

    def __init__(self, trainer, _title: str) -> None:
        # Files are read in the order of their names.
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self.path = trainer.folder / "tensorboard" / name
        self._write(file_version="brain.Event:2")
        self._write(step=trainer.state["step"] + 1, session_log={"status": "START"})

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                RecordWriter(file).write(Event(wall_time=time.time(), **fields).SerializeToString())
        except OSError as error:
            raise write_failed(self.path.parent, error) from error

    def log(self, scalars: dict[str, float], step: int) -> None:
        values = [{"tag": name, "simple_value": value} for name, value in scalars.items()]
        self._write(step=step, summary={"value": values})

    def close(self) -> None:
        """Every event is in the file."""


class WandB:
    """Scalars as a run of Weights & Biases for each stage; a resumed training resumes its runs.

    Raises:
        HyperDFlashConfigError: W&B does not start.
    """

    def __init__(self, trainer, title: str) -> None:
        import wandb

        run = json.loads((trainer.folder.parent / MANIFEST).read_bytes())["run_id"]
        try:
            self.run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "hyperdflash"),
                dir=str(trainer.folder),
                id=f"{run}-{trainer.folder.name}",
                group=run,
                name=title,
                config=asdict(trainer.recipe),
                resume="allow",
            )
        except wandb.Error as error:
            raise HyperDFlashConfigError(
                f"Weights & Biases does not start: {str(error).rstrip('.')}. Run `wandb login`, "
                "set WANDB_MODE=offline, or remove wandb from report_to."
            ) from error

    def log(self, scalars: dict[str, float], step: int) -> None:
        self.run.log(scalars, step=step)

    def close(self) -> None:
        self.run.finish()


REPORTERS = {"tensorboard": TensorBoard, "wandb": WandB}


def check_reporters(report_to: Collection[str]) -> None:
    """Raise ``HyperDFlashConfigError`` where a reporter's package is not installed."""
    for name in (name for name in report_to if name in REPORTERS):
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a plain folder of that name has no origin
            raise HyperDFlashConfigError(
                f"report_to: the package {name} is not installed. Run `pip install {name}`, or "
                'set report_to = ["none"].'
            )
