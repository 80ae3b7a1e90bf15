"""Train one drafter in several precisions and compare the simulated accept lengths.

    python examples/tiny_deepseek_v4/study_precision.py --work build/precision --out precision.json

Each choice rounds one thing more than the one before it; data, seeds and held-out answers are the
same. On a CPU the bf16 products are computed as on a GPU: bf16 operands, fp32 sums. Every drafter
is replayed in fp32 on bf16 states. A training that is finished in ``--work`` is not repeated, so
processes can share the work (``--seeds``).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple
from unittest import mock

import torch

from own_answers import TARGET, write_answers
from sglang_hyperdflash.cli import main as hyperdflash
from sglang_hyperdflash.targets.chats import load_chats
from sglang_hyperdflash.tools.atomic import write_json
from sglang_hyperdflash.tools.provenance import provenance
from sglang_hyperdflash.training import trainer as trainer_module
from sglang_hyperdflash.training.cached import SHARD_BYTES, fill, identity_of
from sglang_hyperdflash.training.conversations import load_samples
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.monitor import Monitor
from sglang_hyperdflash.training.process_group import ProcessGroup
from sglang_hyperdflash.training.recipe import Recipe, read_schedule
from sglang_hyperdflash.training.samples import FeatureCache, Source
from sglang_hyperdflash.training.store.manifest import Data, data_digest
from sglang_hyperdflash.training.store.reader import StoreReader
from sglang_hyperdflash.training.trainer import Trainer
from study import SHAPE, VARIANTS, training_file

VARIANT, MAX_LENGTH = VARIANTS["hyperdflash2"], 256


class Choice(NamedTuple):
    """The precision of a training's vocabulary products, and of the target's states."""

    products: str
    states: str

    def __str__(self) -> str:
        return f"{self.products} products, {self.states} states"


CHOICES = (
    Choice("fp32", "fp32"),
    Choice("fp32", "bf16"),
    Choice("bf16", "bf16"),
    Choice("bf16", "fp8"),
)


@contextmanager
def gpu_products() -> Iterator[None]:
    """Let training steps compute bf16 products with fp32 sums, which a CPU's ``torch.mm`` lacks."""
    plain = torch.mm

    def mm(a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return plain(a.to(out_dtype), b.to(out_dtype))

    def products(device: torch.device, _enabled: bool) -> torch.autocast:
        return torch.autocast(device.type, torch.bfloat16)

    on_step = mock.patch.object(trainer_module, "bf16_products", products)
    with on_step, mock.patch.object(torch, "mm", mm):
        yield


class Study:
    """The target, its answers, and the states that the trainings read."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.answers = args, args.work / "answers"
        write_answers(self.answers, args.per_kind)
        self.target, self.chats = LocalTarget(TARGET), load_chats(str(TARGET))

    def source(self, files: list[Path], states: str) -> Source:
        """States of all answers of some files; in memory if fp32, else from a store."""
        samples = load_samples(list(map(str, files)), self.chats, MAX_LENGTH).samples
        if states == "fp32":
            return FeatureCache(self.target, samples, dtype=torch.float32)
        identity = replace(identity_of(self.target, ()), fp8=states == "fp8")
        data = Data(data_digest(samples), len(samples), SHARD_BYTES)
        place = self.args.work / "states" / f"{data.digest}-{states}"
        fill(place, self.target, samples, identity, data, ProcessGroup())
        return StoreReader(place)

    def held_out(self) -> dict[str, Source]:
        """By kind of problem and of answer."""
        paths = sorted(self.answers.glob("held_out_*.jsonl"))
        return {path.stem.removeprefix("held_out_"): self.source([path], "bf16") for path in paths}

    def recipe(self, folder: Path, seed: int) -> Recipe:
        """Of ``drafter.toml``, with one checkpoint, at the end."""
        steps = {"steps": self.args.steps, "every": self.args.steps}
        schedule = read_schedule(training_file(VARIANT, folder, self.answers, seed=seed, **steps))
        return schedule.stage[0].resolve(0, schedule.objective)

    def trained(self, choice: Choice, seed: int, held_out: dict[str, Source]) -> dict[str, Any]:
        """The record of a training's last step."""
        name = f"{choice.products}-{choice.states}-{self.args.steps}-steps"
        folder = self.args.work / name / f"seed-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        made = ["--target", str(TARGET), "--out", str(folder / "new"), "--seed", str(seed)]
        if hyperdflash(["init", *made, *SHAPE, *VARIANT.init]):
            raise SystemExit(f"{folder}: hyperdflash init failed.")
        files = [self.answers / f"{part}.jsonl" for part in ("greedy", "sampled")]
        train, recipe = self.source(files, choice.states), self.recipe(folder, seed)
        drafter = Drafter.load(folder / "new")
        trainer = Trainer(drafter, self.target, train, held_out, recipe, folder / "work")
        rounded = gpu_products() if choice.products == "bf16" else nullcontext()
        with rounded, Monitor(trainer, f"{choice}, seed {seed}") as monitor:
            trainer.run(folder / "trained", monitor)
        return trainer.records[-1]


def summary(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each choice, both accept lengths' mean over seeds, and the ratio to the choice before.

    The ratio is the mean over seeds, after which comes its standard error, if there are several.
    """
    rows: dict[str, dict[str, Any]] = {name: {} for name in found}
    for key in ("tau", "tau_sampled"):
        before: list[float] = []
        for name, seeds in found.items():
            taus = [record[key] for record in seeds.values()]
            rows[name][key] = round(mean(taus), 3)
            if before:
                ratios = [a / b for a, b in zip(taus, before, strict=True)]
                error = [stdev(ratios) / len(ratios) ** 0.5] if len(ratios) > 1 else []
                rows[name][f"{key}_ratio"] = [round(x, 4) for x in (mean(ratios), *error)]
            before = taus
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--work", type=Path, default=Path("build/precision"), help="of answers and trainings")
    add("--out", type=Path, required=True, help="JSON file of the result")
    add("--per-kind", type=int, default=500, help="training prompts of each kind")
    add("--steps", type=int, default=400, help="of a training")
    add("--seeds", type=int, nargs="+", default=[0, 1])
    add("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    study = Study(args)
    held_out = study.held_out()
    found: dict[str, dict[str, Any]] = {str(choice): {} for choice in CHOICES}
    for seed in args.seeds:
        for choice in CHOICES:
            found[str(choice)][str(seed)] = study.trained(choice, seed, held_out)
    report = {"summary": summary(found), "records": found, "provenance": provenance()}
    write_json(args.out, report, indent=1)
    for name, row in report["summary"].items():
        print(name, row)


if __name__ == "__main__":
    main()
