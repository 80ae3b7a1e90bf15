"""Retrain the tiny drafter from nothing but the target, within a time budget.

    python examples/tiny_deepseek_v4/retrain.py --out build/retrain

Generation, the target's states, training and evaluation share ``--budget-minutes`` of wall time
(40 leaves room under 45 on two cores). Ends by replaying held-out answers, more than the
checkpoints were chosen by, with the committed drafter and the new one; exit status 1 when the new
one's mean tau is lower.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from msgspec import structs
from transformers import AutoTokenizer

import continuations
import corpus
from sglang_hyperdflash.targets.files import TargetFacts
from sglang_hyperdflash.tools.provenance import provenance
from sglang_hyperdflash.training.drafter import Drafter, DrafterShape, draft_config
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.monitor import Monitor
from sglang_hyperdflash.training.recipe import read_schedule
from sglang_hyperdflash.training.replay import Replay
from sglang_hyperdflash.training.samples import FeatureCache
from sglang_hyperdflash.training.trainer import Trainer

HERE = Path(__file__).resolve().parent
# Checkpoints and the comparison at the end.
RESERVE_MINUTES = 2.0
# HyperDFlash-2.
RECIPE = HERE / "drafters" / "hyperdflash2.toml"
SHAPE = DrafterShape(dependency_rank=128)


def new_drafter(target: LocalTarget, tokenizer, shape: DrafterShape) -> Drafter:
    """An untrained drafter for the tiny target, its gate inherited."""
    facts = TargetFacts.from_config(target.config.to_dict())
    drafter = Drafter(draft_config(facts, target.hc_head, shape, tokenizer.mask_token_id))
    drafter.inherit(target.hc_head)
    return drafter


def evaluate(folder: Path, target: LocalTarget, held_out: dict[str, FeatureCache]) -> dict:
    """Simulated tau of a checkpoint folder, by kind and in the mean."""
    replay = Replay(Drafter.load(folder), target)
    found = {kind: replay.evaluate(source) for kind, source in held_out.items()}
    return {"tau": sum(r["tau"] for r in found.values()) / len(found), "held_out": found}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/retrain"))
    parser.add_argument("--target", type=Path, default=HERE / "target")
    parser.add_argument("--committed", type=Path, default=HERE / "drafter")
    parser.add_argument("--report", type=Path, help="JSON file (default: OUT/report.json)")
    parser.add_argument("--per-kind", type=int, default=5000)
    parser.add_argument("--budget-minutes", type=float, default=40.0)
    parser.add_argument("--compare-prompts", type=int, default=120, help="of each kind")
    parser.add_argument("--compare-only", action="store_true", help="a finished OUT once more")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def comparison(target: LocalTarget, tokenizer, args: argparse.Namespace) -> dict:
    """Both drafters on more held-out prompts than the checkpoints were chosen by."""
    split, held_out = corpus.load(), {}
    for kind in corpus.KINDS:
        unseen = continuations.prompts_of(tokenizer, split[kind]["held_out"])
        prompts = continuations.spread(unseen, args.compare_prompts)
        path = args.out / f"{kind}-comparison.jsonl"
        held_out[kind] = FeatureCache(target, continuations.generate(target, prompts, 0.0, path))
    return {
        "prompts": {kind: len(source.samples) for kind, source in held_out.items()},
        "tau": evaluate(args.out / "drafter", target, held_out),
        "committed_tau": evaluate(args.committed, target, held_out),
    }


def train(target: LocalTarget, tokenizer, args: argparse.Namespace, lap) -> dict:
    """Generate, compute states, train until the budget is spent; steps and samples."""
    samples, unseen = continuations.load(target, tokenizer, args.out, args.per_kind)
    lap("generation")
    cache = FeatureCache(target, samples)
    held_out = {kind: FeatureCache(target, part) for kind, part in unseen.items()}
    left = args.budget_minutes - RESERVE_MINUTES - lap("states")
    drafter = new_drafter(target, tokenizer, SHAPE)
    schedule = read_schedule(RECIPE)
    stage = structs.replace(schedule.stages[0], steps=None, minutes=left)
    recipe = stage.resolve(len(samples), schedule.objective)
    trainer = Trainer(drafter, target, cache, held_out, recipe, args.out)
    with Monitor(trainer, "drafter") as monitor:
        trainer.run(args.out / "drafter", monitor)
    lap("training")
    return {"steps": trainer.state["step"], "samples": len(samples)}


def main() -> int:
    started = time.monotonic()
    args = arguments()
    path = args.report or args.out / "report.json"
    if not args.compare_only and args.out.exists() and any(args.out.iterdir()):
        raise SystemExit(f"{args.out} is not empty: a budget starts from nothing; choose another.")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    timings: dict[str, float] = {}

    def lap(name: str) -> float:
        now = (time.monotonic() - started) / 60
        timings[name] = round(now - sum(timings.values()), 2)
        return now

    tokenizer, target = AutoTokenizer.from_pretrained(args.target), LocalTarget(args.target)
    if args.compare_only:
        report = json.loads(path.read_text())
    else:
        report = {**train(target, tokenizer, args, lap), "provenance": provenance()}
    report |= comparison(target, tokenizer, args)
    lap("comparison")
    report["minutes"] = {**report.get("minutes", {}), **timings}
    report["minutes"]["total"] = round(
        sum(v for k, v in report["minutes"].items() if k != "total"), 2
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
    found, expected = report["tau"]["tau"], report["committed_tau"]["tau"]
    minutes = report["minutes"]["total"]
    print(f"tau {found:.3f}, committed drafter {expected:.3f}, {minutes:.1f} minutes")
    print(f"report: {path}")
    return 0 if found >= expected else 1


if __name__ == "__main__":
    raise SystemExit(main())
