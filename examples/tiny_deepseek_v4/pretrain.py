"""Train the target on generated exchanges: a constant learning rate, then a linear decay to zero.

    python examples/tiny_deepseek_v4/make_tokenizer.py --out target
    python examples/tiny_deepseek_v4/pretrain.py --out target --minutes 100 --decay-minutes 14

The state of the constant phase is kept in ``--work``; the same command resumes there, and with more
``--minutes`` it goes on. The decay starts from that state and leaves it alone, so that a run can be
extended after its result was written. Only the assistant's tokens are learned.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer

from muon import Muon
from pretrain_data import held_out_batches, training_batch
from pretrain_model import export, make_config, make_model, token_losses

HELD_OUT_SEED, HELD_OUT_PER_FAMILY = 1000, 24
# Two batches of 16 rows of 128 tokens a step.
BATCHES, ROWS = 2, 16
WARMUP_STEPS, LOG_STEPS, EVALUATION_STEPS, SAVE_SECONDS = 100, 25, 250, 180
MATRIX_LR, EMBEDDING_LR, OTHER_LR = 0.015, 2e-2, 3e-3


def make_optimizers(model) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embedding, head, gates, norms and sinks."""
    embedding = model.model.embed_tokens.weight
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        inner = name.startswith("model.layers") and "_hc" not in name and ".gate." not in name
        if parameter is not embedding:
            (matrices if inner and parameter.dim() >= 2 else others).append(parameter)
    groups = [{"params": [embedding], "lr": EMBEDDING_LR}, {"params": others, "lr": OTHER_LR}]
    return [
        Muon(matrices, lr=MATRIX_LR, weight_decay=0.05),
        torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


class Run:
    """A training run: model, optimizers, and its progress."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.tokenizer = AutoTokenizer.from_pretrained(args.out)
        self.model = make_model(make_config(self.tokenizer, args.layers, args.expert_width))
        self.optimizers = make_optimizers(self.model)
        self.groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        self.base = [group["lr"] for group in self.groups]
        self.state = {"step": 0, "seconds": 0.0}
        self.snapshot = args.work / "state.pt"
        if self.snapshot.is_file():
            saved = torch.load(self.snapshot, weights_only=True)
            self.model.load_state_dict(saved["model"])
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            self.state = saved["state"]
            print(f"resumed at step {self.state['step']}", flush=True)
        self.held_out = held_out_batches(self.tokenizer, HELD_OUT_SEED, HELD_OUT_PER_FAMILY, ROWS)
        for layer in self.model.model.layers:
            layer.compile()
        self.model.model.hc_head.compile()

    def save(self) -> None:
        """Write the state under another name first: a killed run leaves the last one whole."""
        partial = self.snapshot.with_suffix(".partial")
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        state = {"model": self.model.state_dict(), "optimizers": optimizers, "state": self.state}
        torch.save(state, partial)
        partial.replace(self.snapshot)

    def evaluate(self) -> float:
        """Held-out nats per assistant token.

        With gradients on, though none is used: otherwise the layers would be compiled again.
        """
        losses = [token_losses(self.model, batch).detach() for batch in self.held_out]
        return round(torch.cat(losses).mean().item(), 4)

    def step(self, scale: float) -> float:
        """One optimizer step at ``scale`` times the base rates; returns the loss."""
        step = self.state["step"]
        for group, base in zip(self.groups, self.base, strict=True):
            group["lr"] = base * scale * min(1.0, (step + 1) / WARMUP_STEPS)
        total, tokens = 0.0, 0
        for part in range(step * BATCHES, (step + 1) * BATCHES):
            losses = token_losses(self.model, training_batch(self.tokenizer, 0, part, ROWS))
            losses.sum().backward()
            total, tokens = total + losses.sum().item(), tokens + len(losses)
        if not math.isfinite(total):
            raise FloatingPointError(f"the loss is {total} at step {step}")
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        torch._foreach_div_([p.grad for p in parameters], float(tokens))  # every token counts alike
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.state["step"] = step + 1
        return total / tokens

    def train(self, minutes: float, *, decay: bool) -> None:
        """Run until ``minutes`` of this phase are spent."""
        seconds = 0.0 if decay else self.state["seconds"]
        saved, losses, compiled = seconds, [], False
        while seconds < minutes * 60:
            started = time.monotonic()
            losses.append(self.step(1 - seconds / (minutes * 60) if decay else 1.0))
            seconds += time.monotonic() - started if compiled else 0.0  # compiling does not count
            compiled = True
            last = seconds >= minutes * 60
            if last or self.state["step"] % LOG_STEPS == 0:
                self.log(seconds, losses, decay=decay, last=last)
            if not decay:
                self.state["seconds"] = seconds
                if last or seconds - saved > SAVE_SECONDS:
                    self.save()
                    saved = seconds

    def log(self, seconds: float, losses: list[float], *, decay: bool, last: bool) -> None:
        """A line of the training log, at some steps with the held-out loss; empties ``losses``."""
        step = self.state["step"]
        record = {"step": step, "minutes": round(seconds / 60, 2), "decay": decay}
        record["train_loss"] = round(sum(losses) / len(losses), 4)
        losses.clear()
        if last or step % EVALUATION_STEPS == 0:
            record["held_out"] = self.evaluate()
        with (self.args.work / "training_log.jsonl").open("a") as out:
            out.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder with the tokenizer")
    parser.add_argument("--work", type=Path, default=Path("build/tiny_target"))
    parser.add_argument("--minutes", type=float, default=90.0, help="of the constant phase")
    parser.add_argument("--decay-minutes", type=float, default=0.0, help="0: no decay, no export")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--expert-width", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    run = Run(args)
    run.train(args.minutes, decay=False)
    if args.decay_minutes:
        run.train(args.decay_minutes, decay=True)
        export(run.model, run.tokenizer, args.out)
        print(f"wrote {args.out}", flush=True)


if __name__ == "__main__":
    main()
