"""The training loop of a drafter: one process or many, exactly resumable, best-by-tau."""

from __future__ import annotations

import json
import math
import time
import zipfile
from pathlib import Path
from typing import Any

import torch

from sglang_hyperdflash.tools.atomic import replacing, write_text
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.drafter import Drafter, write_drafter
from sglang_hyperdflash.training.objective import Blocks, denominators, sums
from sglang_hyperdflash.training.process_group import ProcessGroup
from sglang_hyperdflash.training.recipe import Recipe
from sglang_hyperdflash.training.replay import Replay
from sglang_hyperdflash.training.samples import (
    Passes,
    Rows,
    Source,
    States,
    collate,
    generator_seed,
)
from sglang_hyperdflash.training.vocabulary import bf16_products

STATE, LOG = "state.pt", "training_log.jsonl"
# Steps whose states are read while one computes.
AHEAD = 2


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
        self.drafter, self.target, self.recipe = drafter, target, recipe
        self.objective = recipe.objective.resolved(drafter.config)
        self.losses = ("loss", "ce", self.objective.term)
        if self.objective.candidates:
            self.losses += ("own",)
        self.train, self.held_out, self.folder = train, held_out, folder
        self.world = world or ProcessGroup()
        self.device = next(drafter.parameters()).device
        self.replay = Replay(drafter, target, recipe.bf16)
        self.optimizer = _optimizer(drafter, recipe)
        self.state = {"step": 0, "seconds": 0.0}
        self.records: list[dict[str, Any]] = []
        # The best one's record, with the drafter's served tensors under "tensors".
        self.best: dict[str, Any] = {"step": 0, "tau": 0.0, "score": 0.0}
        self.passes = Passes(train.lengths, recipe.batch, recipe.seed)
        folder.mkdir(parents=True, exist_ok=True)
        self._resume()
        self._check_processes()

    def micro_batches(self, step: int) -> list[tuple[list[int], Rows, Blocks]]:
        """This process's share of a step in micro batches, with anchors drawn."""
        first = (self.recipe.seed + 1) * 2**40 + step * 2**16
        block, parts = self.drafter.config.block_size, []
        for share in self._shares(step):
            places, ids = map(list, zip(*share, strict=True))
            rows = collate([self.train.samples[i] for i in ids])
            seeds = [generator_seed(first + place) for place in places]
            parts.append((ids, rows, Blocks.draw(rows, self.recipe.anchors, block, seeds)))
        return parts

    def _shares(self, step: int) -> list[list[tuple[int, int]]]:
        """This process's micro batches: every sample's place in the global batch, and its index."""
        share = list(enumerate(self.passes.batch(step)))[self.world.rank :: self.world.size]
        size = self.recipe.micro_batch
        return [share[start : start + size] for start in range(0, len(share), size)]

    def _prefetch(self, step: int) -> None:
        """Let the next steps' states be read while this one computes."""
        for ahead in range(step, step + AHEAD + 1):
            for share in self._shares(ahead):
                self.train.prefetch([i for _, i in share])

    def accumulate(self, step: int) -> dict[str, Any]:
        """Gradients of one global batch, summed over micro batches and processes, and its report.

        Raises:
            FloatingPointError: the loss is not finite; no weight was changed.
        """
        objective, term = self.objective, self.objective.term
        self._prefetch(step)
        parts = self.micro_batches(step)
        divide = sum((denominators(objective, part[-1]) for part in parts), torch.zeros(3))
        divide = self.world.sum(divide.to(self.device)).clamp(min=1e-9)
        factors = torch.tensor(objective.factors, device=self.device)
        drafts = self.drafter.config.num_drafts
        totals = torch.zeros(3 + 2 * drafts, device=self.device)
        for ids, rows, blocks in parts:
            states = self.train.states(ids)
            terms, hits, supervised = self._sums(rows, states, blocks)
            terms = terms / divide
            loss = (factors * terms).sum()
            if loss.requires_grad:
                loss.backward()
            totals += torch.cat([terms.detach(), hits, supervised])
        self.world.sum(totals)
        totals = totals.cpu()
        ce, distance, own = totals[:3].tolist()
        if not math.isfinite(ce + distance + own):
            raise FloatingPointError(
                f"the loss is not finite (CE {ce}, {term} {distance}, own {own}) at step {step}. "
                f"Lower the stage's lr, now {self.recipe.lr:g}, and retrain with a new --work "
                "and a new out: a run keeps its lr."
            )
        self.world.sum_gradients(self.drafter.parameters())
        hits, rows = totals[3 : 3 + drafts], totals[3 + drafts :]
        loss = (totals[:3] * factors.cpu()).sum().item()
        return {"loss": loss, "ce": ce, term: distance, "own": own, "hits": hits, "rows": rows}

    def _sums(self, rows: Rows, states: States, blocks: Blocks):
        placed, states = rows.to(self.device), states.to(self.device)
        anchors, keep = blocks.anchors.to(self.device), blocks.keep.to(self.device)
        kind, bf16 = self.device.type, self.recipe.bf16
        with self.device:  # new tensors are made there too
            with torch.autocast(kind, torch.bfloat16, enabled=bf16):
                hidden = self.replay.draft_states(placed, states, anchors, keep)
            with bf16_products(self.device, bf16):
                return sums(self.objective, self.target, rows, states, blocks, hidden, self.drafter)

    def progress(self) -> float:
        """Share of the stage that is done, 0 to 1."""
        if self.recipe.steps is not None:
            return min(1.0, self.state["step"] / self.recipe.steps)
        return min(1.0, self.state["seconds"] / (60 * self.recipe.minutes))

    def learning_rate(self) -> float:
        """Linear warm-up, then a cosine to ``lr_floor``."""
        r = self.recipe
        cosine = r.lr_floor + (r.lr - r.lr_floor) * 0.5 * (1 + math.cos(math.pi * self.progress()))
        return cosine * min(1.0, (self.state["step"] + 1) / max(1, r.warmup_steps))

    def step(self) -> dict[str, Any]:
        """One optimizer step."""
        started = time.monotonic()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate() * group.get("factor", 1.0)
        self.optimizer.zero_grad()
        report = self.accumulate(self.state["step"])
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.state["step"] += 1
        spent = torch.tensor([time.monotonic() - started], device=self.device)
        self.state["seconds"] += self.world.sum(spent).item() / self.world.size
        return report

    def run(self, out: Path, display=None) -> None:
        """Train to the end of the stage; keep the best checkpoint in ``out``.

        Args:
            display: called with the trainer and each step's report (a progress bar).
        """
        reports: list[dict[str, Any]] = []
        self.world.on_main(lambda: self._write_best(out))  # a kill may have come before it
        while self.progress() < 1.0:
            reports.append(self.step())
            if display is not None:
                display(self, reports[-1])
            if self.progress() >= 1.0 or self.state["step"] % self.recipe.every == 0:
                record = self._record(reports)  # all processes replay held-out answers
                self.world.on_main(lambda record=record: self._checkpoint(out, record))
                reports.clear()

    def _checkpoint(self, out: Path, record: dict[str, Any]) -> None:
        self.records.append(record)
        if record["score"] is None or record["score"] > self.best["score"]:
            self.best = record | {"tensors": self.drafter.served_tensors()}
        self._save_state()
        if self.best["step"] == record["step"]:
            self._write_best(out)
        self._write_log()

    def _record(self, reports: list[dict[str, Any]]) -> dict[str, Any]:
        hits = sum(r["hits"] for r in reports)
        rows = sum(r["rows"] for r in reports).clamp(min=1)
        record = {"step": self.state["step"], "minutes": round(self.state["seconds"] / 60, 2)}
        record |= {k: sum(r[k] for r in reports) / len(reports) for k in self.losses}
        record["position_accuracy"] = [round(v, 4) for v in (hits / rows).tolist()]
        sampled = self.drafter.dependency is not None
        found = {
            name: self.replay.evaluate(source, sampled=sampled, world=self.world)
            for name, source in self.held_out.items()
        }
        means = {
            name: sum(result[name] for result in found.values()) / len(found)
            for name in ("tau", *(["tau_sampled"] if sampled else []))
            if found
        }
        # The paper's drafter drafts the argmax; one with a dependency head also drafts samples.
        score = sum(means.values()) / len(means) if means else None
        return record | {"held_out": found, "tau": None} | means | {"score": score}

    def _save_state(self) -> None:
        content = {
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "state": self.state,
            "records": self.records,
            "best": self.best,
        }
        with replacing(self.folder / STATE, failures=(OSError, RuntimeError)) as partial:
            torch.save(content, partial)

    def _write_best(self, out: Path) -> None:
        if "tensors" in self.best:
            write_drafter(out, self.drafter.raw, self.best["tensors"])

    def _write_log(self) -> None:
        """Cut the log to the state: a kill between the two neither loses nor doubles a line."""
        write_text(self.folder / LOG, "".join(json.dumps(r) + "\n" for r in self.records))

    def _saved(self) -> dict[str, Any]:
        path = self.folder / STATE
        try:
            with zipfile.ZipFile(path) as archive:  # torch.load checks no CRC
                if wrong := archive.testzip():
                    raise ValueError(f"the CRC-32 of {wrong} is not the one it was written with")
            return torch.load(path, weights_only=True, map_location="cpu")
        except (OSError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
            raise HyperDFlashConfigError(
                f"{path} is damaged: {str(error).splitlines()[0]}. Remove it and run the same "
                "command to restart this stage."
            ) from error

    def _resume(self) -> None:
        if not (self.folder / STATE).is_file():
            return
        saved = self._saved()
        self.drafter.load_state_dict(saved["drafter"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.state, self.records, self.best = (saved[k] for k in ("state", "records", "best"))
        if self.world.is_main:
            self._write_log()

    def _check_processes(self) -> None:
        """Raise ``HyperDFlashConfigError`` unless every process resumes at the same step."""
        step = self.state["step"]
        steps = self.world.sum(torch.tensor(float(step), dtype=torch.float64, device=self.device))
        if steps.item() != step * self.world.size:
            raise HyperDFlashConfigError(
                f"{self.folder} gave this process step {step} and another process a different one. "
                "The working folder must be shared by all nodes."
            )


def _optimizer(drafter: Drafter, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices only, never on the gate, a norm or a dependency head."""
    if drafter.dependency is not None:
        drafter.dependency.gate.requires_grad_(recipe.dependency_gate)
    matrices, others, head = [], [], []
    for name, parameter in drafter.named_parameters():
        if name.startswith("dependency."):
            head.append(parameter)
        else:
            (matrices if "_proj." in name or name == "fc.weight" else others).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": others, "weight_decay": 0.0},
        {"params": head, "weight_decay": 0.0, "factor": recipe.dependency_lr},
    ]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.95), fused=True)
