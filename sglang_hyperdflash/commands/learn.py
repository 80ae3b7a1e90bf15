"""``hyperdflash learn``: train a drafter on what servers record, and publish better versions."""

from __future__ import annotations

import argparse
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from tqdm import tqdm

from sglang_hyperdflash.commands import train
from sglang_hyperdflash.commands.servers import Servers
from sglang_hyperdflash.draft.checkpoint import weight_files
from sglang_hyperdflash.draft.config import load_config
from sglang_hyperdflash.targets.files import TargetFiles
from sglang_hyperdflash.tools.ownership import MANIFEST, claim, keep_apart, location
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.learner import Learner, Policy, served_drafter
from sglang_hyperdflash.training.local_target import BorrowedTarget
from sglang_hyperdflash.training.monitor import Monitor, check_reporters
from sglang_hyperdflash.training.process_group import POLL, ProcessGroup
from sglang_hyperdflash.training.recipe import Recipe
from sglang_hyperdflash.training.store.manifest import content_hash
from sglang_hyperdflash.training.store.stream import StreamReader

KIND = "hyperdflash learn"
REPORT_TO = ("tensorboard",)


def hold(args: argparse.Namespace, claims: ExitStack) -> None:
    """Claim the working folder and the published folder for as long as ``claims`` is open.

    Raises:
        NotOurs: one of them holds something else, or is, or lies inside, another folder of this
            command.
        InUse: another learner holds one of them.
    """
    load_config(args.draft)  # checks the folder
    inputs = {"the target": args.target, "the draft": args.draft, "the store": args.store}
    keep_apart("--work", args.work, inputs)
    keep_apart("--publish", args.publish, inputs | {"--work": args.work})
    drafter = {
        "target": location(args.target),
        "draft_config": content_hash(args.draft / "config.json"),
    }
    settings = drafter | {
        "draft": list(map(content_hash, weight_files(args.draft))),
        "store": location(args.store),
        "publish": location(args.publish),
    }
    claims.enter_context(claim(args.work, KIND, settings))
    # Runs with other folders may continue the published versions, so fewer settings must match.
    claims.enter_context(claim(args.publish, f"{KIND} (published)", drafter))


def wait_for_store(store: Path, world: ProcessGroup) -> None:
    """Wait until a server has made the store."""
    if not (store / MANIFEST).is_file() and world.is_main:
        tqdm.write(f"waiting: there is no store at {store} yet. Start a server that records there.")
    while not (store / MANIFEST).is_file():
        time.sleep(POLL)


def learn(
    args: argparse.Namespace, world: ProcessGroup, device: torch.device, claims: ExitStack
) -> None:
    """Learn until a signal ends the process; the store is claimed as long as ``claims`` is open."""
    files = TargetFiles(args.target)
    _, folder = world.on_main(lambda: served_drafter(args.publish, args.draft, tqdm.write))
    drafter = Drafter.load(folder)
    train.check_target(drafter.config, files)
    target = BorrowedTarget(files)
    wait_for_store(args.store, world)
    config = drafter.config
    stream = StreamReader(args.store, args.max_length, config.vocab_size, config.window)
    train.check_store(stream, drafter.config, target.final.norm)
    # Not before there is a store: its first writer expects an empty folder.
    learner_claim = claim(args.store / "learner", KIND, {}, is_file=True)
    world.on_main(lambda: claims.enter_context(learner_claim))
    recipe = Recipe(
        lr=args.lr,
        batch=args.batch,
        micro_batch=args.micro_batch or args.batch,
        anchors=args.anchors,
        every=args.every,
        bf16=device.type == "cuda",  # few CPUs are faster with it
    )
    learner = Learner(
        drafter.to(device),
        target.to(device),
        stream,
        recipe,
        args.work,
        world,
        draft=args.draft,
        published=args.publish,
        policy=Policy(args.newest, args.judges, args.passes),
    )
    if learner.state["step"] and world.is_main:
        tqdm.write(f"resumed at step {learner.state['step']}")
    if args.server and world.is_main:
        servers = Servers(args.server, args.publish, args.draft, tqdm.write)
        threading.Thread(target=servers.watch, name="servers", daemon=True).start()
    learner.after_checkpoint()
    with Monitor(learner, "learn", REPORT_TO) as monitor:
        learner.run(args.publish, monitor)


def run(args: argparse.Namespace) -> int:
    """Learn until a signal ends the process."""
    check_reporters(REPORT_TO)
    with train.processes(args) as (world, device), ExitStack() as claims:
        world.on_main(lambda: hold(args, claims))
        learn(args, world, device, claims)
    return 0
