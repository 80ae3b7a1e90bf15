"""Which parts of the method pay: drafters of the tiny target that differ in one choice each.

    python examples/tiny_deepseek_v4/ablations.py train --data-dir DIR --part 1/2
    python examples/tiny_deepseek_v4/ablations.py train --data-dir DIR --part 2/2
    python examples/tiny_deepseek_v4/ablations.py serve --data-dir DIR
    python examples/tiny_deepseek_v4/ablations.py report --out eval/results/ablations

``train`` makes every variant with every seed on the same samples, ``serve`` measures tau of each
through a real server on held-out prompts (and that the answers are target-only's), ``report``
writes the table, the plot and the raw numbers. All resume: what is finished is not done again.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoTokenizer

import continuations
import corpus
from ablations_report import write_report
from sglang_hyperdflash.tools.acceptance import (
    accept_length_of,
    add_histograms,
    counters,
    position_acceptance,
)
from sglang_hyperdflash.tools.provenance import provenance
from sglang_hyperdflash.tools.server_process import (
    Server,
    comparable_arguments,
    hyperdflash_arguments,
)
from sglang_hyperdflash.training.drafter import Drafter, DrafterShape
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.monitor import Monitor
from sglang_hyperdflash.training.objective import Objective
from sglang_hyperdflash.training.recipe import Recipe
from sglang_hyperdflash.training.samples import FeatureCache
from sglang_hyperdflash.training.trainer import Trainer
from train_drafter import DFLASH_LAYERS, new_drafter

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Variant:
    """One choice against the baseline, which is the recipe of the committed drafter."""

    shape: DrafterShape = field(default_factory=DrafterShape)
    objective: Objective = field(default_factory=Objective)
    random_gate: bool = False


def fc(source: str, layer_ids: tuple[int, ...] = ()) -> Variant:
    """The generic projection of a source."""
    return Variant(DrafterShape(reducer="fc", source=source, layer_ids=layer_ids))


VARIANTS = {
    "baseline": Variant(),
    "random gate": Variant(random_gate=True),
    "fc": fc("pre_hc_head"),
    "no KL": Variant(objective=Objective(alpha=0.0)),
    "mean teacher": Variant(objective=Objective(teacher="mean")),
    "no path norm": Variant(DrafterShape(path_norm=False)),
    "layers 1-3, fc": fc("layers", DFLASH_LAYERS),
}


def run_folder(work: Path, name: str, seed: int) -> Path:
    """Where a variant's run with a seed keeps its state, drafter and numbers."""
    return work / name.replace(" ", "-").replace(",", "") / f"seed-{seed}"


def make_drafter(target: LocalTarget, tokenizer, variant: Variant, seed: int) -> Drafter:
    """An untrained drafter of a variant."""
    torch.manual_seed(seed)
    drafter = new_drafter(target, tokenizer, variant.shape)
    if variant.random_gate:
        drafter.reducer.randomise()
    return drafter


def train(args: argparse.Namespace) -> None:
    """Train this part's share of variants and seeds."""
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = LocalTarget(args.target)
    samples, unseen = continuations.load(
        target, tokenizer, args.data_dir, args.samples, args.per_kind
    )
    cache = FeatureCache(target, samples[:: args.every_nth], layer_ids=DFLASH_LAYERS)
    held_out = {
        kind: FeatureCache(target, part, layer_ids=DFLASH_LAYERS) for kind, part in unseen.items()
    }
    part, parts = map(int, args.part.split("/"))
    runs = [(name, seed) for seed in args.seeds for name in VARIANTS][part - 1 :: parts]
    for name, seed in runs:
        variant, folder = VARIANTS[name], run_folder(args.work, name, seed)
        recipe = Recipe(steps=args.steps, every=args.steps, seed=seed, objective=variant.objective)
        drafter = make_drafter(target, tokenizer, variant, seed)
        trainer = Trainer(drafter, target, cache, held_out, recipe, folder)
        if trainer.progress() < 1.0:
            with Monitor(trainer, f"{name} {seed}") as monitor:
                record = trainer.run(folder / "drafter", monitor)
            record |= {"samples": len(cache.samples), "provenance": provenance()}
            (folder / "trained.json").write_text(json.dumps(record, indent=2) + "\n")


def held_out_prompts(tokenizer, data_dir: Path, per_kind: int) -> dict[str, list[list[int]]]:
    """Prompts by kind of text, none of them trained on."""
    split, chosen = corpus.load(data_dir), {}
    for kind in corpus.KINDS:
        prompts = continuations.prompts_of(tokenizer, split[kind]["held_out"])
        chosen[kind] = prompts[:: max(1, len(prompts) // per_kind)][:per_kind]
    return chosen


def ask_all(server: Server, prompts: list[list[int]], concurrency: int) -> list[dict]:
    """Every prompt's greedy answer."""
    sampling = {"temperature": 0, "max_new_tokens": continuations.MAX_NEW}

    def ask(prompt: list[int]) -> dict:
        return server.generate(input_ids=prompt, sampling_params=sampling)

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(ask, prompts))


def measure(answers: dict[str, list[dict]], expected: dict[str, list[list[int]]]) -> dict:
    """Served tau by kind and in the mean over kinds, and answers equal to target-only's."""
    found: dict = {"held_out": {}}
    same = total = 0
    for kind, given in answers.items():
        histogram = add_histograms(counters(answer["meta_info"])[2] for answer in given)
        found["held_out"][kind] = {
            "tau": accept_length_of(histogram),
            "position_acceptance": position_acceptance(histogram, DrafterShape.block_size - 1),
            "rounds": sum(histogram),
        }
        same += sum(a["output_ids"] == ids for a, ids in zip(given, expected[kind], strict=True))
        total += len(given)
    taus = [entry["tau"] for entry in found["held_out"].values()]
    return found | {"tau": sum(taus) / len(taus), "identical": same, "answers": total}


def serve(args: argparse.Namespace) -> None:
    """Serve target-only once and every trained drafter, one after another."""
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    prompts = held_out_prompts(tokenizer, args.data_dir, args.prompts)
    log = args.work / "server.log"
    path = args.work / "target.json"
    if not path.is_file():
        with Server(args.target, *comparable_arguments(), log=log).wait() as server:
            answers = {k: ask_all(server, p, args.concurrency) for k, p in prompts.items()}
        path.write_text(
            json.dumps({k: [a["output_ids"] for a in given] for k, given in answers.items()})
        )
    expected = json.loads(path.read_text())
    if {k: len(v) for k, v in expected.items()} != {k: len(v) for k, v in prompts.items()}:
        raise SystemExit(f"{path} holds answers to other prompts; delete it and the served.json.")
    for folder in sorted(args.work.glob("*/seed-*")):
        if not (folder / "trained.json").is_file() or (folder / "served.json").is_file():
            continue
        draft = hyperdflash_arguments(folder / "drafter")
        with Server(args.target, *comparable_arguments(), *draft, log=log).wait() as server:
            answers = {k: ask_all(server, p, args.concurrency) for k, p in prompts.items()}
        found = measure(answers, expected) | {"provenance": provenance()}
        (folder / "served.json").write_text(json.dumps(found, indent=2) + "\n")
        print(
            f"{folder.parent.name} {folder.name}: tau {found['tau']:.3f}, "
            f"{found['identical']} of {found['answers']} answers are target-only's",
            flush=True,
        )


def report(args: argparse.Namespace) -> None:
    """Collect what was served into the report."""
    results = {}
    for name in VARIANTS:
        runs = []
        for folder in sorted(run_folder(args.work, name, 0).parent.glob("seed-*")):
            if (folder / "served.json").is_file():
                served, trained = (
                    json.loads((folder / f"{part}.json").read_text())
                    for part in ("served", "trained")
                )
                runs.append({"seed": int(folder.name[5:]), "served": served, "trained": trained})
        results[name] = runs
    write_report(results, args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    for run in (train, serve, report):
        command = commands.add_parser(run.__name__, help=run.__doc__)
        command.add_argument("--work", type=Path, default=Path("build/ablations"))
        command.set_defaults(run=run)
        if run is report:
            command.add_argument("--out", type=Path, default=Path("eval/results/ablations"))
            continue
        command.add_argument("--target", type=Path, default=HERE / "target")
        command.add_argument("--data-dir", type=Path, required=True)
        if run is serve:
            command.add_argument("--prompts", type=int, default=40, help="of each kind")
            command.add_argument("--concurrency", type=int, default=8)
            continue
        command.add_argument("--samples", type=Path, default=Path("build/tiny_drafter"))
        command.add_argument("--per-kind", type=int, default=3000)
        command.add_argument("--every-nth", type=int, default=2, help="share of the samples: 1/n")
        command.add_argument("--steps", type=int, default=600)
        command.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
        command.add_argument("--part", default="1/1", help="i/n: every n-th run from the i-th")
        command.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
