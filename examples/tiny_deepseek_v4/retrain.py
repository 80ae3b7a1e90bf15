"""Retrain the tiny drafter from nothing but the target and the text, within a time budget.

    python examples/tiny_deepseek_v4/retrain.py --data-dir DIR --out build/retrain

Generation, the target's states, training and evaluation share ``--budget-minutes`` of wall time
(28 leaves room under 30 on two cores). Ends by replaying the same held-out answers with the
committed drafter and the new one; exit status 1 when the new one's mean tau is lower.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer

import continuations
from sglang_hyperdflash.provenance import provenance
from sglang_hyperdflash.training.data import FeatureCache
from sglang_hyperdflash.training.drafter import Drafter, DrafterShape
from sglang_hyperdflash.training.loop import Recipe, Trainer
from sglang_hyperdflash.training.monitor import Monitor
from sglang_hyperdflash.training.replay import Replay
from sglang_hyperdflash.training.target import LocalTarget
from train_drafter import new_drafter

HERE = Path(__file__).resolve().parent
# Checkpoints, the held-out replays and the comparison at the end.
RESERVE_MINUTES = 1.5


def evaluate(folder: Path, target: LocalTarget, held_out: dict[str, FeatureCache]) -> dict:
    """Simulated tau of a checkpoint folder, by kind and in the mean."""
    replay = Replay(Drafter.load(folder), target)
    found = {kind: replay.evaluate(source) for kind, source in held_out.items()}
    return {"tau": sum(r["tau"] for r in found.values()) / len(found), "held_out": found}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("build/retrain"))
    parser.add_argument("--target", type=Path, default=HERE / "target")
    parser.add_argument("--committed", type=Path, default=HERE / "drafter")
    parser.add_argument("--report", type=Path, help="JSON file (default: OUT/report.json)")
    parser.add_argument("--per-kind", type=int, default=3000)
    parser.add_argument("--budget-minutes", type=float, default=28.0)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> int:
    started = time.monotonic()
    args = arguments()
    if args.out.exists() and any(args.out.iterdir()):
        raise SystemExit(f"{args.out} is not empty: a budget starts from nothing; choose another.")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    timings: dict[str, float] = {}

    def lap(name: str) -> float:
        now = (time.monotonic() - started) / 60
        timings[name] = round(now - sum(timings.values()), 2)
        return now

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = LocalTarget(args.target)
    samples, unseen = continuations.load(target, tokenizer, args.data_dir, args.out, args.per_kind)
    lap("generation")
    cache = FeatureCache(target, samples)
    held_out = {kind: FeatureCache(target, part) for kind, part in unseen.items()}
    left = args.budget_minutes - RESERVE_MINUTES - lap("states")
    drafter = new_drafter(target, tokenizer, DrafterShape())
    recipe = Recipe(minutes=left, every=1000)
    trainer = Trainer(drafter, target, cache, held_out, recipe, args.out)
    with Monitor(trainer, "drafter") as monitor:
        trainer.run(args.out / "drafter", monitor)
    lap("training")
    found = evaluate(args.out / "drafter", target, held_out)
    expected = evaluate(args.committed, target, held_out)
    total = lap("comparison")
    report = {
        "tau": found,
        "committed_tau": expected,
        "steps": trainer.state["step"],
        "samples": len(samples),
        "minutes": timings | {"total": round(total, 2)},
        "provenance": provenance(),
    }
    path = args.report or args.out / "report.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"tau {found['tau']:.3f}, committed drafter {expected['tau']:.3f}, {total:.1f} minutes")
    print(f"report: {path}")
    return 0 if found["tau"] >= expected["tau"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
