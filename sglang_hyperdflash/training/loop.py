"""The training loop of a drafter: one process, time-budgeted, resumable, best-by-tau."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_hyperdflash.metrics import accept_length, position_acceptance
from sglang_hyperdflash.training.blocks import (
    anchor_positions,
    block_labels,
    block_mask,
    sample_anchors,
)
from sglang_hyperdflash.training.data import Batch, FeatureCache
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.losses import cross_entropy, kl_distillation, position_weights
from sglang_hyperdflash.training.target import LocalTarget


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters under the paper's symbols (section 2.3, eq. 2-3)."""

    minutes: float = 30.0
    lr: float = 2e-3
    lr_floor: float = 2e-5
    warmup_steps: int = 50
    weight_decay: float = 0.0
    batch: int = 8
    anchors: int = 32
    decay: float | None = 4.0
    alpha: float = 0.15
    T_KD: float = 1.0
    P: int = 2
    teacher: str = "gated"
    seed: int = 0


class Trainer:
    """Trains ``drafter`` on cached target states; ``folder`` holds its state and its log."""

    def __init__(
        self,
        drafter: Drafter,
        target: LocalTarget,
        train: FeatureCache,
        held_out: dict[str, FeatureCache],
        recipe: Recipe,
        folder: Path,
    ) -> None:
        self.drafter, self.target, self.recipe = drafter, target, recipe
        self.train_cache, self.held_out, self.folder = train, held_out, folder
        self.block = drafter.config.block_size
        self.weights = position_weights(self.block - 1, recipe.decay)
        self.mask_embedding = target.embed_tokens.weight[drafter.config.mask_token_id]
        matrices = [p for n, p in drafter.named_parameters() if "_proj." in n or n == "fc.weight"]
        chosen = {id(p) for p in matrices}
        others = [p for p in drafter.parameters() if id(p) not in chosen]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": recipe.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
            fused=True,
        )
        self.state = {"step": 0, "seconds": 0.0, "best_tau": 0.0}
        self.generator = torch.Generator().manual_seed(recipe.seed)
        folder.mkdir(parents=True, exist_ok=True)
        self._resume()

    def block_embeddings(self, tokens: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """``[b, n, B, d]``: the anchor token's embedding, then mask embeddings."""
        first = self.target.embed_tokens(tokens.gather(1, anchors))
        masks = self.mask_embedding.expand(*anchors.shape, self.block - 1, -1)
        return torch.cat([first.unsqueeze(2), masks], dim=2)

    def draft_states(self, batch: Batch, anchors: torch.Tensor, keep: torch.Tensor):
        """Hidden states ``[b, n, B, d]`` of the blocks anchored at ``anchors``."""
        mask = block_mask(anchors, keep, batch.tokens.shape[1], self.block)
        context = self.drafter.reduce(batch.residual)
        return self.drafter(context, self.block_embeddings(batch.tokens, anchors), anchors, mask)

    def loss(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """CE + alpha * KL of one batch (eq. 3), and its parts for the log."""
        valid = anchor_positions(batch.loss_mask)
        anchors, keep = sample_anchors(valid, self.recipe.anchors, self.generator)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.draft_states(batch, anchors, keep)[:, :, 1:]
        labels, supervised = block_labels(batch.tokens, batch.loss_mask, anchors, self.block)
        supervised = supervised & keep.unsqueeze(-1)
        logits = self.target.lm_head(hidden[supervised].float())
        weights = self.weights.expand_as(labels)[supervised]
        numerator, denominator = cross_entropy(logits, labels[supervised], weights)
        ce = numerator / denominator
        report = {"ce": ce.item()}
        if not self.recipe.alpha:
            return ce, report
        early = torch.arange(self.block - 1) < self.recipe.P
        early = early.expand_as(supervised)[supervised]
        teacher = self._teacher_logits(batch, anchors, supervised)
        numerator, denominator = kl_distillation(
            logits[early], teacher, int(keep.sum()), self.recipe.T_KD, self.recipe.P
        )
        kl = numerator / denominator
        report["kl"] = kl.item()
        return ce + self.recipe.alpha * kl, report

    def _teacher_logits(
        self, batch: Batch, anchors: torch.Tensor, supervised: torch.Tensor
    ) -> torch.Tensor:
        """Target logits at a+k-1 for the supervised drafts k <= P, in their flattened order."""
        p = self.recipe.P
        early = supervised[..., :p]
        at = (anchors.unsqueeze(-1) + torch.arange(p)).clamp(max=batch.tokens.shape[1] - 1)
        rows = torch.arange(len(anchors)).view(-1, 1, 1).expand_as(at)
        if self.recipe.teacher == "gated":
            states = batch.final[rows[early], at[early]]
        else:
            states = self.target.mean_pooled_state(batch.residual[rows[early], at[early]])
        with torch.no_grad():
            return self.target.lm_head(states)

    @torch.no_grad()
    def simulated_acceptance(self, cache: FeatureCache, batch: int = 8) -> list[int]:
        """Replay held-out continuations block by block: a histogram of accepted drafts."""
        histogram = [0] * self.block
        for start in range(0, len(cache.samples), batch):
            indices = list(range(start, min(start + batch, len(cache.samples))))
            data = cache.batch(indices)
            valid = anchor_positions(data.loss_mask)
            count = int(valid.sum(1).max())
            if count == 0:
                continue
            anchors, keep = sample_anchors(valid, count, torch.Generator().manual_seed(0))
            hidden = self.draft_states(data, anchors, keep)[:, :, 1:]
            drafts = self.target.lm_head(hidden).argmax(-1)
            labels, real = block_labels(data.tokens, data.loss_mask, anchors, self.block)
            accepted = ((drafts == labels) & real).int().cumprod(-1).sum(-1)
            for row in range(len(indices)):
                at, starts = 0, anchors[row][keep[row]].tolist()
                while at < len(starts):
                    # A block cut short by the sample's end says nothing of its tail.
                    if not bool(real[row, at].all()):
                        break
                    taken = int(accepted[row, at])
                    histogram[taken] += 1
                    at += taken + 1
        return histogram

    def evaluate(self) -> dict[str, dict]:
        """tau (bonus included) and per-position acceptance of every held-out kind."""
        self.drafter.eval()
        result = {}
        for kind, cache in self.held_out.items():
            histogram = self.simulated_acceptance(cache)
            accepted = sum(i * n for i, n in enumerate(histogram))
            result[kind] = {
                "tau": accept_length(accepted, max(sum(histogram), 1)),
                "position_acceptance": position_acceptance(histogram, self.block - 1),
            }
        self.drafter.train()
        return result

    def learning_rate(self, progress: float) -> float:
        r = self.recipe
        cosine = r.lr_floor + (r.lr - r.lr_floor) * 0.5 * (1 + math.cos(math.pi * progress))
        return cosine * min(1.0, (self.state["step"] + 1) / r.warmup_steps)

    def run(self, out: Path, *, evaluate_every: float = 180.0) -> None:
        """Train until the time budget is spent; keep the best checkpoint by mean tau in ``out``."""
        budget, reports, last_eval = self.recipe.minutes * 60, [], self.state["seconds"]
        while self.state["seconds"] < budget:
            started = time.monotonic()
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate(min(1.0, self.state["seconds"] / budget))
            count = len(self.train_cache.samples)
            chosen = torch.randperm(count, generator=self.generator)[: self.recipe.batch]
            loss, report = self.loss(self.train_cache.batch(chosen.tolist()))
            if not torch.isfinite(loss):
                raise FloatingPointError(
                    f"loss is {loss.item()} at step {self.state['step']}; lower the learning rate "
                    f"or resume from {self.folder / 'state.pt'}."
                )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            reports.append(report)
            self.state["step"] += 1
            self.state["seconds"] += time.monotonic() - started
            finished = self.state["seconds"] >= budget
            if finished or self.state["seconds"] - last_eval > evaluate_every:
                last_eval = self.state["seconds"]
                self._checkpoint(out, reports)
                reports.clear()

    def _checkpoint(self, out: Path, reports: list[dict[str, float]]) -> None:
        record = {"step": self.state["step"], "minutes": round(self.state["seconds"] / 60, 2)}
        for key in reports[0]:
            record[key] = sum(r[key] for r in reports) / len(reports)
        record["held_out"] = self.evaluate()
        record["tau"] = sum(r["tau"] for r in record["held_out"].values()) / len(self.held_out)
        if record["tau"] > self.state["best_tau"]:
            self.state["best_tau"] = record["tau"]
            self.drafter.save(out)
        partial = self.folder / "state.pt.partial"
        torch.save(
            {
                "drafter": self.drafter.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "state": self.state,
                "generator": self.generator.get_state(),
            },
            partial,
        )
        partial.replace(self.folder / "state.pt")
        with (self.folder / "training_log.jsonl").open("a") as log:
            log.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)

    def _resume(self) -> None:
        path = self.folder / "state.pt"
        if not path.is_file():
            return
        saved = torch.load(path, weights_only=True)
        self.drafter.load_state_dict(saved["drafter"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.state = saved["state"]
        self.generator.set_state(saved["generator"])
        print(f"resumed at step {self.state['step']}", flush=True)
