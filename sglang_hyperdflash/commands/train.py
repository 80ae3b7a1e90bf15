"""``hyperdflash train``: the stages of a training file, each a run of :class:`Trainer`.

What the file holds: :mod:`sglang_hyperdflash.training.recipe`.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from sglang_hyperdflash.draft.checkpoint import weight_files
from sglang_hyperdflash.draft.config import HyperDFlashConfig, check_fingerprint, load_config
from sglang_hyperdflash.draft.hc_head import tensors_fingerprint
from sglang_hyperdflash.targets.chats import load_chats
from sglang_hyperdflash.targets.files import TargetFacts, TargetFiles, drafter_folder
from sglang_hyperdflash.tools.atomic import replacing, write_text
from sglang_hyperdflash.tools.command_line import COUNT
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.ownership import check, claim, keep_apart, location
from sglang_hyperdflash.training.cached import cached
from sglang_hyperdflash.training.conversations import Loaded, load_samples
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.local_target import BorrowedTarget, LocalTarget
from sglang_hyperdflash.training.model_card import CARD, model_card
from sglang_hyperdflash.training.monitor import Monitor, check_reporters
from sglang_hyperdflash.training.process_group import ProcessGroup
from sglang_hyperdflash.training.recipe import Schedule, read_schedule
from sglang_hyperdflash.training.replay import check_whole_blocks
from sglang_hyperdflash.training.rows import STRICT, LeftOut
from sglang_hyperdflash.training.samples import OnlineFeatures, Source
from sglang_hyperdflash.training.store.manifest import content_hash
from sglang_hyperdflash.training.store.reader import StoreReader
from sglang_hyperdflash.training.trainer import Trainer, read_state, saved_states

KIND, OUT = "hyperdflash train", "hyperdflash train (out)"
PORTABLE = "PortableDeepSeekV4ForCausalLM"


def settings_of(schedule: Schedule) -> dict[str, Any]:
    """Settings that must not change between two runs into one working folder.

    Raises:
        FileNotFoundError: a data file does not exist.
    """
    stages = {
        f"stage {i}": stage.settings() | {"data": list(map(content_hash, stage.data))}
        for i, stage in enumerate(schedule.stage, 1)
    }
    return stages | {
        "target": location(schedule.target),
        "draft": list(map(content_hash, weight_files(schedule.draft))),
        # Drafters of another block size, window or mask token may have the same weights.
        "draft_config": content_hash(schedule.draft / "config.json"),
        "max_length": schedule.max_length,
        "features": schedule.features,
        "held_out": {kind: content_hash(place) for kind, place in schedule.held_out.items()},
        "objective": dataclasses.asdict(schedule.objective),
    }


def hold(schedule: Schedule, work: Path, held: ExitStack) -> None:
    """Claim ``work`` and ``out`` for this run, before anything is loaded.

    Raises:
        NotOurs: one of them holds something else, or is, or lies inside, the target or the draft.
        InUse: another run holds one.
    """
    load_config(schedule.draft)  # checks the folder
    others = {"the target": schedule.target, "the draft": schedule.draft}
    keep_apart("out", schedule.out, others)
    keep_apart("--work", work, others)
    if schedule.out.resolve() in (work.resolve(), *work.resolve().parents):
        raise HyperDFlashConfigError(
            f"out {schedule.out} must not be or contain --work {work}. Choose another folder."
        )
    settings = settings_of(schedule)
    earlier = check(work, KIND, settings) or "a new one"
    check(schedule.out, OUT, {"work": location(work), "run": earlier})
    run_id = held.enter_context(claim(work, KIND, settings))
    held.enter_context(claim(schedule.out, OUT, {"work": location(work), "run": run_id}))


def check_target(config: HyperDFlashConfig, files: TargetFiles) -> TargetFacts:
    """The facts of a target, after checking that a drafter was made for it.

    Raises:
        HyperDFlashConfigError: it was made for another target.
    """
    facts = TargetFacts.from_config(files.config())
    hc_head = files.hc_head(facts.hc_mult, facts.hidden_size)
    check_fingerprint(config, None if hc_head is None else hc_head.fingerprint())
    return facts


def load_pair(schedule: Schedule):
    """The target, or the borrowed parts of a captured one, and the untrained drafter.

    Raises:
        HyperDFlashConfigError: they do not fit each other.
    """
    drafter = Drafter.load(schedule.draft)
    schedule.objective.resolved(drafter.config)  # checks the combination, before any work
    files = TargetFiles(schedule.target)
    facts = check_target(drafter.config, files)
    if schedule.features == "captured":
        return BorrowedTarget(files), drafter
    if facts.architecture != PORTABLE:
        raise HyperDFlashConfigError(
            f'features = "{schedule.features}" computes the states in this process, which knows '
            f"{PORTABLE} only; the target is a {facts.architecture}. Run `hyperdflash capture` and "
            'train with features = "captured".'
        )
    return LocalTarget(schedule.target), drafter


def train(
    schedule: Schedule,
    work: Path,
    world: ProcessGroup,
    device: torch.device,
    states: Path | None = None,
    strict: bool = False,
) -> None:
    """Run every stage; finished ones are skipped, an interrupted one resumes.

    Args:
        states: where the target's states are kept for other runs; None for the working folder.
        strict: see :class:`LeftOut`.
    """
    target, drafter = load_pair(schedule)
    captures = schedule.features == "captured"
    left_out = LeftOut(strict)
    if not captures:
        loaded = load_all(schedule, left_out)
        world.on_main(lambda: left_out.report(work / "left_out.jsonl"))
    target.to(device)

    def say(line: str) -> None:
        if world.is_main:
            print(line, flush=True)

    def source(files: tuple[str, ...], title: str) -> Source:
        if captures:
            return captured(files, drafter.config, target.final.norm)
        say(f"{title}: {loaded[files]}")
        samples, layer_ids = loaded[files].samples, drafter.config.captured_layers
        if schedule.features == "online":
            return OnlineFeatures(target, samples, layer_ids)
        return cached(states or work / "states", target, samples, layer_ids, world)

    held_out: dict[str, Source] = {}
    for kind, file in schedule.held_out.items():
        held_out[kind] = source((file,), kind)
        check_whole_blocks(held_out[kind].samples, drafter.config.block_size, file)
    best, last, recipes = schedule.draft, "", []
    for number, stage in enumerate(schedule.stage, 1):
        title, folder = f"stage {number}", work / f"stage-{number}"
        features = source(stage.data, title)
        drafter = Drafter.load(best).to(device)
        if number > 1:
            world.on_main(partial(continue_from, drafter, work / f"stage-{number - 1}"))
        recipes.append(stage.resolve(len(features.samples), schedule.objective))
        trainer = Trainer(drafter, target, features, held_out, recipes[-1], folder, world)
        check_next_stage(trainer, work, number)
        if trainer.state["step"]:
            say(f"{title}: resumed at step {trainer.state['step']}")
        with Monitor(trainer, title, schedule.report_to) as monitor:
            trainer.run(folder / "best", monitor)
        best, last = folder / "best", best_line(trainer)
        if number < len(schedule.stage):
            say(f"{title}: {last}")
    if world.is_main:
        card = model_card(drafter.raw, schedule.target, schedule, recipes, trainer.best)
        publish(best, schedule.out, card)
        print(f"{last} ({schedule.out})")


def load_all(schedule: Schedule, left_out: LeftOut) -> dict[tuple[str, ...], Loaded]:
    """The samples of every stage's data and of every held-out file, before any work."""
    chats, held = load_chats(schedule.target), [(file,) for file in schedule.held_out.values()]
    every = dict.fromkeys([*held, *(stage.data for stage in schedule.stage)])
    load = cache(lambda file: load_samples((file,), chats, schedule.max_length, left_out))
    return {files: Loaded.of(map(load, files)) for files in every}


def continue_from(drafter: Drafter, stage: Path) -> None:
    """Load the fp32 weights of a stage's best, whose published ones are bf16.

    The main process does this alone: the trainer gives its weights to all.
    """
    drafter.load_state_dict(read_state(saved_states(stage)[-1])["best"]["weights"])


def check_next_stage(trainer: Trainer, work: Path, number: int) -> None:
    """Refuse to continue a stage after the next one started from its best.

    Raises:
        HyperDFlashConfigError: the stage is not finished, and the next one has a state.
    """
    following = work / f"stage-{number + 1}"
    if trainer.progress() < 1.0 and saved_states(following):
        raise HyperDFlashConfigError(
            f"stage {number} would continue from step {trainer.state['step']}, but stage "
            f"{number + 1} started from it. Restore the length of stage {number}, or remove "
            f"{following} and run the same command again to retrain what follows."
        )


def best_line(trainer: Trainer) -> str:
    """The best checkpoint in words."""
    if not trainer.held_out:
        return f"last: step {trainer.state['step']}, tau not measured: there is no [held_out]"
    return f"best: step {trainer.best['step']}, tau {trainer.best['tau']:.2f}"


def publish(best: Path, out: Path, card: str) -> None:
    """Copy a finished drafter and add its card, each file atomically, weights last."""
    write_text(out / CARD, card)
    for name in ("config.json", "model.safetensors"):
        with replacing(out / name) as partial:
            shutil.copyfile(best / name, partial)


def captured(
    folders: tuple[Path | str, ...], config: HyperDFlashConfig, norm: torch.Tensor
) -> StoreReader:
    """A stage's store; it must be of the drafter's target."""
    features = StoreReader(folders[0])
    check_store(features, config, norm)
    return features


def check_store(features: StoreReader, config: HyperDFlashConfig, norm: torch.Tensor) -> None:
    """Check that a store is of the drafter's target.

    Args:
        config: the drafter's. norm: ``[d]``, the target's final norm.

    Raises:
        HyperDFlashConfigError: it is not.
    """
    expected = {
        "hc_mult": config.hc_mult,
        "hidden_size": config.hidden_size,
        "hc_head_fingerprint": config.target.hc_head_fingerprint,
        "norm_fingerprint": tensors_fingerprint(norm),
    }
    if config.captured_layers:
        expected["layer_ids"] = config.captured_layers
    for name, wanted in expected.items():
        found = getattr(features.identity, name)
        if found != wanted:
            raise HyperDFlashConfigError(
                f"{features.folder} was captured from another target: its {name} is {found}, the "
                f"drafter's target has {wanted}."
            )


def add_parser(commands) -> None:
    """Register ``train`` and its arguments."""
    parser = commands.add_parser(
        "train",
        help="train a drafter",
        description="Train a drafter in the stages of a TOML file; run again to resume. For many "
        "processes: torchrun --nproc-per-node N -m sglang_hyperdflash.cli train ...",
    )
    parser.add_argument("--config", type=Path, required=True, help="training file (TOML)")
    parser.add_argument(
        "--work", type=Path, required=True, help="folder of this run's states and logs"
    )
    parser.add_argument(
        "--states",
        type=Path,
        metavar="FOLDER",
        help="folder that keeps the target's states for later runs on the same samples "
        "(default: WORK/states)",
    )
    parser.add_argument("--strict", action="store_true", help=STRICT)
    add_process_options(parser)
    parser.set_defaults(run=run)


def add_process_options(parser: argparse.ArgumentParser) -> None:
    """What :func:`processes` reads."""
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument(
        "--threads", type=COUNT, help="CPU threads of each process (default: torch's own number)"
    )


@contextmanager
def processes(args: argparse.Namespace) -> Iterator[tuple[ProcessGroup, torch.device]]:
    """This process among those of torchrun, and its device.

    Raises:
        HyperDFlashConfigError: a GPU is asked for, and there is none.
    """
    if args.device == "cuda" and not torch.cuda.is_available():
        raise HyperDFlashConfigError(
            "--device cuda: expected a GPU that torch sees, found none. Install a torch with CUDA, "
            "or train with --device cpu."
        )
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    world = ProcessGroup(device.type)
    if device.type == "cuda":
        torch.cuda.set_device(world.local_rank)
    try:
        yield world, device
    finally:
        world.close()


def run(args: argparse.Namespace) -> int:
    """Run the training file."""
    schedule = read_schedule(args.config)
    schedule = dataclasses.replace(schedule, draft=drafter_folder(schedule.draft))
    if args.states is not None and schedule.features != "cache":
        raise HyperDFlashConfigError(
            f"--states keeps what features = cache computes; {args.config} has features = "
            f"{schedule.features}. Drop one of them."
        )
    check_reporters(schedule.report_to)
    with processes(args) as (world, device), ExitStack() as held:
        world.on_main(lambda: hold(schedule, args.work, held))
        train(schedule, args.work, world, device, args.states, args.strict)
    return 0
