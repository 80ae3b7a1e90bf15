"""The long commands as subjects of the matrix, on the tiny target."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from sglang_hyperdflash.draft.published import current
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.store.reader import StoreReader
from sglang_hyperdflash.training.trainer import read_state, saved_states
from tests.conftest import EXAMPLE
from tests.faults.matrix import Subject
from tests.unit.training import streams

TARGET = str(EXAMPLE / "target")
STEPS = PROMPTS = SHARDS = 8
VERSIONS, RECORDED = 4, 320  # every 20 steps until the samples were drawn twice
LEARN = "--lr 5e-3 --batch 8 --anchors 8 --every 20 --passes 2 --threads 1 --device cpu"
DRAFTER_FILES = ("config.json", "model.safetensors")
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
    *("--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
    *("-m", "sglang_hyperdflash.cli"),
)
SCHEDULE = """
target = "{target}"
draft = "{folder}/draft"
out = "{out}/drafter"
max_length = 200
[held_out]
count = "{folder}/data.jsonl"
[[stage]]
data = ["{folder}/data.jsonl"]
steps = {steps}
batch = 2
anchors = 4
every = 1
warmup_steps = 2
bf16 = false
"""
ENGINE = ["--dtype", "float32", "--concurrency", "1"]
ENGINE += ["--engine-args", json.dumps({"max_total_tokens": 8192, "mem_fraction_static": 0.2})]


def prepare(folder: Path) -> None:
    """A drafter, training data and prompts that all subjects share."""
    streams.new_drafter(LocalTarget(TARGET)).save(folder / "draft")

    def write(name: str, lines: list[dict[str, Any]]) -> None:
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    counts = [", ".join(map(str, range(i, i + 9))) for i in range(PROMPTS)]
    # Two long ones would be more than a shard of a MiB of states.
    for name, copies in (("data", 1), ("long", 6)):
        chats = [(f"Count from {i}", " ".join([count] * copies)) for i, count in enumerate(counts)]
        write(name, [{"instruction": a, "output": b} for a, b in chats])
    write("prompts", [{"prompt": f"Tom has {i} apples."} for i in range(PROMPTS)])


def records(path: Path, *names: str) -> list[dict[str, Any]]:
    """Chosen fields of every line; the order of lines is that of completion and not compared."""
    return [{name: line[name] for name in names} for line in parsed(path)]


def parsed(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def training(shared: Path, processes: int = 1, start=subprocess.Popen) -> Subject:
    """``train``: weights and card byte for byte, and every line of the log once."""

    def arguments(folder: Path) -> list[str]:
        config = folder / "train.toml"
        config.write_text(SCHEDULE.format(target=TARGET, folder=shared, out=folder, steps=STEPS))
        return ["train", "--config", str(config), "--work", str(folder / "work"), "--threads", "1"]

    log = "work/stage-1/training_log.jsonl"

    def result(folder: Path) -> list[Any]:
        times = {"minutes", "tokens_s", "data_wait"}
        kept = [{k: v for k, v in one.items() if k not in times} for one in parsed(folder / log)]
        files = ("README.md", *DRAFTER_FILES)
        return [*kept, *((folder / "drafter" / name).read_bytes() for name in files)]

    def kill_one(process: subprocess.Popen) -> None:
        with suppress(psutil.NoSuchProcess, IndexError):
            psutil.Process(process.pid).children()[-1].kill()

    many = {"launcher": TORCHRUN, "kill_helper": kill_one} if processes > 1 else {}
    return Subject(
        arguments=arguments,
        units=STEPS,
        result=result,
        data=lambda folder: saved_states(folder / "work" / "stage-1")[-1],
        lines=log,
        start=start,
        **many,
    )


def learning(shared: Path) -> Subject:
    """``learn`` on a store that does not change, until it has drawn that often enough.

    A unit is a version: a kill comes while it is published. What a repeated checkpoint was judged
    by is not compared: that is its own version by then.
    """
    store = shared / "store"
    if not store.is_dir():
        target = LocalTarget(TARGET)
        with streams.writer(store, target) as opened:
            streams.add(opened, streams.recorded(target, RECORDED))

    def arguments(folder: Path) -> list[str]:
        return streams.learn_arguments(TARGET, shared, folder, LEARN)

    log = "work/training_log.jsonl"

    def newest(folder: Path) -> int:
        """Of the versions, also of one that is being written."""
        return max((int(path.name) for path in folder.glob("published/0*")), default=0)

    def result(folder: Path) -> list[Any]:
        names = ("step", "loss", "ce", "gradient_norm", "position_accuracy", "samples", "tau")
        version = current(folder / "published")
        version.check()
        state = read_state(saved_states(folder / "work")[-1])
        tensors = [x for kind in ("drafter", "average") for _, x in sorted(state[kind].items())]
        weights = [tensor.numpy().tobytes() for tensor in tensors]
        published = [(version.path / name).read_bytes() for name in DRAFTER_FILES]
        return [*records(folder / log, *names), weights, published]

    return Subject(
        arguments=arguments,
        units=VERSIONS,
        on_disk=newest,
        result=result,
        data=lambda folder: saved_states(folder / "work")[-1],
        lines=log,
        start=until_it_waits,
        ends=128 + signal.SIGTERM,
    )


def until_it_waits(command: list[str], **options) -> subprocess.Popen:
    """Start a command without an end; it is ended, as a user ends it, once it waits for samples."""
    options |= {"stdout": subprocess.PIPE, "env": os.environ | {"PYTHONUNBUFFERED": "1"}}
    process = subprocess.Popen(command, **options)

    def watch() -> None:
        for line in process.stdout:
            if b"waiting for new samples" in line:
                process.terminate()

    threading.Thread(target=watch, daemon=True).start()
    return process


def kill_scheduler(process: subprocess.Popen) -> None:
    """End the engine's scheduler, as a crash of the model would."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            if "scheduler" in " ".join([child.name(), *child.cmdline()]):
                child.kill()


def generating(shared: Path) -> Subject:
    """``generate``, greedy: a line for each prompt."""
    name = "out.jsonl"

    def arguments(folder: Path) -> list[str]:
        options = ["--input", str(shared / "prompts.jsonl"), "--output", str(folder / name)]
        return ["generate", "--model", TARGET, "--max-new-tokens", "16", *options, *ENGINE]

    return Subject(
        arguments=arguments,
        units=PROMPTS,
        result=lambda folder: records(folder / name, "index", "digest", "outputs"),
        data=lambda folder: folder / name,
        lines=name,
        hashed=False,
        kill_helper=kill_scheduler,
    )


def capturing(shared: Path) -> Subject:
    """``capture``, a shard for every few conversations."""

    def arguments(folder: Path) -> list[str]:
        options = ["--data", str(shared / "long.jsonl"), "--out", str(folder / "states"), *ENGINE]
        return ["capture", "--target", TARGET, "--shard-mib", "1", *options]

    def result(folder: Path) -> list[Any]:
        assert len(shards(folder)) == SHARDS
        source = StoreReader(folder / "states")
        states = (source.states([i]).residual.numpy().tobytes() for i in range(len(source.samples)))
        samples = [(s.tokens.tolist(), s.spans) for s in source.samples]
        return list(zip(samples, states, strict=True))

    def shards(folder: Path) -> list[Path]:
        return sorted((folder / "states" / "shards").glob("*.safetensors"))

    return Subject(
        arguments=arguments,
        units=SHARDS,
        on_disk=lambda folder: len(shards(folder)),
        result=result,
        lines="states/manifests/capture-1-of-1.jsonl",
        data=lambda folder: shards(folder)[0],
        kill_helper=kill_scheduler,
    )
