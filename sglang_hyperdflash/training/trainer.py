"""The training loop of a drafter: one process or many, exactly resumable, best-by-tau."""

from __future__ import annotations

import json
import math
import signal
import time
import zipfile
from pathlib import Path
from typing import Any

import torch

from sglang_hyperdflash.tools.atomic import replacing, write_text
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.process_group import sigterm_noted
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

LOG = "training_log.jsonl"
# Steps whose states are read while one computes.
AHEAD = 2


def saved_states(folder: Path) -> list[Path]:
    """The checkpoints ``state-STEP.pt`` of a stage's folder, the last step's last."""
    return sorted(folder.glob("state-*.pt"), key=lambda path: int(path.stem.partition("-")[2]))


def read_state(path: Path) -> dict[str, Any]:
    """A checkpoint, on the CPU.

    Raises:
        HyperDFlashConfigError: the file is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load checks no CRC
            if wrong := archive.testzip():
                raise ValueError(f"the CRC-32 of {wrong} is not the one it was written with")
        return torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
        raise HyperDFlashConfigError(
            f"{path} is damaged: {str(error).splitlines()[0]}. Remove it and run the same "
            "command to resume from the checkpoint before it, or to restart this stage."
        ) from error


class Trainer:
    """Trains ``drafter`` on a source of target states; ``folder`` holds its state and its log.

    Every step's samples, anchors and learning rate follow from the recipe and the step's number
    alone (with ``minutes`` the learning rate follows the clock), so a killed run that resumes
    from its last checkpoint ends with the weights of one that was never killed.
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
        # Of the steps since the last record.
        self.reports: list[dict[str, Any]] = []
        self.asked_to_stop = self.stopping = False  # this process, all of them
        # The best one's record, with the drafter's fp32 weights under "weights".
        self.best: dict[str, Any] = {"step": 0, "tau": 0.0, "score": 0.0}
        self.passes = Passes(len(train.samples), recipe.batch, recipe.seed)
        folder.mkdir(parents=True, exist_ok=True)
        self._resume()
        self._check_processes()
        # Another node may have read older files: network file systems keep what they listed.
        self.world.share(drafter.state_dict().values())

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
        """This process's micro batches: every sample's place in the global batch, and its index.

        Those of one length run together; which do, changes no gradient.
        """
        indices = self.passes.batch(step)
        lengths = self.train.lengths[indices].tolist()
        places = sorted(range(len(indices)), key=lengths.__getitem__)
        share = [(at, indices[at]) for at in places[self.world.rank :: self.world.size]]
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
        totals, waited = torch.zeros(3 + 2 * drafts, device=self.device), 0.0
        stop = torch.tensor([float(self.asked_to_stop)], device=self.device)
        for ids, rows, blocks in parts:
            before = time.monotonic()
            states = self.train.states(ids)
            waited += time.monotonic() - before
            terms, hits, supervised = self._sums(rows, states, blocks)
            terms = terms / divide
            loss = (factors * terms).sum()
            if loss.requires_grad:
                loss.backward()
            totals += torch.cat([terms.detach(), hits, supervised])
        totals = self.world.sum(torch.cat([totals, stop])).cpu()
        self.stopping = bool(totals[-1])
        ce, distance, own = totals[:3].tolist()
        if not math.isfinite(ce + distance + own):
            raise self._not_finite(f"loss is not finite (CE {ce}, {term} {distance}, own {own})")
        self.world.sum_gradients(self.drafter.parameters())
        hits, rows = totals[3 : 3 + drafts], totals[3 + drafts : -1]
        loss = (totals[:3] * factors.cpu()).sum().item()
        report = {"loss": loss, "ce": ce, term: distance, "own": own, "hits": hits, "rows": rows}
        return report | {"data_wait": waited}

    def _not_finite(self, what: str) -> FloatingPointError:
        return FloatingPointError(
            f"the {what} at step {self.state['step']}. Lower the stage's lr, now "
            f"{self.recipe.lr:g}, and retrain with a new --work and a new out: a run keeps its lr."
        )

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
        """One optimizer step.

        Raises:
            FloatingPointError: the loss or the gradient is not finite; no weight was changed.
        """
        started, step = time.monotonic(), self.state["step"]
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate() * group.get("factor", 1.0)
        self.optimizer.zero_grad()
        report = self.accumulate(step)
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.recipe.clip).item()
        if not math.isfinite(norm):
            raise self._not_finite(f"gradient is not finite (norm {norm})")
        self.optimizer.step()
        self.state["step"] += 1
        spent = torch.tensor([time.monotonic() - started], device=self.device)
        spent = self.world.sum(spent).item() / self.world.size
        self.state["seconds"] += spent
        tokens = sum(self.train.samples[i].answer_tokens for i in self.passes.batch(step))
        return report | {"gradient_norm": norm, "seconds": spent, "tokens": tokens}

    def run(self, out: Path, display=None) -> None:
        """Train to the end of the stage; keep the best checkpoint in ``out``.

        Args:
            display: called with the trainer and each step's report (a progress bar).

        Raises:
            SystemExit: of code 143, after a SIGTERM to any process: the step was completed and its
                state saved.
        """
        self.world.on_main(lambda: self._begin(out))
        with sigterm_noted(self._stop):
            while True:
                done = self.progress() >= 1.0
                if self.reports and (done or self.state["step"] % self.recipe.every == 0):
                    record = self._record(self.reports)  # all processes replay held-out answers
                    self.reports = []
                    self.world.on_main(lambda record=record: self._checkpoint(out, record))
                    self.after_checkpoint()
                if done:
                    return
                self.reports.append(self.step())
                if display is not None:
                    display(self, self.reports[-1])
                if self.stopping:
                    self.world.on_main(self._save_state)
                    raise SystemExit(128 + signal.SIGTERM)

    def after_checkpoint(self) -> None:
        """What all processes do before the next step; nothing, unless a subclass does something."""

    def measured(self) -> dict[str, float]:
        """What the last checkpoint measured, as the terminal and the reporters show it."""
        tau = self.records[-1]["tau"] if self.records else None
        return {} if tau is None else {"tau": tau}

    def _stop(self) -> None:
        self.asked_to_stop = True

    def _checkpoint(self, out: Path, record: dict[str, Any]) -> None:
        served = self.drafter.served_tensors()  # raises where a weight is not finite
        self.records.append(record)
        if record["score"] is None or record["score"] > self.best["score"]:
            weights = self.drafter.state_dict()
            copies = {name: weight.to("cpu", copy=True) for name, weight in weights.items()}
            self.best = record | {"weights": copies}
        self._save_state()
        if self.best["step"] == record["step"]:
            write_drafter(out, self.drafter.raw, served)
        self._write_log()

    def _record(self, reports: list[dict[str, Any]]) -> dict[str, Any]:
        hits = sum(r["hits"] for r in reports)
        rows = sum(r["rows"] for r in reports).clamp(min=1)
        record = {"step": self.state["step"], "minutes": round(self.state["seconds"] / 60, 2)}
        record |= {k: sum(r[k] for r in reports) / len(reports) for k in self.losses}
        seconds = max(sum(r["seconds"] for r in reports), 1e-9)
        record["gradient_norm"] = sum(r["gradient_norm"] for r in reports) / len(reports)
        record["tokens_s"] = round(sum(r["tokens"] for r in reports) / seconds)
        record["data_wait"] = round(sum(r["data_wait"] for r in reports) / seconds, 4)
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

    def _content(self) -> dict[str, Any]:
        """Of a checkpoint."""
        return {
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "state": self.state,
            "records": self.records,
            "best": self.best,
            "reports": self.reports,
        }

    def _save_state(self) -> None:
        path = self.folder / f"state-{self.state['step']}.pt"
        with replacing(path, failures=(OSError, RuntimeError)) as partial:
            torch.save(self._content(), partial)
        for old in saved_states(self.folder)[: -self.recipe.keep]:
            old.unlink(missing_ok=True)

    def _begin(self, out: Path) -> None:
        if "weights" in self.best:  # a kill may have come before it was written
            served = self.drafter.served_tensors(self.best["weights"])
            write_drafter(out, self.drafter.raw, served)

    def _write_log(self) -> None:
        """Cut the log to the state: a kill between the two neither loses nor doubles a line."""
        write_text(self.folder / LOG, "".join(json.dumps(r) + "\n" for r in self.records))

    def _resume(self) -> None:
        paths = saved_states(self.folder)
        if not paths:
            return
        self._restore(read_state(paths[-1]))
        if self.world.is_main:
            self._write_log()

    def _restore(self, saved: dict[str, Any]) -> None:
        self.drafter.load_state_dict(saved["drafter"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.state, self.records, self.best = (saved[k] for k in ("state", "records", "best"))
        self.reports = saved["reports"]

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
