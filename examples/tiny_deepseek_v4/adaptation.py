"""Does a drafter that learns from the traffic it serves gain, by its gate alone or by everything?

    python examples/tiny_deepseek_v4/adaptation.py --traffic FILE.jsonl ... --answers ANSWERS \
        --out eval/results/adaptation

A file of ``{"turns": [...]}`` lines is a traffic of its own. The target answers its prompts; the
drafter learns from most of them, and simulated tau on the others is compared with the drafter's as
it was. ``--answers`` is a folder of ``own_answers.py``: what the same costs on the text that the
drafter was trained on.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from drafter_study import read_prompts
from msgspec import structs
from retrain import evaluate
from transformers import AutoTokenizer

import continuations
from sglang_hyperdflash.tools.atomic import write_json, write_text
from sglang_hyperdflash.tools.provenance import provenance
from sglang_hyperdflash.training.conversations import load_samples
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.recipe import read_schedule
from sglang_hyperdflash.training.samples import FeatureCache
from sglang_hyperdflash.training.trainer import Trainer

HERE = Path(__file__).resolve().parent
RECIPE = HERE / "drafters" / "hyperdflash2.toml"
# What learns -> the names of its parameters, and the learning rates to try.
GATE = ("reducer.fn", "reducer.base", "reducer.scale")
LEARNERS = {"the gate alone": (GATE, (2e-3, 2e-2)), "everything": (None, (2e-4, 1e-3))}


def adapted(
    args: argparse.Namespace,
    target: LocalTarget,
    traffic: FeatureCache,
    names: tuple[str, ...] | None,
    lr: float,
) -> tuple[Path, int]:
    """The checkpoint after learning from traffic, and how many numbers learnt."""
    drafter = Drafter.load(args.draft)
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_(names is None or name in names)
    if not any(parameter.requires_grad for parameter in drafter.parameters()):
        raise SystemExit(f"{args.draft} has no gate.")
    schedule = read_schedule(RECIPE)
    stage = structs.replace(
        schedule.stages[0],
        steps=args.steps,
        lr=lr,
        lr_floor=lr,
        warmup_steps=10,
        every=args.steps,
        dependency_gate=names is None,
    )
    recipe = stage.resolve(len(traffic.samples), schedule.objective)
    folder = args.work / "training"
    shutil.rmtree(folder, ignore_errors=True)
    Trainer(drafter, target, traffic, {}, recipe, folder).run(folder / "drafter")
    return folder / "drafter", sum(p.numel() for p in drafter.parameters() if p.requires_grad)


def measure(args: argparse.Namespace) -> None:
    """A row for each traffic and learner; written after each."""
    tokenizer, target = AutoTokenizer.from_pretrained(args.target), LocalTarget(args.target)
    length = read_schedule(RECIPE).max_length
    own = {
        path.stem: FeatureCache(target, load_samples([path], tokenizer, length).samples)
        for path in sorted(args.answers.glob("held_out_*.jsonl"))
        if not path.stem.endswith("_sampled")
    }
    own_before, rows = evaluate(args.draft, target, own)["tau"], []
    for path in args.traffic:
        asked = read_prompts(path, tokenizer, args.prompts)[path.stem]
        short = (tuple(p) for p in asked if len(p) <= continuations.MAX_PROMPT)
        prompts = list(map(list, dict.fromkeys(short)))  # none is in both parts
        answers = args.work / f"{path.stem}.jsonl"
        samples = continuations.generate(target, prompts, 0.0, answers)
        samples = [s for s in samples if s.answer_tokens >= continuations.SHORTEST_ANSWER]
        last, first = samples[:: args.every], list(samples)
        del first[:: args.every]
        traffic, unseen = FeatureCache(target, first), {path.stem: FeatureCache(target, last)}
        row = {"traffic": path.stem, "learnt": len(first), "unseen": len(last)}
        found = {"tau": evaluate(args.draft, target, unseen)["tau"], "own": own_before}
        rows.append(row | {"learner": "nothing", "numbers": 0, "lr": 0.0} | found)
        for learner, (names, rates) in LEARNERS.items():
            for lr in rates:
                drafter, numbers = adapted(args, target, traffic, names, lr)
                parts = {"tau": unseen, "own": own}
                found = {k: evaluate(drafter, target, part)["tau"] for k, part in parts.items()}
                rows.append(row | {"learner": learner, "numbers": numbers, "lr": lr} | found)
                print(rows[-1], flush=True)
                write(args, rows)


def write(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """The results and the report so far."""
    write_json(args.out / "results.json", {"provenance": provenance(), "rows": rows})
    lines = [
        "# A drafter that learns from the traffic it serves",
        "",
        f"Simulated tau at temperature 0 of HyperDFlash-2 on answers that it did not learn from, "
        f"before and after {args.steps} steps on others of the same traffic, and on the text that "
        "it was trained on.",
        "",
        "| traffic | answers learnt, unseen | what learns | numbers | learning rate | tau | "
        "tau on its own text |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        cells = (r["traffic"], f"{r['learnt']}, {r['unseen']}", r["learner"], r["numbers"])
        cells = (*cells, r["lr"] or "-", f"{r['tau']:.2f}", f"{r['own']:.2f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    write_text(args.out / "report.md", "\n".join([*lines, ""]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traffic", type=Path, nargs="+", required=True)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("build/adaptation"))
    parser.add_argument("--target", type=Path, default=HERE / "target")
    parser.add_argument("--draft", type=Path, default=HERE / "drafter")
    parser.add_argument("--prompts", type=int, default=600, help="of each traffic")
    parser.add_argument("--every", type=int, default=6, help="one answer in so many is not learnt")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    measure(args)


if __name__ == "__main__":
    main()
