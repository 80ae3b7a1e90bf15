"""The training loop of a drafter: one process or many, exactly resumable, best-by-tau."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.objective import Blocks, Objective, denominators, sums
from sglang_hyperdflash.training.packing import first_fit, pack
from sglang_hyperdflash.training.process_group import ProcessGroup
from sglang_hyperdflash.training.replay import Replay
from sglang_hyperdflash.training.samples import Passes, Rows, Source, States, collate


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of one stage; ``steps`` or ``minutes`` is its length.

    batch: samples of the global batch; micro_batch: samples in memory at a time, per process;
    anchors: blocks a sample; pack: tokens of a row that short samples are packed into, None for
    one sample a row; every: steps between checkpoints.
    """

    steps: int | None = None
    minutes: float | None = None
    lr: float = 2e-3
    lr_floor: float = 2e-5
    warmup_steps: int = 50
    weight_decay: float = 0.0
    clip: float = 1.0
    batch: int = 8
    micro_batch: int = 8
    anchors: int = 32
    pack: int | None = None
    every: int = 400
    bf16: bool = True
    seed: int = 0
    objective: Objective = field(default_factory=Objective)

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise HyperDFlashConfigError("a recipe needs steps or minutes, and not both.")
        positive = (
            "steps",
            "minutes",
            "lr",
            "batch",
            "micro_batch",
            "anchors",
            "every",
            "clip",
            "pack",
        )
        for name in positive:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise HyperDFlashConfigError(f"recipe.{name} must be above 0, found {value!r}.")


class Trainer:
    """Trains ``drafter`` on a source of target states; ``folder`` holds its state and its log.

    Every step's samples, anchors and learning rate follow from the recipe and the step's number
    alone (with ``minutes`` the learning rate follows the clock), so a killed run that resumes
    from ``state.pt`` ends with the weights of one that was never killed.
    """

    def __init__(
        self,
        drafter: Drafter,
        target,
        train: Source,
        held_out: dict[str, Source],
        recipe: Recipe,
        folder: Path,
        world: ProcessGroup | None = None,
    ) -> None:
        if not train.samples:
            raise HyperDFlashConfigError("there are no training samples.")
        self.drafter, self.target, self.recipe = drafter, target, recipe
        self.train, self.held_out, self.folder = train, held_out, folder
        self.world = world or ProcessGroup()
        self.device = next(drafter.parameters()).device
        self.replay = Replay(drafter, target)
        self.optimizer = _optimizer(drafter, recipe)
        self.state = {"step": 0, "seconds": 0.0, "best_tau": 0.0}
        self.passes = Passes(len(train.samples), recipe.batch, recipe.seed)
        folder.mkdir(parents=True, exist_ok=True)
        self._resume()

    def micro_batches(self, step: int) -> list[tuple[list[int], Rows, Blocks]]:
        """This process's share of a step, cut to the micro batch, with its anchors drawn."""
        indices = self.passes.batch(step)
        seeds = [(self.recipe.seed + 1) * 2**40 + step * 2**16 + i for i in range(len(indices))]
        mine = list(zip(indices, seeds, strict=True))[self.world.rank :: self.world.size]
        block, parts = self.drafter.config.block_size, []
        for start in range(0, len(mine), self.recipe.micro_batch):
            ids, part_seeds = zip(*mine[start : start + self.recipe.micro_batch], strict=True)
            rows = collate([self.train.samples[i] for i in ids])
            blocks = Blocks.draw(rows, self.recipe.anchors, block, list(part_seeds))
            parts.append((list(ids), rows, blocks))
        return parts

    def accumulate(self, step: int) -> dict[str, Any]:
        """Gradients of one global batch, summed over micro batches and processes, and its report.

        Raises:
            FloatingPointError: the loss is not finite; nothing was changed.
        """
        objective = self.recipe.objective
        parts = self.micro_batches(step)
        divide = torch.zeros(2)
        for _, _, blocks in parts:
            divide += denominators(objective, blocks)
        ce_rows, kl_blocks = self.world.sum(divide.to(self.device)).clamp(min=1e-9).tolist()
        drafts = self.drafter.config.num_drafts
        totals = torch.zeros(2 + 2 * drafts, device=self.device)
        for ids, rows, blocks in parts:
            states = self.train.states(ids)
            if self.recipe.pack:
                lengths = [len(self.train.samples[i].tokens) for i in ids]
                plan = first_fit(lengths, self.recipe.pack)
                rows, states, blocks = pack(plan, lengths, rows, states, blocks)
            part = self._sums(rows, states, blocks)
            loss = part.ce / ce_rows + objective.alpha * part.kl / kl_blocks
            if loss.requires_grad:
                loss.backward()
            ce, kl = part.ce.detach() / ce_rows, part.kl.detach() / kl_blocks
            totals += torch.cat([torch.stack([ce, kl]), part.hits, part.rows])
        self.world.sum(totals)
        totals = totals.cpu()
        ce, kl = totals[:2].tolist()
        if not math.isfinite(ce + kl):
            raise FloatingPointError(
                f"the loss is not finite (CE {ce}, KL {kl}) at step {step}; lower the learning "
                f"rate and resume from {self.folder / 'state.pt'}."
            )
        self.world.sum_gradients(self.drafter.parameters())
        hits, rows = totals[2 : 2 + drafts], totals[2 + drafts :]
        return {"ce": ce, "kl": kl, "hits": hits, "rows": rows, "loss": ce + objective.alpha * kl}

    def _sums(self, rows: Rows, states: States, blocks: Blocks):
        rows, states, blocks = (x.to(self.device) for x in (rows, states, blocks))
        kind = self.device.type
        with self.device:  # new tensors are made there too
            with torch.autocast(kind, dtype=torch.bfloat16, enabled=self.recipe.bf16):
                hidden = self.replay.draft_states(rows, states, blocks.anchors, blocks.keep)
            return sums(self.recipe.objective, self.target, rows, states, blocks, hidden)

    def progress(self) -> float:
        """Share of the stage that is done, 0 to 1."""
        if self.recipe.steps is not None:
            return min(1.0, self.state["step"] / self.recipe.steps)
        return min(1.0, self.state["seconds"] / (60 * self.recipe.minutes))

    def learning_rate(self) -> float:
        """Linear warm-up, then a cosine to ``lr_floor``."""
        r = self.recipe
        cosine = r.lr_floor + (r.lr - r.lr_floor) * 0.5 * (1 + math.cos(math.pi * self.progress()))
        return cosine * min(1.0, (self.state["step"] + 1) / r.warmup_steps)

    def step(self) -> dict[str, Any]:
        """One optimizer step."""
        started = time.monotonic()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.optimizer.zero_grad()
        report = self.accumulate(self.state["step"])
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.state["step"] += 1
        spent = torch.tensor([time.monotonic() - started], device=self.device)
        self.state["seconds"] += self.world.sum(spent).item() / self.world.size
        return report

    def run(self, out: Path, display=None) -> dict[str, Any]:
        """Train to the end of the stage; keep the best checkpoint by mean tau in ``out``.

        Args:
            display: called with the trainer and each step's report (a progress bar).

        Returns:
            The last checkpoint's record.
        """
        reports, record = [], {}
        while self.progress() < 1.0:
            reports.append(self.step())
            if display is not None:
                display(self, reports[-1])
            if self.progress() >= 1.0 or self.state["step"] % self.recipe.every == 0:
                record = self._checkpoint(out, reports)
                reports.clear()
        return record

    def _checkpoint(self, out: Path, reports: list[dict[str, Any]]) -> dict[str, Any]:
        record: dict[str, Any] = {}
        if self.world.is_main:
            record = self._record(reports)
            self.state["tau"] = record["tau"]
            if record["tau"] > self.state["best_tau"] or not self.held_out:
                self.state["best_tau"] = record["tau"]
                self.drafter.save(out)
            self._save_state()
            with (self.folder / "training_log.jsonl").open("a") as log:
                log.write(json.dumps(record) + "\n")
        self.world.barrier()
        return record

    def _record(self, reports: list[dict[str, Any]]) -> dict[str, Any]:
        hits = sum(r["hits"] for r in reports)
        rows = sum(r["rows"] for r in reports).clamp(min=1)
        record = {"step": self.state["step"], "minutes": round(self.state["seconds"] / 60, 2)}
        record |= {k: sum(r[k] for r in reports) / len(reports) for k in ("loss", "ce", "kl")}
        record["position_accuracy"] = [round(v, 4) for v in (hits / rows).tolist()]
        held_out = {kind: self.replay.evaluate(source) for kind, source in self.held_out.items()}
        taus = [result["tau"] for result in held_out.values()]
        return record | {"held_out": held_out, "tau": sum(taus) / len(taus) if taus else 0.0}

    def _save_state(self) -> None:
        partial = self.folder / "state.pt.partial"
        content = {
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "state": self.state,
            "recipe": asdict(self.recipe),
        }
        try:
            torch.save(content, partial)
        except (OSError, RuntimeError) as error:
            partial.unlink(missing_ok=True)
            raise OSError(
                f"cannot write {partial}: {error}. The checkpoint before this one is whole; free "
                "space and run the same command to resume from it."
            ) from error
        partial.replace(self.folder / "state.pt")

    def _resume(self) -> None:
        path = self.folder / "state.pt"
        if not path.is_file():
            return
        saved = torch.load(path, weights_only=True, map_location="cpu")
        free = ("steps", "minutes", "every")  # a stage may be lengthened
        mine, theirs = asdict(self.recipe), saved["recipe"]
        changed = [k for k in mine if k not in free and mine[k] != theirs.get(k)]
        if changed:
            raise HyperDFlashConfigError(
                f"{path} was trained with another {', '.join(changed)} "
                f"({', '.join(repr(theirs.get(k)) for k in changed)}); restore it, or choose a new "
                "working folder."
            )
        self.drafter.load_state_dict(saved["drafter"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.state = saved["state"]


def _optimizer(drafter: Drafter, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices only, never on the gate or a norm."""
    matrices, others = [], []
    for name, parameter in drafter.named_parameters():
        chosen = matrices if "_proj." in name or name == "fc.weight" else others
        chosen.append(parameter)
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.95), fused=True)
