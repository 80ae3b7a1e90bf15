"""Progress of a training run: a terminal bar, and TensorBoard scalars next to the state."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sglang_hyperdflash.tools.atomic import write_failed


class Monitor:
    """Called after every step; a context manager. Only the main process shows and writes.

    The bar gives loss, accuracy of the first and of all drafted positions, answer tokens per
    second and the simulated tau of the last checkpoint, once there is one.
    """

    def __init__(self, trainer, title: str) -> None:
        self.title, self.active = title, trainer.world.is_main
        self.writer = self.bar = None
        if not self.active:
            return
        self.writer = _scalar_file(trainer.folder / "tensorboard", trainer.state["step"])
        total = trainer.recipe.steps
        self.bar = tqdm(total=total, initial=trainer.state["step"], desc=title, unit="step")
        self.then = time.monotonic()

    def __call__(self, trainer, report: dict[str, Any]) -> None:
        if not self.active:
            return
        now, step = time.monotonic(), trainer.state["step"]
        hits, rows = report["hits"], report["rows"].clamp(min=1)
        accuracy = hits / rows
        tokens = sum(trainer.train.samples[i].answer_tokens for i in trainer.passes.batch(step - 1))
        rate = tokens / max(now - self.then, 1e-9)
        self.then = now
        tau = trainer.state.get("tau")
        self.bar.update(1)
        self.bar.set_postfix(
            loss=f"{report['loss']:.3f}",
            first=f"{accuracy[0].item():.2f}",
            all=f"{(hits.sum() / rows.sum()).item():.2f}",
            tokens_s=f"{rate:.0f}",
            **({} if tau is None else {"tau": f"{tau:.2f}"}),
        )
        if self.writer is None:
            return
        scalars = {f"train/{name}": report[name] for name in trainer.losses}
        for k, value in enumerate(accuracy.tolist(), 1):
            scalars[f"position_accuracy/{k}"] = value
        scalars["train/answer_tokens_per_second"] = rate
        scalars["train/learning_rate"] = trainer.optimizer.param_groups[0]["lr"]
        if tau is not None:
            scalars["held_out/tau"] = tau
        self.writer.add(scalars, step)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_exception) -> None:
        if self.active:
            self.bar.close()
            if self.writer is not None:
                self.writer.close()


class ScalarFile:
    """Scalars of a run in TensorBoard's own file format, each written at once.

    TensorBoard's writer has a thread of its own, which ends with a traceback on a full disk.

    Args:
        folder: where TensorBoard looks. step: what an earlier run wrote from here on is void.

    Raises:
        ImportError: TensorBoard is not installed.
        WriteFailed: the disk is full or the place cannot be written; so does :meth:`add`.
    """

    def __init__(self, folder: Path, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import scalar

        self.event, self.scalar = Event, scalar
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self.path = folder / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = self.path.open("wb", buffering=0)
        except OSError as error:
            raise write_failed(self.path, error) from error
        self.records = RecordWriter(self.file)
        self._write(Event(file_version="brain.Event:2"))
        self._write(Event(step=step, session_log=SessionLog(status=SessionLog.START)))

    def add(self, scalars: dict[str, float], step: int) -> None:
        """One step's values by name."""
        for name, value in scalars.items():
            self._write(self.event(step=step, summary=self.scalar(name, value)))

    def close(self) -> None:
        """Close the file; all is written."""
        self.file.close()

    def _write(self, event) -> None:
        event.wall_time = time.time()
        try:
            self.records.write(event.SerializeToString())
        except OSError as error:
            raise write_failed(self.path, error) from error


def _scalar_file(folder: Path, step: int) -> ScalarFile | None:
    """TensorBoard's scalars, going on after a step; None, said in one line, without the library."""
    try:
        return ScalarFile(folder, step)
    except ImportError:
        print("no TensorBoard scalars: pip install 'sglang-hyperdflash[train]' brings them")
        return None
