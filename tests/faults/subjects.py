"""The long commands as subjects of the matrix, on the tiny target."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.draft.published import current
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.store.reader import StoreReader
from sglang_hyperdflash.training.trainer import read_state, saved_states
from tests.conftest import EXAMPLE
from tests.faults.matrix import EVAL, Subject
from tests.unit.commands.native_server import Answers
from tests.unit.eval.fake_server import FakeServer, lengths
from tests.unit.training import streams

TARGET = str(EXAMPLE / "target")
STEPS, PROMPTS = 8, 8
BENCHMARKS, ROUNDS = ("one", "two"), 2
SHARDS = 8
# A version for each checkpoint, every 20 steps until 320 samples were drawn twice.
VERSIONS, RECORDED = 4, 320
LEARN = "--lr 5e-3 --batch 8 --anchors 8 --every 20 --passes 2 --threads 1 --device cpu"
DRAFTER_FILES = ("config.json", "model.safetensors")
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
    *("--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
    *("-m", "sglang_hyperdflash.cli"),
)
UNTIL_IT_WAITS = (sys.executable, "-m", "tests.faults.until_it_waits")
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
    sizes = "--layers 1 --heads 2 --kv-heads 1 --head-dim 32 --intermediate-size 64"
    sizes += " --dependency-rank 0"
    init = ["init", "--target", TARGET, "--out", str(folder / "draft"), *sizes.split()]
    assert main(init) == 0

    def write(name: str, lines: list[dict[str, Any]]) -> None:
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    counts = [", ".join(map(str, range(i, i + 9))) for i in range(PROMPTS)]
    # Two long ones would be more than a shard of a MiB of states.
    for name, copies in (("data", 1), ("long", 6)):
        chats = [(f"Count from {i}", " ".join([count] * copies)) for i, count in enumerate(counts)]
        write(name, [{"instruction": a, "output": b} for a, b in chats])
    write("prompts", [{"prompt": f"Tom has {i} apples."} for i in range(PROMPTS)])
    for name in BENCHMARKS:
        write(name, [{"turns": [f"{name} {i}?", "And then?"]} for i in range(2)])


def records(path: Path, *names: str) -> list[dict[str, Any]]:
    """Chosen fields of every line; the order of lines is that of completion and not compared."""
    return [{name: line[name] for name in names} for line in parsed(path)]


def parsed(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answering(arguments: Callable[[str], list[str]], *names: str, **more) -> Subject:
    """A command that writes a line for each prompt to ``out.jsonl``.

    Args:
        arguments: of the command, given the output file. names: fields that are compared.
    """
    name = "out.jsonl"
    return Subject(
        arguments=lambda folder: arguments(str(folder / name)),
        units=PROMPTS,
        result=lambda folder: records(folder / name, "index", "digest", *names),
        data=lambda folder: folder / name,
        lines=name,
        hashed=False,
        **more,
    )


def training(shared: Path, processes: int = 1, start=subprocess.Popen) -> Subject:
    """``train``: weights and card byte for byte, and every line of the log once."""

    def arguments(folder: Path) -> list[str]:
        config = folder / "train.toml"
        config.write_text(SCHEDULE.format(target=TARGET, folder=shared, out=folder, steps=STEPS))
        work = str(folder / "work")
        return ["train", "--config", str(config), "--work", work, "--threads", "1"]

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

    A unit is a version: a kill comes while it is published. Training, the candidates' taus and what
    is published in the end are compared. What a checkpoint that is repeated was compared with is
    not: that is its own version by then, and it publishes nothing.
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
        launcher=UNTIL_IT_WAITS,
    )


class Line:
    """The connections of an HTTP server, which can be cut: for its clients the server has died."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self.open, self.ends = True, list[socket.socket]()
        server.verify_request = self._connected
        # What a subject needs of it.
        self.helper = {"kill_helper": self.cut, "restore_helper": self.restore}

    def _connected(self, end: socket.socket, _address) -> bool:
        self.ends.append(end)
        return self.open

    def cut(self, _process: subprocess.Popen) -> None:
        self.open = False
        for end in self.ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self.ends.clear()

    def restore(self) -> None:
        self.open = True


def regenerating(shared: Path) -> Subject:
    """``regenerate``, against a server without a model."""
    server = Answers(delay=0.2)

    def arguments(out: str) -> list[str]:
        options = ["--temperature", "0", "--max-new-tokens", "16", "--concurrency", "2"]
        options += ["--input", str(shared / "data.jsonl"), "--output", out]
        return ["regenerate", "--server", server.url, "--target", TARGET, *options]

    return answering(arguments, "messages", "samples", **Line(server).helper)


def kill_scheduler(process: subprocess.Popen) -> None:
    """End the engine's scheduler, as a crash of the model would."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if "scheduler" in child.name() or "scheduler" in " ".join(child.cmdline()):
                    child.send_signal(signal.SIGKILL)


def generating(shared: Path) -> Subject:
    """``generate``, greedy."""

    def arguments(out: str) -> list[str]:
        options = ["--input", str(shared / "prompts.jsonl"), "--output", out, *ENGINE]
        return ["generate", "--model", TARGET, "--max-new-tokens", "16", *options]

    return answering(arguments, "outputs", kill_helper=kill_scheduler)


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


def comparing(shared: Path) -> Subject:
    """``eval run``: one server without a model stands for both methods."""
    server = FakeServer(lengths(4), [1, 1], delay=0.05)

    def arguments(folder: Path) -> list[str]:
        files = ",".join(str(shared / f"{name}.jsonl") for name in BENCHMARKS)
        options = ["--target", TARGET, "--methods", "baseline,hyperdflash6", "--benchmarks", files]
        options += ["--num-prompts", "2", "--max-new-tokens", "8", "--rounds", str(ROUNDS)]
        servers = ["--server", f"baseline={server.url}", "--server", f"hyperdflash6={server.url}"]
        return ["run", *options, *servers, "--out", str(folder / "run")]

    def units(folder: Path) -> list[Path]:
        return sorted((folder / "run" / "units").glob("*/*.json"))

    def result(folder: Path) -> list[Any]:
        answers = [
            (path.name, path.parent.name, [a["output_ids"] for a in json.loads(text)["answers"]])
            for path in units(folder)
            for text in [path.read_text()]
        ]
        rows = json.loads((folder / "run" / "results.json").read_text())["rows"]
        names = ("method", "benchmark", "num_prompts", "identical_to_baseline")
        return answers + [[row.get(name) for name in names] for row in rows]

    return Subject(
        arguments=arguments,
        units=ROUNDS * len(BENCHMARKS) * 3,  # both methods and the noise floor
        on_disk=lambda folder: len(units(folder)),
        result=result,
        data=lambda folder: units(folder)[0],
        launcher=EVAL,
        **Line(server.server).helper,
    )
