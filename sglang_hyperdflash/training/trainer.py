"""The training loop of a drafter: one process or many, exactly resumable, best-by-tau."""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sglang_hyperdflash.tools.atomic import write_text
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.process_group import sigterm_noted
from sglang_hyperdflash.training.checkpoints import Checkpoints, read_state, saved_states
from sglang_hyperdflash.training.deal import check_batch, deal, sample_rows
from sglang_hyperdflash.training.drafter import Drafter, write_drafter
from sglang_hyperdflash.training.objective import Blocks, denominators, sums
from sglang_hyperdflash.training.process_group import POLL, ProcessGroup
from sglang_hyperdflash.training.recipe import Recipe
from sglang_hyperdflash.training.replay import Replay
from sglang_hyperdflash.training.samples import (
    Passes,
    Rows,
    Source,
    States,
    collate,
    generator_seed,
    moved,
)
from sglang_hyperdflash.training.vocabulary import bf16_products

LOG = "training_log.jsonl"
# Steps whose states are read while one computes.
AHEAD = 2
NO_BEST: dict[str, Any] = {"step": 0, "tau": 0.0, "score": 0.0}


class Step(nn.Module):
    """One micro batch's sums as one forward pass, which DDP's hooks need.

    The drafter's first modules come first: DDP sends gradients from the last parameter to the
    first, each when it is ready.
    """

    def __init__(self, drafter: Drafter, compute) -> None:
        super().__init__()
        self.first = nn.ModuleList([getattr(drafter, drafter.reducer_name), drafter.hidden_norm])
        self.drafter, self.compute = drafter, compute

    def forward(self, *batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See :func:`.objective.sums`; the first always has a gradient, if one of zeros."""
        terms, *counts = self.compute(*batch)
        if not terms.requires_grad:  # no draft of the samples is supervised
            terms = terms + 0.0 * sum(p.sum() for p in self.parameters() if p.requires_grad)
        return terms, *counts


class Report:
    """A step's numbers and times, on their way to the host while the next step computes.

    Times are a GPU's own where there is one.

    Attributes:
        step: the number of the step, from 0. seconds: of the step. tokens: answer tokens. lr: the
            learning rate.
    """

    def __init__(self, step: int, device: torch.device) -> None:
        self.step, self.seconds, self.tokens, self.lr = step, 0.0, 0, 0.0
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self.mark("")

    def mark(self, part: str) -> None:
        """What came since the last mark belongs to ``part``."""
        event = torch.cuda.Event(enable_timing=True) if self._on_gpu else time.monotonic()
        if self._on_gpu:
            event.record()
        self._marks.append((part, event))

    def close(self, numbers: torch.Tensor) -> None:
        """Begin to copy the step's numbers."""
        self._numbers = torch.empty(numbers.shape, pin_memory=self._on_gpu)
        self._numbers.copy_(numbers, non_blocking=True)
        self.mark("")

    def read(self) -> tuple[list[float], dict[str, float]]:
        """The numbers and the seconds by part, once they are there."""
        spent: dict[str, float] = {}
        if self._on_gpu:
            self._marks[-1][1].synchronize()
        for (_, before), (part, now) in pairwise(self._marks[:-1]):
            more = before.elapsed_time(now) / 1000 if self._on_gpu else now - before
            spent[part] = spent.get(part, 0.0) + more
        return self._numbers.tolist(), spent


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
        check_batch(recipe.batch, self.world.size)
        if recipe.compile:
            for layer in drafter.layers:
                layer.compile(dynamic=True)
        self.optimizer = _optimizer(drafter, recipe)
        self.state: dict[str, Any] = {"step": 0, "seconds": 0.0}
        self.records: list[dict[str, Any]] = []
        # Of the steps since the last record.
        self.reports: list[dict[str, Any]] = []
        self._late: Report | None = None
        self._display: Callable[[Trainer, dict[str, Any]], None] | None = None
        self.asked_to_stop = self.stopping = False  # this process, all of them
        # The best one's record; the checkpoint of its step is kept.
        self.best = NO_BEST
        self.passes = Passes(train.counts, recipe.batch, recipe.seed, recipe.weights)
        # The step before which all samples are there.
        self.horizon = recipe.steps or sys.maxsize
        self.factors = moved(torch.tensor(self.objective.factors), self.device)
        folder.mkdir(parents=True, exist_ok=True)
        self.checkpoints = Checkpoints(folder, self.world, recipe.keep)
        self._resume()
        self._check_processes()
        self.summed = self.world.synchronized(Step(drafter, self._sums))
        self._shares = lru_cache(AHEAD + 2)(self._dealt)

    def micro_batches(self, step: int) -> list[tuple[list[int], Rows, Blocks]]:
        """This process's share of a step in micro batches, with anchors drawn."""
        first = (self.recipe.seed + 1) * 2**40 + step * 2**16
        block, parts = self.drafter.config.block_size, []
        for share in self._shares(step)[self.world.rank]:
            places, ids = map(list, zip(*share, strict=True))
            rows = collate([self.train.samples[i] for i in ids])
            seeds = [generator_seed(first + place) for place in places]
            parts.append((ids, rows, Blocks.draw(rows, self.recipe.anchors, block, seeds)))
        return parts

    def _dealt(self, step: int) -> list[list[list[tuple[int, int]]]]:
        """Every process's micro batches: every sample's place in the global batch, and its index.

        Which run together changes no gradient.
        """
        indices = self.passes.batch(step)
        limits = self.recipe.anchors, self.drafter.config.block_size
        sizes = (x[indices].tolist() for x in (self.train.lengths, self.train.answers))
        rows = [sample_rows(*size, *limits) for size in zip(*sizes, strict=True)]
        shares = deal(rows, self.world.size, self.recipe.micro_batch)
        return [[[(i, indices[i]) for i in part] for part in share] for share in shares]

    def _prefetch(self, step: int, part: int) -> None:
        """Let states be read that come from a micro batch of a step on, in their order."""
        for ahead in range(step, min(step + AHEAD + 1, self.horizon)):
            parts = self._shares(ahead)[self.world.rank]
            for share in parts[part if ahead == step else 0 :]:
                self.train.prefetch([i for _, i in share])

    def _agreed(self, *numbers: float) -> list[float]:
        """Sums over all processes, on the host alone; whether one was asked to stop is noted."""
        *sums, asked = self.world.sum(
            torch.tensor([*numbers, self.asked_to_stop], dtype=torch.float64)
        ).tolist()
        self.stopping = self.stopping or asked > 0
        return sums

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Ask again and again until it is so, or a process was asked to stop."""
        while not ready():
            self._agreed()
            if self.stopping:
                return
            time.sleep(POLL)

    def accumulate(self, report: Report) -> torch.Tensor | None:
        """Gradients of one global batch, summed over micro batches and processes.

        Returns:
            On the device: sums of CE, second term and CE of u over their denominators, ``[3]``,
            then correct and supervised drafts of each position, ``[B-1]`` each. None where a
            process was asked to stop: gradients are in part.
        """
        parts = self.micro_batches(report.step)
        divide = sum((denominators(self.objective, part[-1]) for part in parts), torch.zeros(3))
        divide = torch.tensor(self._agreed(*divide.tolist()), dtype=torch.float32)
        divide = moved(divide.clamp(min=1e-9), self.device)
        totals = torch.zeros(3 + 2 * self.drafter.config.num_drafts, device=self.device)
        for number, (ids, rows, blocks) in enumerate(parts):
            if number:
                self._agreed()
            report.mark("processes")
            if self.stopping:
                return None
            self._prefetch(report.step, number)
            last = number == len(parts) - 1
            batch = rows, self.train.states(ids).to(self.device), blocks
            report.mark("data")
            with nullcontext() if last or self.world.size == 1 else self.summed.no_sync():
                terms, hits, supervised = self.summed(*batch)
                terms = terms / divide
                report.mark("forward")
                (self.world.size * (self.factors * terms).sum()).backward()
            report.mark("backward")
            totals += torch.cat([terms.detach(), hits, supervised])
        return self.world.sum(totals)

    def _not_finite(self, what: str) -> FloatingPointError:
        return FloatingPointError(
            f"the {what}. Lower the stage's lr, now "
            f"{self.recipe.lr:g}, and retrain with a new --work and a new out: a run keeps its lr."
        )

    def _sums(self, rows: Rows, states: States, blocks: Blocks):
        placed = rows.to(self.device)
        anchors, keep = (moved(x, self.device) for x in (blocks.anchors, blocks.keep))
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

    def step(self) -> Report | None:
        """One optimizer step, for which the host does not wait; none when asked to stop.

        Where loss or gradient is not finite, no weight is changed, and :meth:`keep` raises.
        """
        started, step = time.monotonic(), self.state["step"]
        report = Report(step, self.device)
        report.lr = self.learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = report.lr * group.get("factor", 1.0)
        self.optimizer.zero_grad(set_to_none=False)  # they lie in DDP's buckets
        totals = self.accumulate(report)
        if totals is None:
            return None
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.recipe.clip)
        # Seam: torch's fused AdamW skips a step by this, as it does for ``GradScaler``.
        self.optimizer.found_inf = (~torch.isfinite(norm + totals[:3].sum())).float()
        self.optimizer.step()
        report.mark("optimizer")
        report.close(torch.cat([totals, norm.reshape(1)]))
        self.state["step"] += 1
        self._keep_late()  # so that the time counts what a GPU does: one step late
        (spent,) = self._agreed(time.monotonic() - started)
        report.seconds = spent / self.world.size
        self.state["seconds"] += report.seconds
        report.tokens = int(self.train.answers[self.passes.batch(step)].sum())
        return report

    def keep(self, late: Report) -> dict[str, Any]:
        """Read a step's report, and keep it for the next record.

        Raises:
            FloatingPointError: its loss or gradient is not finite.
        """
        (ce, distance, own, *counts, norm), parts = late.read()
        term, drafts = self.objective.term, self.drafter.config.num_drafts
        if not math.isfinite(ce + distance + own):
            what = f"loss is not finite (CE {ce}, {term} {distance}, own {own})"
            raise self._not_finite(f"{what} at step {late.step}")
        if not math.isfinite(norm):
            raise self._not_finite(f"gradient is not finite (norm {norm}) at step {late.step}")
        factors = zip((ce, distance, own), self.objective.factors, strict=True)
        report = {"step": late.step, "loss": sum(x * factor for x, factor in factors), "ce": ce}
        report |= {term: distance, "own": own, "hits": counts[:drafts], "rows": counts[drafts:]}
        report |= {"gradient_norm": norm, "seconds": late.seconds, "tokens": late.tokens}
        report |= {"lr": late.lr, "parts": parts}
        self.reports.append(report)
        return report

    def _keep_late(self) -> None:
        if self._late is not None:
            late, self._late = self._late, None
            report = self.keep(late)
            if self._display is not None:
                self._display(self, report)

    def run(self, out: Path, display=None) -> None:
        """Train to the end of the stage; keep the best checkpoint in ``out``.

        Args:
            display: called with the trainer and each step's report, when the next step has begun.

        Raises:
            SystemExit: of code 143, after a SIGTERM to any process: all that was trained is saved,
                but for a step that was not complete.
            FloatingPointError: the loss or the gradient is not finite.
        """
        self._display = display
        self.world.on_main(lambda: self._mend(out))
        with sigterm_noted(self._stop):
            try:
                self._run(out)
            except FloatingPointError:  # which all processes raise
                self.checkpoints.wait()
                raise
            self.checkpoints.wait()
        if self.stopping:
            raise SystemExit(128 + signal.SIGTERM)

    def _run(self, out: Path) -> None:
        while True:
            done = self.progress() >= 1.0
            due = done or self.state["step"] % self.recipe.every == 0
            if due or self.stopping:
                self._keep_late()
            if due and self.reports and not self.stopping:
                record = self._record(self.reports)  # all processes replay held-out answers
                self.reports = []
                self._checkpoint(out, record)
                self.after_checkpoint()
            if done:
                self._agreed()
            elif self.stopping:
                self._save_state()
            if done or self.stopping:
                return
            self.before_step()
            if not self.stopping and (report := self.step()) is not None:
                self._late = report

    def before_step(self) -> None:
        """What all processes do before a step; nothing, unless a subclass does something."""

    def after_checkpoint(self) -> None:
        """What all processes do before the next step; nothing, unless a subclass does something."""

    def measured(self) -> dict[str, float]:
        """What the last checkpoint measured, as the terminal and the reporters show it."""
        tau = self.records[-1]["tau"] if self.records else None
        return {} if tau is None else {"tau": tau}

    def _stop(self) -> None:
        self.asked_to_stop = True

    def _checkpoint(self, out: Path, record: dict[str, Any]) -> None:
        """Begin to write a checkpoint, and what of it is served if it is the best."""
        if record["score"] is not None and record["score"] <= self.best["score"]:
            return self._save_record(record)
        self.best = record
        served = self.drafter.served_tensors() if self.world.is_main else {}
        self._save_record(record, lambda: write_drafter(out, self.drafter.raw, served))

    def _save_record(self, record: dict[str, Any], then: Callable[[], None] | None = None) -> None:
        """Begin to write a checkpoint with one more record, and the log after ``then``."""
        self.records.append(record)
        records = list(self.records)

        def write() -> None:
            if then is not None:
                then()
            self._write_log(records)

        self._save_state(write)

    def _record(self, reports: list[dict[str, Any]]) -> dict[str, Any]:
        hits, rows = (torch.tensor([r[name] for r in reports]).sum(0) for name in ("hits", "rows"))
        record = {"step": self.state["step"], "minutes": round(self.state["seconds"] / 60, 2)}
        record |= {k: sum(r[k] for r in reports) / len(reports) for k in self.losses}
        seconds = max(sum(r["seconds"] for r in reports), 1e-9)
        record["gradient_norm"] = sum(r["gradient_norm"] for r in reports) / len(reports)
        record["tokens_s"] = round(sum(r["tokens"] for r in reports) / seconds)
        record["data_wait"] = round(sum(r["parts"]["data"] for r in reports) / seconds, 4)
        accuracy = hits / rows.clamp(min=1)
        record["position_accuracy"] = [round(v, 4) for v in accuracy.tolist()]
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

    def _tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds, by name: the weights and AdamW's moments."""
        tensors = {f"drafter.{name}": x for name, x in self.drafter.state_dict().items()}
        for name, parameter in self.drafter.named_parameters():
            for kind, moment in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{kind}.{name}"] = moment
        return tensors

    def _save_state(self, then: Callable[[], None] | None = None) -> None:
        facts = {"state": self.state, "records": self.records, "best": self.best}
        facts["reports"] = self.reports
        step, best = self.state["step"], self.best["step"]
        self.checkpoints.save(step, self._tensors(), facts, best, then)

    def _mend(self, out: Path) -> None:
        """Write the best drafter again, which something else may have damaged."""
        if (weights := best_weights(self.folder)) is not None:
            write_drafter(out, self.drafter.raw, self.drafter.served_tensors(weights))

    def _write_log(self, records: list[dict[str, Any]]) -> None:
        """Cut the log to the state: a kill between the two neither loses nor doubles a line."""
        write_text(self.folder / LOG, "".join(json.dumps(r) + "\n" for r in records))

    def _resume(self) -> None:
        paths = saved_states(self.folder)
        if not paths:
            return
        share = self.world.rank, self.world.size
        facts, _ = read_state(paths[-1], self._tensors(), share=share)
        self.state, self.records, self.best = (facts[k] for k in ("state", "records", "best"))
        self.reports = facts["reports"]
        if not (self.folder / f"state-{self.best['step']}").is_dir():  # it was damaged
            self.best = NO_BEST
        if self.world.is_main:
            self._write_log(self.records)

    def _check_processes(self) -> None:
        """Raise ``HyperDFlashConfigError`` unless every process resumes at the same step."""
        step = self.state["step"]
        steps = self.world.sum(torch.tensor(float(step), dtype=torch.float64))
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
    optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.95), fused=True)
    # As its first step would make it: a checkpoint is read into it.
    for parameter in (*matrices, *others, *head):
        if parameter.requires_grad:
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            optimizer.state[parameter] = {"step": step, **moments}
    return optimizer


def best_weights(folder: Path) -> dict[str, torch.Tensor] | None:
    """The fp32 weights of a stage's best checkpoint, on the CPU; None where it is not there.

    Raises:
        HyperDFlashConfigError: it is damaged.
    """
    paths = saved_states(folder)
    step = read_state(paths[-1], {})[0]["best"]["step"] if paths else 0
    if not step or not (best := folder / f"state-{step}").is_dir():
        return None
    _, tensors = read_state(best, begin="drafter.")
    return {name.removeprefix("drafter."): tensor for name, tensor in tensors.items()}
