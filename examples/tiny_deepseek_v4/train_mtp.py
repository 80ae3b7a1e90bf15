"""Train the tiny target's NextN (MTP) layer on the answers that its drafters learn from.

    python examples/tiny_deepseek_v4/train_mtp.py --answers build/study/answers --out mtp

Writes the checkpoint and a log line every ``--every`` steps.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean

import torch
from transformers import AutoTokenizer

import corpus
from nextn import NextNTrainer, new_nextn, nextn_config, save
from own_answers import TARGET
from sglang_hyperdflash.training.conversations import load_samples
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.samples import FeatureCache

MAX_LENGTH = 256  # of a conversation, as in drafter.toml


@torch.no_grad()
def accuracy(trainer: NextNTrainer, source: FeatureCache) -> float:
    """Share of held-out answer tokens that one step of the layer gets right."""
    training, trainer.source = trainer.source, source
    _, right = trainer.losses(list(range(len(source.samples))))
    trainer.source = training
    return round(right.item(), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answers", type=Path, required=True, help="of own_answers.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=16, help="samples a step")
    parser.add_argument("--every", type=int, default=400)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    tokenizer, target = AutoTokenizer.from_pretrained(TARGET), LocalTarget(TARGET)

    def cache(*names: str) -> FeatureCache:
        paths = [args.answers / f"{name}.jsonl" for name in names]
        return FeatureCache(target, load_samples(paths, tokenizer, MAX_LENGTH).samples)

    core = new_nextn(
        target, nextn_config(json.loads((TARGET / "config.json").read_text())), args.out
    )
    held_out = {kind: cache(f"held_out_{kind}") for kind in corpus.KINDS}
    source = cache("greedy", "sampled")
    trainer, losses = NextNTrainer(core, target, source, steps=args.steps, batch=args.batch), []
    while trainer.done < args.steps:
        losses.append(trainer.step()[0])
        if trainer.done % args.every and trainer.done < args.steps:
            continue
        record = {"step": trainer.done, "loss": mean(losses)}
        record["held_out"] = {kind: accuracy(trainer, part) for kind, part in held_out.items()}
        losses.clear()
        save(core, args.out)
        with (args.out / "training_log.jsonl").open("a") as log:
            log.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
