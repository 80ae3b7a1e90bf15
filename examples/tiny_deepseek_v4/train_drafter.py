"""Train the tiny target's drafter on the target's own continuations.

    python examples/tiny_deepseek_v4/train_drafter.py --data-dir DIR --target target --out drafter

Generates continuations (half greedy, half at temperature 0.7), caches the target's states, then
trains with CE + KL, the gate inherited from the target's hc_head. Both halves resume.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer

import continuations
from sglang_hyperdflash.training.data import FeatureCache
from sglang_hyperdflash.training.drafter import Drafter, DrafterShape, draft_config
from sglang_hyperdflash.training.loop import Recipe, Trainer
from sglang_hyperdflash.training.monitor import Monitor
from sglang_hyperdflash.training.target import LocalTarget
from sglang_hyperdflash.training.target_files import TargetFacts


def new_drafter(target: LocalTarget, tokenizer, shape: DrafterShape) -> Drafter:
    """An untrained drafter for the tiny target, its gate inherited."""
    facts = TargetFacts.from_config(target.config.to_dict())
    drafter = Drafter(draft_config(facts, target.hc_head, shape, tokenizer.mask_token_id))
    drafter.inherit(target.hc_head)
    return drafter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("build/tiny_drafter"))
    parser.add_argument("--per-kind", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=35.0)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = LocalTarget(args.target)
    samples, unseen = continuations.load(target, tokenizer, args.data_dir, args.work, args.per_kind)
    held_out = {kind: FeatureCache(target, part) for kind, part in unseen.items()}
    drafter = new_drafter(target, tokenizer, DrafterShape(layers=args.layers))
    recipe = Recipe(minutes=args.minutes)
    trainer = Trainer(drafter, target, FeatureCache(target, samples), held_out, recipe, args.work)
    with Monitor(trainer, "drafter") as monitor:
        trainer.run(args.out, monitor)


if __name__ == "__main__":
    main()
