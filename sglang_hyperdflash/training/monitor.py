"""Progress of a training run: a bar on the terminal and TensorBoard scalars beside the state."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tqdm import tqdm


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
        self.writer = _scalar_writer(trainer.folder / "tensorboard", trainer.state["step"])
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
        for name in ("loss", "ce", trainer.objective.term):
            self.writer.add_scalar(f"train/{name}", report[name], step)
        for k, value in enumerate(accuracy.tolist(), 1):
            self.writer.add_scalar(f"position_accuracy/{k}", value, step)
        self.writer.add_scalar("train/answer_tokens_per_second", rate, step)
        self.writer.add_scalar("train/learning_rate", trainer.optimizer.param_groups[0]["lr"], step)
        if tau is not None:
            self.writer.add_scalar("held_out/tau", tau, step)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_exception) -> None:
        if self.active:
            self.bar.close()
            if self.writer is not None:
                self.writer.close()


def _scalar_writer(folder: Path, step: int):
    """TensorBoard's writer, going on after a step; None, said in one line, without the library."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("no TensorBoard scalars: pip install 'sglang-hyperdflash[train]' brings them")
        return None
    return SummaryWriter(str(folder), purge_step=step)
