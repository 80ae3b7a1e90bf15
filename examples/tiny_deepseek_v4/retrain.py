"""Train a drafter from nothing but the tiny target, and compare it with the committed one.

    python examples/tiny_deepseek_v4/retrain.py --out build/retrain

Answers, states and training share ``--budget-minutes`` of wall time: 40 on two idle cores. Exit
status 1 when the new drafter's simulated accept length is lower than the committed one's.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import mean

import torch

from own_answers import PER_KIND, TARGET, answers, chosen_prompts, write_answers
from sglang_hyperdflash.targets.chats import load_chats
from sglang_hyperdflash.tools.atomic import write_json, write_text
from sglang_hyperdflash.tools.provenance import provenance
from sglang_hyperdflash.training.conversations import load_samples
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.replay import Replay
from sglang_hyperdflash.training.samples import FeatureCache
from study import VARIANTS, train_drafter

COMMITTED = TARGET.parent / "drafter"
# The target's states, checkpoints and the comparison.
RESERVE_MINUTES = 7.0
COMPARED, MAX_LENGTH = 120, 256


def compare(out: Path) -> dict[str, dict[str, float]]:
    """Simulated accept length by kind of the new drafter and the committed one.

    More held-out prompts of each kind than the checkpoints were chosen by, answered greedily.
    """
    target, chats = LocalTarget(TARGET), load_chats(str(TARGET))
    held_out = {}
    for kind, prompts in chosen_prompts(0, COMPARED)["held_out"].items():
        path = out / f"compared_{kind}.jsonl"
        write_text(path, "".join(f"{line}\n" for line in answers(target, prompts, 0.0)))
        held_out[kind] = FeatureCache(target, load_samples([path], chats, MAX_LENGTH).samples)
    found = {}
    for name, folder in (("retrained", out / "trained"), ("committed", COMMITTED)):
        replay = Replay(Drafter.load(folder), target)
        found[name] = {kind: replay.evaluate(source)["tau"] for kind, source in held_out.items()}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/retrain"))
    parser.add_argument("--per-kind", type=int, default=PER_KIND, help="prompts of each kind")
    parser.add_argument("--budget-minutes", type=float, default=40.0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.out.exists() and any(args.out.iterdir()):
        raise SystemExit(f"expected an empty folder, found files in {args.out}: choose another.")
    torch.set_num_threads(args.threads)
    started = time.monotonic()
    write_answers(args.out / "answers", args.per_kind)
    left = args.budget_minutes - RESERVE_MINUTES - (time.monotonic() - started) / 60
    if left <= 0:
        raise SystemExit("the answers took the whole budget: raise --budget-minutes.")
    lengths = {"steps": None, "minutes": left}
    train_drafter(
        VARIANTS["hyperdflash2"], args.out, args.out / "answers", 0, args.threads, **lengths
    )
    taus = compare(args.out)
    minutes = (time.monotonic() - started) / 60
    report = {"tau": taus, "minutes": round(minutes, 1), "provenance": provenance()}
    write_json(args.out / "report.json", report, indent=2)
    new, old = (mean(taus[name].values()) for name in ("retrained", "committed"))
    print(f"tau {new:.3f}, committed drafter {old:.3f}, {minutes:.1f} minutes")
    print(f"report: {args.out / 'report.json'}")
    return int(new < old)


if __name__ == "__main__":
    raise SystemExit(main())
