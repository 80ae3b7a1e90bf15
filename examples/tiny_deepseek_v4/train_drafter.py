"""Train the tiny target's drafter on the target's own continuations.

    python examples/tiny_deepseek_v4/train_drafter.py --target target --out drafter
    python examples/tiny_deepseek_v4/train_drafter.py --target target --out dflash \\
        --method dflash --work build/tiny_dflash --samples build/tiny_drafter --steps 3575

Generates continuations (half greedy, half at temperature 1), caches the target's states, then
trains with CE + KL, the gate inherited from the target's hc_head. Both halves resume. ``dflash`` is
the rival: means of the paths after layers 1, 3 and 5, which SGLang chooses, a generic projection,
everything else the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer

import continuations
from sglang_hyperdflash.targets.files import TargetFacts
from sglang_hyperdflash.training.drafter import (
    Drafter,
    DrafterShape,
    draft_config,
    name_for_dflash,
)
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.monitor import Monitor
from sglang_hyperdflash.training.recipe import Recipe
from sglang_hyperdflash.training.samples import FeatureCache
from sglang_hyperdflash.training.trainer import Trainer

# What SGLang chooses for three draft layers and a target of eight (build_target_layer_ids).
DFLASH_LAYERS = (1, 3, 5)


def new_drafter(target: LocalTarget, tokenizer, shape: DrafterShape) -> Drafter:
    """An untrained drafter for the tiny target, its gate inherited."""
    facts = TargetFacts.from_config(target.config.to_dict())
    drafter = Drafter(draft_config(facts, target.hc_head, shape, tokenizer.mask_token_id))
    drafter.inherit(target.hc_head)
    return drafter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("build/tiny_drafter"))
    parser.add_argument("--per-kind", type=int, default=2000)
    parser.add_argument("--method", choices=("hyperdflash", "dflash"), default="hyperdflash")
    parser.add_argument("--samples", type=Path, help="folder of continuations (default: --work)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float)
    length.add_argument("--steps", type=int)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = LocalTarget(args.target)
    work = args.samples or args.work
    samples, unseen = continuations.load(target, tokenizer, work, args.per_kind)
    shape = DrafterShape(layers=args.layers)
    if args.method == "dflash":
        shape = DrafterShape(
            layers=args.layers, reducer="fc", source="layers", layer_ids=DFLASH_LAYERS
        )
    drafter = new_drafter(target, tokenizer, shape)

    def cache(samples) -> FeatureCache:
        return FeatureCache(target, samples, layer_ids=drafter.config.captured_layers)

    recipe = Recipe(steps=args.steps, minutes=None if args.steps else args.minutes or 35.0)
    held_out = {kind: cache(part) for kind, part in unseen.items()}
    trainer = Trainer(drafter, target, cache(samples), held_out, recipe, args.work)
    with Monitor(trainer, args.method) as monitor:
        trainer.run(args.out, monitor)
    if args.method == "dflash":
        name_for_dflash(args.out)


if __name__ == "__main__":
    main()
