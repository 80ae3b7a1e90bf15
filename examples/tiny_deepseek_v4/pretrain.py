"""Train the target on generated exchanges: a constant learning rate, then a decay at will.

    python examples/tiny_deepseek_v4/make_tokenizer.py --out target
    python examples/tiny_deepseek_v4/pretrain.py --out target --minutes 90 --decay-minutes 20

The constant phase's state is kept in ``--work``; the same command line resumes it there, with
more ``--minutes`` it goes on. The decay starts from that state and leaves it alone, so that a run
can be extended after its result was written. An average of the last steps' weights shows in the
log what a decay would give: held-out nats of a token, and the share of the exchanges whose every
token is the likeliest one, which is less than the share that the checkers would accept.

Each of ``--processes`` has one thread and its share of a step's rows: on a machine with other work,
one process waiting once a step loses less than threads waiting at every product.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoTokenizer

from muon import Muon
from pretrain_data import held_out_batches, training_batch
from pretrain_model import export, make_config, make_model, token_losses, token_scores

HELD_OUT_SEED, HELD_OUT_PER_FAMILY = 1000, 24
WARMUP_STEPS, LOG_STEPS, EVALUATION_STEPS, SAVE_SECONDS = 100, 25, 250, 180
AVERAGED_STEPS = 100  # that the average of weights looks back over


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="holds the tokenizer already")
    parser.add_argument("--work", type=Path, default=Path("build/tiny_target"))
    parser.add_argument("--minutes", type=float, default=90.0, help="of the constant phase")
    parser.add_argument("--decay-minutes", type=float, default=0.0, help="0: no decay, no export")
    parser.add_argument(
        "--average", action="store_true", help="write the averaged weights, without a decay"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--expert-width", type=int, default=128)
    parser.add_argument("--rows", type=int, default=32, help="rows of 128 tokens a step")
    parser.add_argument("--matrix-lr", type=float, default=0.015)
    parser.add_argument("--embedding-lr", type=float, default=2e-2)
    parser.add_argument("--other-lr", type=float, default=3e-3)
    parser.add_argument("--weights", type=json.loads, help='e.g. {"addition": 2, "sort": 1}')
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    return parser.parse_args()


def make_optimizers(model, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embedding, head, gates, norms and sinks."""
    embedding = model.model.embed_tokens.weight
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        inner = name.startswith("model.layers") and "_hc" not in name and ".gate." not in name
        if parameter is not embedding:
            (matrices if inner and parameter.dim() >= 2 else others).append(parameter)
    return [
        Muon(matrices, lr=args.matrix_lr, weight_decay=0.05),
        torch.optim.AdamW(
            [
                {"params": [embedding], "lr": args.embedding_lr},
                {"params": others, "lr": args.other_lr},
            ],
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=True,
        ),
    ]


class Run:
    """A training run: model, optimizers and where it stands; alike in every process."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self.args, self.rank = args, rank
        self.rows = args.rows // args.processes
        self.compiled = False
        self.tokenizer = AutoTokenizer.from_pretrained(args.out)
        self.model = make_model(make_config(self.tokenizer, args.layers, args.expert_width))
        self.optimizers = make_optimizers(self.model, args)
        self.base = [
            [group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers
        ]
        self.state = {"step": 0, "seconds": 0.0}
        self.average = [p.detach().clone() for p in self.model.parameters()]
        self.snapshot = args.work / "state.pt"
        if self.snapshot.is_file():
            saved = torch.load(self.snapshot, weights_only=True)
            self.model.load_state_dict(saved["model"])
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            self.average = saved["average"]
            self.state = saved["state"]
            self.report(f"resumed at step {self.state['step']}")
        self.held_out = held_out_batches(
            self.tokenizer, HELD_OUT_SEED, HELD_OUT_PER_FAMILY, self.rows
        )
        for layer in self.model.model.layers:
            layer.compile()
        self.model.model.hc_head.compile()

    def report(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def save(self) -> None:
        """Write the state under another name first: a killed run leaves the last one whole."""
        partial = self.snapshot.with_suffix(".partial")
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        saved = {"model": self.model.state_dict(), "optimizers": optimizers, "state": self.state}
        torch.save(saved | {"average": self.average}, partial)
        partial.replace(self.snapshot)

    def log(self, record: dict) -> None:
        with (self.args.work / "training_log.jsonl").open("a") as out:
            out.write(json.dumps(record) + "\n")
        self.report(json.dumps(record))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model with the average of its last steps' weights."""
        parameters = [p.data for p in self.model.parameters()]
        own = [p.clone() for p in parameters]
        torch._foreach_copy_(parameters, self.average)
        try:
            yield
        finally:
            torch._foreach_copy_(parameters, own)

    def evaluate(self) -> dict[str, list[float]]:
        """Held-out nats per assistant token and share of exact exchanges, by family and of all.

        With gradients on, though none is asked for: without, the layers would be compiled again.
        """
        sums: dict[str, list[float]] = {}
        for batch in self.held_out:
            losses, hits = token_scores(self.model, batch)
            wanted = batch.learned[:, 1:]
            families = batch.families[:, 1:][wanted]
            rows = torch.arange(len(wanted)).unsqueeze(1).expand_as(wanted)[wanted]
            exchanges = rows * wanted.shape[1] + batch.documents[:, 1:][wanted]
            for exchange in exchanges.unique():
                own = exchanges == exchange
                entry = sums.setdefault(batch.names[families[own][0]], [0.0, 0, 0, 0])
                exact = hits[own].all().item()
                for i, value in enumerate((losses[own].sum().item(), int(own.sum()), exact, 1)):
                    entry[i] += value
        sums["all"] = [sum(entry[i] for entry in sums.values()) for i in range(4)]
        return {
            name: [round(total / tokens, 4), round(exact / number, 2)]
            for name, (total, tokens, exact, number) in sums.items()
        }

    def step(self, scale: float) -> tuple[float, float]:
        """One optimizer step at ``scale`` times the base rates; returns loss and seconds."""
        started, step = time.monotonic(), self.state["step"]
        for optimizer, rates in zip(self.optimizers, self.base, strict=True):
            for group, base in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = base * scale * min(1.0, (step + 1) / WARMUP_STEPS)
        part = step * self.args.processes + self.rank
        batch = training_batch(self.tokenizer, self.args.seed, part, self.rows, self.args.weights)
        losses = token_losses(self.model, batch)
        # A process's tokens count alike, whichever process they are in.
        losses.sum().backward()
        loss = self.average_gradients(losses)
        if not math.isfinite(loss):
            raise FloatingPointError(f"loss is {loss} at step {step}")
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        share = max(1 / AVERAGED_STEPS, 1 / (step + 1))
        torch._foreach_lerp_(self.average, [p.data for p in self.model.parameters()], share)
        self.state["step"] = step + 1
        spent = time.monotonic() - started if self.compiled else 0.0  # compiling is not training
        self.compiled = True
        seconds = torch.tensor(spent)
        dist.broadcast(seconds, 0)  # all processes end a phase at the same step
        return loss, seconds.item()

    def average_gradients(self, losses: torch.Tensor) -> float:
        """Make every gradient the mean over all processes' tokens; returns the mean loss."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        counts = torch.tensor([losses.detach().sum().item(), float(len(losses))])
        flat = torch.cat([counts, *(p.grad.flatten() for p in parameters)])
        dist.all_reduce(flat)
        total, tokens = flat[:2].tolist()
        offset = 2
        for parameter in parameters:
            size = parameter.numel()
            parameter.grad.copy_(flat[offset : offset + size].view_as(parameter) / tokens)
            offset += size
        return total / tokens

    def train(self, minutes: float, *, decay: bool) -> None:
        """Run until ``minutes`` of this phase are spent; the decay is linear to zero."""
        seconds = 0.0 if decay else self.state["seconds"]
        saved, losses = seconds, []
        while seconds < minutes * 60:
            loss, spent = self.step(1 - seconds / (minutes * 60) if decay else 1.0)
            losses.append(loss)
            seconds += spent
            if not decay:
                self.state["seconds"] = seconds
            last = seconds >= minutes * 60
            if self.rank == 0:
                self.log_step(seconds, losses, decay=decay, last=last)
            if self.rank == 0 and not decay and (seconds - saved > SAVE_SECONDS or last):
                self.save()
                saved = seconds

    def log_step(self, seconds: float, losses: list[float], *, decay: bool, last: bool) -> None:
        """Log at some steps, at fewer the held-out loss too; empties ``losses`` when it does."""
        step = self.state["step"]
        if step % LOG_STEPS and not last:
            return
        record = {"step": step, "minutes": round(seconds / 60, 2), "decay": decay}
        record["train_loss"] = round(sum(losses) / len(losses), 4)
        losses.clear()
        if last or step % EVALUATION_STEPS == 0:
            with nullcontext() if decay else self.averaged():
                record["held_out"] = self.evaluate()
        self.log(record)


def work(rank: int, args: argparse.Namespace, meeting: str) -> None:
    """One process of a run."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=args.processes
    )
    run = Run(args, rank)
    run.train(args.minutes, decay=False)
    if args.decay_minutes:
        run.train(args.decay_minutes, decay=True)
    if rank == 0 and (args.decay_minutes or args.average):
        with nullcontext() if args.decay_minutes else run.averaged():
            export(run.model, run.tokenizer, args.out)
        print(f"wrote {args.out}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    args = parse_arguments()
    if args.rows % args.processes:
        raise SystemExit(f"--rows {args.rows} is no multiple of --processes {args.processes}.")
    args.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (args, f"{folder}/meeting"), nprocs=args.processes)


if __name__ == "__main__":
    main()
