"""Train the tiny target's NextN (MTP) layer on the answers that its drafters learn from.

    python examples/tiny_deepseek_v4/train_mtp.py --answers build/study/answers --out mtp

``--work`` holds the state, written every ``--every`` steps; the same command resumes there.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer

import corpus
from nextn import NextNTrainer, new_nextn, nextn_config, save
from sglang_hyperdflash.training.conversations import load_samples
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.samples import FeatureCache

HERE = Path(__file__).resolve().parent
MAX_LENGTH = 256  # of a conversation, as in drafter.toml


@torch.no_grad()
def accuracy(trainer: NextNTrainer, source: FeatureCache) -> float:
    """Share of held-out answer tokens that one step of the layer gets right."""
    training, trainer.source = trainer.source, source
    _, right = trainer.losses(list(range(len(source.samples))))
    trainer.source = training
    return round(right.item(), 4)


def train(trainer: NextNTrainer, held_out: dict[str, FeatureCache], args) -> None:
    """Run to the end; write checkpoint, state and a log line every ``--every`` steps."""
    snapshot = args.work / "mtp.pt"
    settings = {"steps": args.steps, "batch": args.batch, "samples": len(trainer.source.samples)}
    if snapshot.is_file():
        state = torch.load(snapshot, weights_only=True)
        if (found := state.pop("settings", None)) != settings:
            raise SystemExit(
                f"{snapshot}: expected a run of {settings}, found {found}. Remove it or choose "
                "another --work."
            )
        trainer.load_state_dict(state)
    started, losses = time.monotonic(), []
    while trainer.done < trainer.steps:
        losses.append(trainer.step()[0])
        if trainer.done % args.every and trainer.done < trainer.steps:
            continue
        record = {"step": trainer.done, "loss": sum(losses) / len(losses)}
        record["minutes"] = round((time.monotonic() - started) / 60, 2)
        record["held_out"] = {kind: accuracy(trainer, part) for kind, part in held_out.items()}
        losses.clear()
        save(trainer.core, args.out)
        torch.save(trainer.state_dict() | {"settings": settings}, f"{snapshot}.partial")
        Path(f"{snapshot}.partial").replace(snapshot)
        with (args.out / "training_log.jsonl").open("a") as log:
            log.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, default=HERE / "target")
    parser.add_argument("--answers", type=Path, required=True, help="of own_answers.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("build/study/mtp"))
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=16, help="samples a step")
    parser.add_argument("--every", type=int, default=400)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = LocalTarget(args.target)
    args.work.mkdir(parents=True, exist_ok=True)

    def cache(*names: str) -> FeatureCache:
        paths = [args.answers / f"{name}.jsonl" for name in names]
        return FeatureCache(target, load_samples(paths, tokenizer, MAX_LENGTH).samples)

    raw = nextn_config(json.loads((args.target / "config.json").read_text()))
    core = new_nextn(target, raw, args.out)
    held_out = {kind: cache(f"held_out_{kind}") for kind in corpus.KINDS}
    trainer = NextNTrainer(
        core, target, cache("greedy", "sampled"), steps=args.steps, batch=args.batch
    )
    train(trainer, held_out, args)


if __name__ == "__main__":
    main()
