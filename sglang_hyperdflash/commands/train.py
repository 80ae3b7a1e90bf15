"""``hyperdflash train``: the stages of a training file, each a run of :class:`Trainer`.

The fields of the file are in :mod:`sglang_hyperdflash.training.recipe`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import shutil
import time
from collections.abc import Iterator, Mapping
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
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.ownership import MANIFEST, check, claim, keep_apart, location
from sglang_hyperdflash.training.budgeted import BudgetTrainer
from sglang_hyperdflash.training.cached import cached
from sglang_hyperdflash.training.checkpoints import saved_states
from sglang_hyperdflash.training.conversations import Loaded, load_samples
from sglang_hyperdflash.training.deal import check_batch
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.local_target import BorrowedTarget, LocalTarget
from sglang_hyperdflash.training.model_card import CARD, model_card
from sglang_hyperdflash.training.monitor import Monitor, check_reporters
from sglang_hyperdflash.training.process_group import POLL, ProcessGroup
from sglang_hyperdflash.training.recipe import Schedule, Stage, read_schedule
from sglang_hyperdflash.training.replay import Replay, check_whole_blocks
from sglang_hyperdflash.training.rows import LeftOut
from sglang_hyperdflash.training.samples import OnlineFeatures, Source
from sglang_hyperdflash.training.store.manifest import READER, budgeted, content_hash, data_sets
from sglang_hyperdflash.training.store.reader import StoreReader
from sglang_hyperdflash.training.store.stream import PortionReader
from sglang_hyperdflash.training.trainer import Trainer, best_weights

OPEN_FILES = 1 << 14  # two for every open shard
KIND, OUT = "hyperdflash train", "hyperdflash train (out)"
PORTABLE = "PortableDeepSeekV4ForCausalLM"


def settings_of(schedule: Schedule) -> dict[str, Any]:
    """Return the settings that must not change between two runs into one working folder.

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
        # Drafters with different block sizes, windows or mask tokens may have the same weights.
        "draft_config": content_hash(schedule.draft / "config.json"),
        "max_length": schedule.max_length,
        "features": schedule.features,
        "held_out": {kind: content_hash(file) for kind, file in schedule.held_out.items()},
        "objective": dataclasses.asdict(schedule.objective),
    }


def hold(schedule: Schedule, work: Path, claims: ExitStack) -> None:
    """Claim ``work`` and ``out`` for as long as ``claims`` is open, before anything is loaded.

    Raises:
        NotOurs: one of them holds something else, or is, or lies inside, the target or the draft.
        InUse: another run holds one of them.
    """
    load_config(schedule.draft)  # checks the folder
    inputs = {"the target": schedule.target, "the draft": schedule.draft}
    keep_apart("out", schedule.out, inputs)
    keep_apart("--work", work, inputs)
    if schedule.out.resolve() in (work.resolve(), *work.resolve().parents):
        raise HyperDFlashConfigError(
            f"out {schedule.out} must not be or contain --work {work}. Choose another folder."
        )
    settings = settings_of(schedule)
    if schedule.features == "captured":
        for store in {store for stage in schedule.stage for store in stage.data}:
            if budgeted(Path(store)):  # what one run has used is gone
                run = {"work": location(work)}
                claims.enter_context(claim(Path(store) / READER, KIND, run, is_file=True))
    resumed_id = check(work, KIND, settings) or "a new one"
    check(schedule.out, OUT, {"work": location(work), "run": resumed_id})
    run_id = claims.enter_context(claim(work, KIND, settings))
    claims.enter_context(claim(schedule.out, OUT, {"work": location(work), "run": run_id}))


def check_target(config: HyperDFlashConfig, files: TargetFiles) -> TargetFacts:
    """Return the target's facts; raise ``HyperDFlashConfigError`` for another target's drafter."""
    facts = TargetFacts.from_config(files.config())
    hc_head = files.hc_head(facts.hc_mult, facts.hidden_size)
    check_fingerprint(config, None if hc_head is None else hc_head.fingerprint())
    return facts


def load_pair(schedule: Schedule):
    """Load the target, or the borrowed parts of a captured one, and the untrained drafter.

    Raises:
        HyperDFlashConfigError: the two do not fit each other, or the objective.
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
    *,
    evaluate: bool = False,
    profile: int = 0,
) -> None:
    """Run every stage; finished ones are skipped, an interrupted one resumes.

    Args:
        states: the folder that keeps the target's states for later runs; None for one in ``work``.
        strict: see :class:`LeftOut`.
        evaluate: whether to measure ``schedule.draft`` on the held-out answers, and train nothing.
        profile: steps of each stage that are traced.
    """
    target, drafter = load_pair(schedule)
    if schedule.features != "captured":
        left_out = LeftOut(strict)
        loaded = load_all(schedule, left_out)
        world.on_main(lambda: left_out.report(work / "left_out.jsonl"))
    target.to(device)
    config = drafter.config

    def say(line: str) -> None:
        if world.is_main:
            print(line, flush=True)

    def source(files: tuple[str, ...], title: str) -> Source:
        if schedule.features == "captured":
            store = open_store(files, config.window)
            check_store(store, config, target.final.norm)
            return store
        say(f"{title}: {loaded[files]}")
        samples, layer_ids = loaded[files].samples, config.captured_layers
        if schedule.features == "online":
            return OnlineFeatures(target, samples, layer_ids)
        return cached(states or work / "states", target, samples, layer_ids, world)

    held_out: dict[str, Source] = {}
    for kind, file in schedule.held_out.items():
        held_out[kind] = source((file,), kind)
        if isinstance(held_out[kind], PortionReader):
            raise HyperDFlashConfigError(
                f"[held_out] {file} was captured with --budget, for one stage. Capture it without."
            )
        check_whole_blocks(held_out[kind].samples, drafter.config.block_size, file)
    if evaluate:
        replay = Replay(drafter.to(device), target, schedule.stage[0].bf16)
        sampled = drafter.dependency is not None
        for kind, answers in held_out.items():
            measured = replay.evaluate(answers, sampled=sampled, world=world)
            say(f"{kind}: {json.dumps(measured)}")
        return
    sources: dict[tuple[str, ...], Source] = {}
    for stage in schedule.stage:  # a fault of the last one shows at once
        check_batch(stage.batch, world.size)
        if schedule.features == "captured" and stage.data not in sources:
            sources[stage.data] = source(stage.data, "captured")
    check_budgeted(schedule, sources)
    for store in (s.folder for s in sources.values() if isinstance(s, PortionReader)):
        # With content it is this run's; an empty one, of a run that was refused, binds none.
        world.on_main(partial(write_text, store / READER, location(work)))
    best, last, recipes, raw = schedule.draft, "", [], drafter.raw
    del drafter  # 4 GB of host memory

    def run_stage(number: int, stage: Stage) -> tuple[dict[str, Any], str]:
        """Run one stage; return its best record and line. What it held is freed before the next."""
        title, folder = f"stage {number}", work / f"stage-{number}"
        features = sources.get(stage.data) or source(stage.data, title)
        drafter = Drafter.load(best).to(device)
        if number > 1:
            world.on_main(partial(continue_from, drafter, work / f"stage-{number - 1}"))
        recipes.append(stage.resolve(features.counts, schedule.objective))
        given = drafter, target, features, held_out, recipes[-1], folder, world
        part = isinstance(features, PortionReader)
        trainer = BudgetTrainer(*given, say=say) if part else Trainer(*given)
        check_next_stage(trainer, work, number)
        if trainer.state["step"]:
            say(f"{title}: resumed at step {trainer.state['step']}")
        with Monitor(trainer, title, schedule.report_to, profile) as monitor:
            trainer.run(folder / "best", monitor)
        return trainer.best, best_line(trainer)

    for number, stage in enumerate(schedule.stage, 1):
        if last:
            say(f"stage {number - 1}: {last}")
        record, last = run_stage(number, stage)
        best = work / f"stage-{number}" / "best"
    if world.is_main:
        publish(best, schedule.out, model_card(raw, schedule.target, schedule, recipes, record))
        print(f"{last} ({schedule.out})")


def check_budgeted(schedule: Schedule, sources: Mapping[tuple[str, ...], Source]) -> None:
    """Raise ``HyperDFlashConfigError`` for a store with a budget that stages cannot use up."""
    for data in (data for data, source in sources.items() if isinstance(source, PortionReader)):
        stages = [stage for stage in schedule.stage if stage.data == data]
        if len(stages) > 1 or stages[0].minutes is not None:
            raise HyperDFlashConfigError(
                f"{data[0]} was captured with --budget: expected one stage on it, whose length is "
                f"in epochs or steps; found {len(stages)}"
                f"{'' if stages[0].minutes is None else ' in minutes'}. Capture into a store for "
                "each stage."
            )


def wait_for_captures(schedule: Schedule, world: ProcessGroup) -> None:
    """Wait until every capture that has begun says what its store will hold."""
    for folder in (Path(name) for stage in schedule.stage for name in stage.data):
        said = False
        while (folder / MANIFEST).is_file() and not data_sets(folder):
            if world.is_main and not said:
                print(f"waiting: {folder} holds no sample yet", flush=True)
            said = True
            time.sleep(POLL)


def open_store(folders: tuple[str, ...], window: int | None) -> StoreReader:
    """Open the stores of a stage, or the one that is being captured with a budget.

    Raises:
        HyperDFlashConfigError: a store with a budget is one of several, or a window is smaller than
            the drafter's.
    """
    for folder in folders:
        for data in filter(None, data_sets(Path(folder)).values()):
            if data.window is not None and (window is None or window > data.window):
                raise HyperDFlashConfigError(
                    f"{folder} was captured with --window {data.window}; the drafter's window is "
                    f"{window or 'none'}. Capture again with the drafter's, or without."
                )
    limited = {folder: data for folder in folders if (data := budgeted(Path(folder)))}
    if not limited:
        return StoreReader(folders, window=window)
    if len(folders) > 1:
        raise HyperDFlashConfigError(
            f"{next(iter(limited))} was captured with --budget: expected it to be the only data of "
            f"its stage, found {len(folders)} stores."
        )
    return PortionReader(folders[0], limited[folders[0]], window)


def load_all(schedule: Schedule, left_out: LeftOut) -> dict[tuple[str, ...], Loaded]:
    """Load the samples of every held-out file and of every stage's data, each file once."""
    chats = load_chats(schedule.target)
    load = cache(lambda file: load_samples((file,), chats, schedule.max_length, left_out))
    held_out = [(file,) for file in schedule.held_out.values()]
    data = dict.fromkeys([*held_out, *(stage.data for stage in schedule.stage)])
    return {files: Loaded.of(map(load, files)) for files in data}


def continue_from(drafter: Drafter, stage: Path) -> None:
    """Load the fp32 weights of a stage's best checkpoint, whose published weights are bf16.

    Only the main process does this: the trainer gives its weights to all processes.
    """
    if (weights := best_weights(stage)) is not None:
        drafter.load_state_dict(weights)


def check_next_stage(trainer: Trainer, work: Path, number: int) -> None:
    """Raise ``HyperDFlashConfigError`` for an unfinished stage whose next stage has begun.

    The next stage started from what was then the best checkpoint.
    """
    next_stage = work / f"stage-{number + 1}"
    if trainer.progress() < 1.0 and saved_states(next_stage):
        raise HyperDFlashConfigError(
            f"stage {number} would continue from step {trainer.state['step']}, but stage "
            f"{number + 1} started from it. Restore the length of stage {number}, or remove "
            f"{next_stage} and run the same command again to retrain what follows."
        )


def best_line(trainer: Trainer) -> str:
    """Return the line about the best checkpoint."""
    if not trainer.held_out:
        return f"last: step {trainer.state['step']}, tau not measured: there is no [held_out]"
    return f"best: step {trainer.best['step']}, tau {trainer.best['tau']:.2f}"


def publish(best: Path, out: Path, card: str) -> None:
    """Copy a finished drafter and add its card, each file atomically, weights last."""
    write_text(out / CARD, card)
    for name in ("config.json", "model.safetensors"):
        with replacing(out / name) as partial:
            shutil.copyfile(best / name, partial)


def check_store(store: StoreReader, config: HyperDFlashConfig, norm: torch.Tensor) -> None:
    """Raise ``HyperDFlashConfigError`` for a store that is not of the drafter's target.

    Args:
        config: the drafter's configuration.
        norm: ``[d]``, the weight of the target's final norm.
    """
    expected = {
        "hc_mult": config.hc_mult,
        "hidden_size": config.hidden_size,
        "hc_head_fingerprint": config.target.hc_head_fingerprint,
        "norm_fingerprint": tensors_fingerprint(norm),
    }
    if config.captured_layers:
        expected["layer_ids"] = config.captured_layers
    for name, value in expected.items():
        stored = getattr(store.identity, name)
        if stored != value:
            raise HyperDFlashConfigError(
                f"{store.folder} was captured from another target: its {name} is {stored}, the "
                f"drafter's target has {value}."
            )


@contextmanager
def processes(args: argparse.Namespace) -> Iterator[tuple[ProcessGroup, torch.device]]:
    """Join the processes of torchrun; yield their group and this process's device.

    Raises:
        HyperDFlashConfigError: the options name a GPU, and there is none.
    """
    if args.device == "cuda" and not torch.cuda.is_available():
        raise HyperDFlashConfigError(
            "--device cuda: expected a GPU that torch sees, found none. Install a torch with CUDA, "
            "or train with --device cpu."
        )
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, OPEN_FILES)), hard))
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
    schedule = read_schedule(args.config, args.set)
    if args.evaluate is not None:
        schedule = dataclasses.replace(schedule, draft=args.evaluate)
    schedule = dataclasses.replace(schedule, draft=drafter_folder(schedule.draft))
    if args.states is not None and schedule.features != "cache":
        raise HyperDFlashConfigError(
            f"--states keeps what features = cache computes; {args.config} has features = "
            f"{schedule.features}. Drop one of them."
        )
    check_reporters(schedule.report_to)
    with processes(args) as (world, device), ExitStack() as claims:
        if schedule.features == "captured":
            wait_for_captures(schedule, world)
        if args.evaluate is None:
            world.on_main(lambda: hold(schedule, args.work, claims))
        options = {"evaluate": args.evaluate is not None, "profile": args.profile}
        train(schedule, args.work, world, device, args.states, args.strict, **options)
    return 0
