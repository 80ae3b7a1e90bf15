"""``hyperdflash train``: stages from a TOML file, each a run of :class:`Trainer`.

target = "DIR"            # the model that is accelerated
draft = "DIR"             # from `hyperdflash init`
out = "DIR"               # the trained drafter
max_length = 512          # tokens of a conversation
features = "cache"        # or "online": the target's states anew for each batch; or
                          # "captured": data and held_out are folders of `hyperdflash capture`
[held_out]                # simulated tau is the mean over these
math = "math.jsonl"
[objective]               # alpha, T, P, teacher, weights, gamma: see training.objective
[[stage]]                 # one or more, in order; each starts from the best of the one before
data = ["a.jsonl"]       # files, or "hub:OWNER/NAME" data sets
epochs = 5                # or steps, or minutes
lr = 8e-4                 # and the other fields of training.loop.Recipe
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from sglang_hyperdflash.draft.config import HyperDFlashConfig, check_fingerprint, load_config
from sglang_hyperdflash.draft.hc_head import tensors_fingerprint
from sglang_hyperdflash.targets.files import TargetFacts, TargetFiles
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.borrowed_target import BorrowedTarget
from sglang_hyperdflash.training.captured import CapturedFeatures
from sglang_hyperdflash.training.conversations import data_place, load_samples
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.monitor import Monitor
from sglang_hyperdflash.training.objective import Objective
from sglang_hyperdflash.training.process_group import ProcessGroup
from sglang_hyperdflash.training.samples import FeatureCache, OnlineFeatures, Source
from sglang_hyperdflash.training.trainer import Recipe, Trainer

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FEATURES = ("cache", "online", "captured")
PORTABLE = "PortableDeepSeekV4ForCausalLM"  # loaded by this package; others by transformers


@dataclass(frozen=True)
class Stage:
    """One stage: its files, its length in epochs (or in its recipe), and its other fields."""

    data: tuple[Path | str, ...]
    epochs: float | None
    recipe: dict[str, Any]

    def resolve(self, samples: int, objective: Objective) -> Recipe:
        """The recipe for so many samples."""
        values = dict(self.recipe)
        if self.epochs is not None:
            batch = values.get("batch", Recipe.batch)
            values["steps"] = max(1, math.ceil(self.epochs * samples / batch))
        return Recipe(**values, objective=objective)


@dataclass(frozen=True)
class Schedule:
    """A checked training file; relative paths count from its folder."""

    target: str
    draft: Path
    out: Path
    max_length: int
    features: str
    held_out: dict[str, Path | str]
    objective: Objective
    stages: tuple[Stage, ...]


def read_schedule(path: Path) -> Schedule:
    """Read and check a training file.

    Raises:
        FileNotFoundError: no such file. HyperDFlashConfigError: not TOML, or a field is missing,
            unknown or wrong.
    """
    if not path.is_file():
        raise FileNotFoundError(f"--config {path} does not exist.")
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise HyperDFlashConfigError(f"{path} is not TOML: {error}.") from error
    known = {f.name for f in fields(Schedule)} - {"stages"} | {"stage"}
    _refuse_unknown(raw, known, str(path))
    for name in ("target", "draft", "out", "stage"):
        if not raw.get(name):
            raise HyperDFlashConfigError(f"{path}: {name} is missing.")
    features = raw.get("features", "cache")
    if features not in FEATURES:
        raise HyperDFlashConfigError(
            f"{path}: features must be one of {', '.join(FEATURES)}; found {features!r}."
        )
    objective = raw.get("objective", {})
    _refuse_unknown(objective, {f.name for f in fields(Objective)}, f"{path}: [objective]")
    base = path.resolve().parent
    return Schedule(
        target=str(base / raw["target"]) if (base / raw["target"]).is_dir() else raw["target"],
        draft=base / raw["draft"],
        out=base / raw["out"],
        max_length=int(raw.get("max_length", 2048)),
        features=features,
        held_out={kind: data_place(base, file) for kind, file in raw.get("held_out", {}).items()},
        objective=Objective(**objective),
        stages=tuple(
            _stage(entry, base, f"{path}: stage {i}") for i, entry in enumerate(raw["stage"], 1)
        ),
    )


def _stage(entry: Mapping[str, Any], base: Path, where: str) -> Stage:
    allowed = {f.name for f in fields(Recipe)} - {"objective"} | {"data", "epochs"}
    _refuse_unknown(entry, allowed, where)
    if not entry.get("data"):
        raise HyperDFlashConfigError(f"{where}: data is missing.")
    lengths = [name for name in ("epochs", "steps", "minutes") if name in entry]
    if len(lengths) != 1:
        raise HyperDFlashConfigError(
            f"{where} needs exactly one of epochs, steps or minutes; found {lengths or 'none'}."
        )
    recipe = {k: v for k, v in entry.items() if k not in ("data", "epochs")}
    return Stage(
        tuple(data_place(base, file) for file in entry["data"]), entry.get("epochs"), recipe
    )


def _refuse_unknown(section: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(section) - known)
    if unknown:
        raise HyperDFlashConfigError(
            f"{where}: unknown field {unknown[0]}; known are {', '.join(sorted(known))}."
        )


def load_pair(schedule: Schedule):
    """The target, or what is borrowed of a captured one, and the untrained drafter.

    Raises:
        HyperDFlashConfigError: they do not belong together.
    """
    load_config(schedule.draft)  # says what is wrong with the folder, if something is
    drafter = Drafter.load(schedule.draft)
    files = TargetFiles(schedule.target)
    facts = TargetFacts.from_config(files.config())
    hc_head = files.hc_head(facts.hc_mult, facts.hidden_size)
    check_fingerprint(drafter.config, None if hc_head is None else hc_head.fingerprint())
    if schedule.features == "captured":
        return BorrowedTarget(files), drafter
    if facts.architecture == PORTABLE:
        from sglang_hyperdflash.training.local_target import LocalTarget

        return LocalTarget(schedule.target), drafter
    from sglang_hyperdflash.training.transformers_target import TransformersTarget

    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return TransformersTarget(schedule.target, dtype=dtype), drafter


def train(schedule: Schedule, work: Path, world: ProcessGroup, device: torch.device) -> None:
    """Run every stage; finished ones are skipped, a cut one resumes."""
    from transformers import AutoTokenizer

    target, drafter = load_pair(schedule)
    target.to(device)
    tokenizer = None
    if schedule.features != "captured":
        tokenizer = AutoTokenizer.from_pretrained(schedule.target)

    def source(files: tuple[Path | str, ...], title: str) -> Source:
        if schedule.features == "captured":
            return captured(files, drafter.config, target.norm)
        loaded = load_samples(files, tokenizer, schedule.max_length)
        if world.is_main:
            print(f"{title}: {loaded}", flush=True)
        kind = FeatureCache if schedule.features == "cache" else OnlineFeatures
        return kind(target, loaded.samples, layer_ids=drafter.config.captured_layers)

    held_out = {kind: source((file,), kind) for kind, file in schedule.held_out.items()}
    best = schedule.draft
    for number, stage in enumerate(schedule.stages, 1):
        folder = work / f"stage-{number}"
        features = source(stage.data, f"stage {number}")
        drafter = Drafter.load(best).to(device)
        recipe = stage.resolve(len(features.samples), schedule.objective)
        trainer = Trainer(drafter, target, features, held_out, recipe, folder, world)
        with Monitor(trainer, f"stage {number}") as monitor:
            trainer.run(folder / "best", monitor)
        best = folder / "best"
    if world.is_main:
        shutil.copytree(best, schedule.out, dirs_exist_ok=True)
        print(f"trained drafter: {schedule.out}")


def captured(
    folders: tuple[Path | str, ...], config: HyperDFlashConfig, norm: torch.Tensor
) -> CapturedFeatures:
    """A stage's capture, refused unless it is of the drafter's target.

    Args:
        config: the drafter's. norm: ``[d]``, the target's final norm.
    """
    if len(folders) != 1:
        raise HyperDFlashConfigError("captured features take one folder a stage.")
    features = CapturedFeatures(folders[0])
    expected = {
        "hc_mult": config.hc_mult,
        "hidden_size": config.hidden_size,
        "hc_head_fingerprint": config.target.hc_head_fingerprint,
        "norm_fingerprint": tensors_fingerprint(norm),
    }
    for name, wanted in expected.items():
        found = getattr(features.identity, name)
        if found != wanted:
            raise HyperDFlashConfigError(
                f"{folders[0]} was captured from another target: its {name} is {found}, the "
                f"drafter's target has {wanted}."
            )
    return features


def add_parser(commands) -> None:
    """Register ``train`` and its arguments."""
    parser = commands.add_parser(
        "train",
        help="train a drafter",
        description="Train a drafter in the stages of a TOML file; run again to resume. For many "
        "processes: torchrun --nproc-per-node N -m sglang_hyperdflash.cli train ...",
    )
    parser.add_argument("--config", type=Path, required=True, help="training file (TOML)")
    parser.add_argument("--work", type=Path, required=True, help="folder for states and logs")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--threads", type=int, help="CPU threads of each process")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train as the file says."""
    schedule = read_schedule(args.config)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    world = ProcessGroup()
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        torch.cuda.set_device(world.local_rank)
    try:
        train(schedule, args.work, world, device)
    finally:
        world.close()
    return 0
