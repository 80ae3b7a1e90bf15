"""The long commands as subjects of the matrix, on the tiny target."""

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
from sglang_hyperdflash.training.checkpoints import read_state, saved_states
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.store.reader import StoreReader
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
    *("-m", "sglang_hyperdflash"),
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


def largest(checkpoint: Path) -> Path:
    """The largest file of a checkpoint."""
    return max(checkpoint.iterdir(), key=lambda path: path.stat().st_size)


class Training(Subject):
    """``train``: weights and card byte for byte, and every line of the log once."""

    units, lines = STEPS, "work/stage-1/training_log.jsonl"

    def arguments(self, folder: Path) -> list[str]:
        config, places = folder / "train.toml", {"folder": self.shared, "out": folder}
        config.write_text(SCHEDULE.format(target=TARGET, steps=STEPS, **places))
        return ["train", "--config", str(config), "--work", str(folder / "work"), "--threads", "1"]

    def result(self, folder: Path) -> list[Any]:
        times, lines = {"minutes", "tokens_s", "data_wait"}, parsed(folder / self.lines)
        kept = [{k: v for k, v in line.items() if k not in times} for line in lines]
        files = ("README.md", *DRAFTER_FILES)
        return [*kept, *((folder / "drafter" / name).read_bytes() for name in files)]

    def data(self, folder: Path) -> Path:
        return largest(saved_states(folder / "work" / "stage-1")[-1])


class TrainingOfTwo(Training):
    """On two processes of ``torchrun``."""

    launcher = TORCHRUN

    def kill_helper(self, process: subprocess.Popen) -> None:
        with suppress(psutil.NoSuchProcess, IndexError):
            psutil.Process(process.pid).children()[-1].kill()


class Learning(Subject):
    """``learn`` on a store that does not change, until it has drawn that often enough.

    A unit is a version: a kill comes while it is published. What a repeated checkpoint was judged
    by is not compared: that is its own version by then.
    """

    units, lines, ends = VERSIONS, "work/training_log.jsonl", 128 + signal.SIGTERM

    def __init__(self, shared: Path) -> None:
        super().__init__(shared)
        target = LocalTarget(TARGET)
        with streams.writer(shared / "store", target) as opened:
            streams.add(opened, streams.recorded(target, RECORDED))

    def arguments(self, folder: Path) -> list[str]:
        return streams.learn_arguments(TARGET, self.shared, folder, LEARN)

    @staticmethod
    def start(command: list[str], **options) -> subprocess.Popen:
        """It has no end; it is ended, as a user ends it, once it waits for samples."""
        options |= {"stdout": subprocess.PIPE, "env": os.environ | {"PYTHONUNBUFFERED": "1"}}
        process = subprocess.Popen(command, **options)

        def watch() -> None:
            for line in process.stdout:
                if b"waiting for new samples" in line:
                    process.terminate()

        threading.Thread(target=watch, daemon=True).start()
        return process

    def done(self, folder: Path) -> int:
        """Of the versions, also of one that is being written."""
        return max((int(path.name) for path in folder.glob("published/0*")), default=0)

    def result(self, folder: Path) -> list[Any]:
        names = ("step", "loss", "ce", "gradient_norm", "position_accuracy", "samples", "tau")
        version = current(folder / "published")
        version.check()
        _, tensors = read_state(saved_states(folder / "work")[-1])
        weights = [tensors[name].numpy().tobytes() for name in sorted(tensors)]
        published = [(version.path / name).read_bytes() for name in DRAFTER_FILES]
        return [*records(folder / self.lines, *names), weights, published]

    def data(self, folder: Path) -> Path:
        return largest(saved_states(folder / "work")[-1])


class Engine(Subject):
    """A command that starts an engine."""

    def kill_helper(self, process: subprocess.Popen) -> None:
        """End the engine's scheduler, as a crash of the model would."""
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                if "scheduler" in " ".join([child.name(), *child.cmdline()]):
                    child.kill()


class Generating(Engine):
    """``generate``, greedy: a line for each prompt."""

    units, lines, hashed = PROMPTS, "out.jsonl", False

    def arguments(self, folder: Path) -> list[str]:
        given, written = self.shared / "prompts.jsonl", folder / self.lines
        options = ["--input", str(given), "--output", str(written)]
        return ["generate", "--model", TARGET, "--max-new-tokens", "16", *options, *ENGINE]

    def result(self, folder: Path) -> list[Any]:
        return records(self.data(folder), "index", "digest", "outputs")

    def data(self, folder: Path) -> Path:
        return folder / self.lines


class Capturing(Engine):
    """``capture``, a shard for every few conversations."""

    units, lines = SHARDS, "states/manifests/capture-1-of-1.jsonl"

    def arguments(self, folder: Path) -> list[str]:
        options = ["--data", str(self.shared / "long.jsonl"), "--out", str(folder / "states")]
        return ["capture", "--target", TARGET, "--shard-mib", "1", *options, *ENGINE]

    def shards(self, folder: Path) -> list[Path]:
        return sorted((folder / "states" / "shards").glob("*.safetensors"))

    def done(self, folder: Path) -> int:
        return len(self.shards(folder))

    def result(self, folder: Path) -> list[Any]:
        assert self.done(folder) == SHARDS
        source = StoreReader(folder / "states")
        states = (source.states([i]).residual.numpy().tobytes() for i in range(len(source.samples)))
        samples = [(s.tokens.tolist(), s.spans) for s in source.samples]
        return list(zip(samples, states, strict=True))

    def data(self, folder: Path) -> Path:
        return self.shards(folder)[0]
