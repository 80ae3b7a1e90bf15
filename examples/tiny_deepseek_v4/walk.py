"""Walk a team's way of docs/training.md on the tiny target, with kills between, and time it.

    python examples/tiny_deepseek_v4/walk.py --work build/walk --out build/walk.json

The target is dressed as DeepSeek-V4 is published: its architecture, its added tokens, no chat
template. So conversations go through V4's own encoder. SGLang is told to load it with the portable
class. Then: a drafter, a server, its answers with reasoning, tools and several turns; two capture
engines into one store, each killed once; training with two processes, one of them killed once;
a comparison of served methods; one request.

Exit status 1 when the store, or the drafter, is not what undisturbed runs make. A quarter of an
hour on two cores.
"""

import argparse
import filecmp
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import requests
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import AutoTokenizer

from exchanges import generate
from sglang_hyperdflash.tools.atomic import write_json, write_text
from sglang_hyperdflash.tools.ownership import MANIFEST
from sglang_hyperdflash.tools.provenance import CHECKOUT, provenance
from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from sglang_hyperdflash.training.checkpoints import read_state, saved_states, step_of
from sglang_hyperdflash.training.store.manifest import Manifest, Shard, budgeted
from sglang_hyperdflash.training.store.stream import PortionReader

HERE = Path(__file__).resolve().parent
# V4's added tokens, and whose rows of the embedding and the LM head they share.
ADDED = {
    "<think>": "<｜Assistant｜>",
    "</think>": "<｜Assistant｜>",
    "｜DSML｜": "<｜User｜>",
    "<｜System｜>": "<｜User｜>",
}
PORTABLE = {"architectures": ["PortableDeepSeekV4ForCausalLM"]}
MEMORY = {"max_total_tokens": 8192, "mem_fraction_static": 0.2}
# Options of a server of the target under the portable class's name: an override, as captures have
# it, would be the drafter's too. SGLang finds a published V4's encoder without an option.
SERVER = "--dtype float32 --tool-call-parser deepseekv4 --max-total-tokens 8192"
SERVER += " --mem-fraction-static 0.2"
COMMANDS = {
    "hyperdflash": ["-m", "sglang_hyperdflash"],
    "torchrun": ["-m", "torch.distributed.run"],
    "python": [],
}
BUDGET = 200 << 20  # bytes of a store
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "add", "description": "Adds.", "parameters": PARAMETERS}
SCHEDULE = """target = "target"
draft = "draft"
out = "drafter_{name}"
features = "captured"

[held_out]
chats = "held_out"

[[stage]]
data = ["states_{name}"]
epochs = 2
lr = 1e-3
warmup_steps = 10
batch = 16
micro_batch = 8
anchors = 16
every = 25
bf16 = false
"""


def make_target(folder: Path) -> None:
    """Write the tiny target as a DeepSeek-V4 is published."""
    tokenizer = AutoTokenizer.from_pretrained(HERE / "target")
    vocabulary, shared = len(tokenizer), tokenizer.convert_tokens_to_ids(list(ADDED.values()))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    tensors = load_file(HERE / "target" / "model.safetensors")
    for name, rows in tensors.items():
        if rows.shape[:1] == (vocabulary,):
            tensors[name] = torch.cat([rows, rows[shared]])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((HERE / "target" / "config.json").read_text())
    config |= {"architectures": ["DeepseekV4ForCausalLM"], "vocab_size": len(tokenizer)}
    write_json(folder / "config.json", config)
    shutil.copy(HERE / "target" / "generation_config.json", folder)


def chats(per_family: int) -> Iterator[dict[str, Any]]:
    """Yield chats of two user turns: half with reasoning, some with a system prompt or a tool."""
    questions = [exchange.prompt[-1] for exchange in generate(1, per_family)]
    for i, question in enumerate(questions):
        system = [{"role": "system", "content": "Be short."}] if i % 3 == 0 else []
        line = {"messages": [*system, question, questions[i - 1]]}
        line["chat_template_kwargs"] = {"thinking": i % 2 == 1}
        if i % 8 == 0:
            line["tools"] = [{"type": "function", "function": TOOL}]
        yield line


class Walk:
    """Runs commands in one folder, and keeps each with its seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[dict[str, Any]] = []
        self.checks: dict[str, Any] = {}
        path = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
        self.environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        (folder / "logs").mkdir()

    def log(self, name: str) -> Path:
        """Return the file of a step's output."""
        return self.folder / "logs" / f"{re.sub(r'[^a-z0-9]+', '-', name)}.log"

    def together(
        self,
        commands: dict[str, list[str]],
        kills: dict[str, Callable[[subprocess.Popen], bool]] | None = None,
        look: Callable[[], None] = lambda: None,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """Run commands of :data:`COMMANDS` at once, by their steps' names.

        Args:
            ready: whether the last command may start.
            kills: called with a command's process until it has killed it; then it is run again.
            look: called all the time.
        """
        left, running = dict(kills or {}), {}

        def start(name: str, *more: str) -> None:
            command, title = commands[name], " ".join([name, *more])
            print(f"{title}: {shlex.join(command)}", flush=True)
            words = [sys.executable, *COMMANDS[command[0]], *command[1:]]
            with self.log(title).open("wb") as log:
                process = subprocess.Popen(
                    words, cwd=self.folder, env=self.environment, stdout=log, stderr=log
                )
            running[name] = title, process, time.monotonic()

        *first, last = commands
        for name in first:
            start(name)
        while running or last:
            look()
            if last and ready():
                start(last)
                last = ""
            for name, (title, process, started) in list(running.items()):
                killed = name in left and left[name](process)
                if killed:
                    process.wait()
                if process.poll() is None:
                    continue
                del running[name]
                self.keep(title, shlex.join(commands[name]), started, process.returncode)
                good = bool(process.returncode) == killed
                assert good, f"{title} ended with {process.returncode}: see {self.log(title)}"
                if killed:
                    del left[name]
                    start(name, "again")
            time.sleep(0.02)
        assert not left, f"ended before they were killed: {', '.join(left)}"

    def run(self, name: str, *command: str) -> None:
        """Run one command to its end."""
        self.together({name: list(command)})

    def keep(self, name: str, command: str, started: float, code: int | None = None) -> None:
        seconds = round(time.monotonic() - started, 1)
        exit_code = {"exit": code} if code else {}
        self.steps.append({"step": name, "command": command, "seconds": seconds, **exit_code})
        print(f"{name}: {seconds} s", flush=True)

    @contextmanager
    def server(self, name: str, *options: str) -> Iterator[Server]:
        """Run a server of the target."""
        started, arguments = time.monotonic(), [*SERVER.split(), *options]
        command = ["python", "-m", "sglang.launch_server", "--model-path", "served", *arguments]
        log, environment = self.log(name), self.environment
        with Server(self.folder / "served", *arguments, log=log, environment=environment) as server:
            server.wait()
            self.keep(name, shlex.join(command).replace(f"{self.folder}/", ""), started)
            yield server


def answer(walk: Walk, per_family: int) -> None:
    """Make a drafter, start a server and keep its answers."""
    options = "--target target --out draft --layers 2 --heads 4 --kv-heads 2 --head-dim 64"
    walk.run("init", "hyperdflash", "init", *options.split(), "--intermediate-size", "512")
    lines = [json.dumps(chat) + "\n" for chat in chats(per_family)]
    write_text(walk.folder / "chats.jsonl", "".join(lines))
    options = "--target target --input chats.jsonl --output answers.jsonl --max-new-tokens 48"
    with walk.server("server") as server:
        command = ["hyperdflash", "regenerate", "--server", server.url, *options.split()]
        walk.run("regenerate", *command, "--temperature", "0")
    answers = [json.loads(line) for line in (walk.folder / "answers.jsonl").open()]
    replies = [m for a in answers for m in a["messages"] if m["role"] == "assistant"]
    samples = [sample for a in answers for sample in a["samples"]]
    walk.checks["answers"] = {
        "conversations": [len(answers), len(lines)],
        "answers": len(replies),
        "with reasoning": sum("reasoning_content" in reply for reply in replies),
        "samples": len(samples),
        "of several answers": sum(len(sample["spans"]) > 1 for sample in samples),
    }


def capture_command(data: str, out: str, *options: str) -> list[str]:
    """Return a capture of the target, told to SGLang as the portable class."""
    engine = json.dumps(MEMORY | {"json_model_override_args": json.dumps(PORTABLE)})
    given = f"--target target --dtype float32 --data {data} --out {out}".split()
    given += ["--shard-mib", "4", "--concurrency", "1"]  # batches change last bits
    return ["hyperdflash", "capture", *given, "--engine-args", engine, *options]


def train(walk: Walk, name: str, *, kill: bool) -> None:
    """Capture with two engines into a store with a budget, and train on it with two processes."""
    write_text(walk.folder / f"{name}.toml", SCHEDULE.format(name=name))
    store, work = walk.folder / f"states_{name}", walk.folder / f"work_{name}"
    shares = ("1/2", "2/2")
    budget = f"--budget {BUDGET / 2**30}".split()
    commands = {
        f"{name}, capture {share}": capture_command(
            "answers.jsonl", store.name, "--share", share, *budget
        )
        for share in shares
    }
    options = f"--config {name}.toml --work {work.name} --device cpu --threads 1"
    commands[f"{name}, train"] = (
        f"torchrun --standalone --nproc-per-node 2 -m sglang_hyperdflash train {options}".split()
    )
    most, at_kill = 0, {}

    def look() -> None:
        nonlocal most
        with suppress(FileNotFoundError):
            sizes = [path.stat().st_size for path in (store / "shards").iterdir()]
            most = max(most, sum(sizes))

    def kill_engine(process: subprocess.Popen) -> bool:
        path = store / "manifests" / "capture-2-of-2.jsonl"
        shards = Manifest.read(path).end if path.is_file() else 0
        if shards:
            at_kill["samples of the engine"] = shards
            process.kill()
        return bool(shards)

    def kill_rank(process: subprocess.Popen) -> bool:
        states = saved_states(work / "stage-1")
        if states:
            at_kill["steps of the training"] = step_of(states[-1])
            psutil.Process(process.pid).children()[-1].kill()
        return bool(states)

    engine, training = f"{name}, capture 2/2", f"{name}, train"
    kills = {engine: kill_engine, training: kill_rank} if kill else {}
    walk.together(commands, kills, look, lambda: (store / MANIFEST).is_file())
    facts, _ = read_state(saved_states(work / "stage-1")[-1], {})
    walk.checks[name] = {
        "samples": PortionReader(store, budgeted(store), None).data.samples,
        "last portion": facts["state"]["portion"],
        "steps": facts["state"]["step"],
        "MB of all states": round(sum(each.size for each in every_shard(store)) / 1e6, 1),
        "MB at once": round(most / 1e6, 1),
        "at the kills": at_kill,
        "loss": [facts["records"][i]["loss"] for i in (0, -1)],
        "simulated tau": facts["best"]["tau"],
    }


def every_shard(store: Path) -> list[Shard]:
    """Return the shards of a store, those that were used up as well."""
    every = [Manifest.read(path) for path in (store / "manifests").glob("*.jsonl")]
    return [shard for each in every for shard in (*each.shards.values(), *each.used)]


def serve(walk: Walk) -> None:
    """Compare served methods, and send one request."""
    shutil.copy(HERE / "turns.jsonl", walk.folder)
    options = "--target served --methods baseline,hyperdflash2 --hyperdflash2-draft drafter_killed"
    options += " --benchmarks turns.jsonl --num-prompts 6 --max-new-tokens 48 --rounds 1"
    options += " --one-at-a-time --out comparison"
    command = ["python", "-m", "eval", "run", *options.split()]
    walk.run("evaluate", *command, "--server-args", SERVER)
    rows = json.loads((walk.folder / "comparison" / "results.json").read_text())["rows"]
    names = ("method", "tau", "num_prompts", "identical_to_baseline")
    walk.checks["served"] = [{name: row.get(name) for name in names} for row in rows]
    with walk.server("serve", *hyperdflash_arguments(walk.folder / "drafter_killed")) as server:
        started = time.monotonic()
        question = {"role": "user", "content": "Add 478 and 220."}
        body = {"model": "default", "messages": [question], "temperature": 0, "max_tokens": 48}
        reply = requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=600)
        reply.raise_for_status()
        walk.keep("ask", "POST /v1/chat/completions", started)
    walk.checks["answer"] = reply.json()["choices"][0]["message"]["content"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="new folder for all files")
    parser.add_argument("--out", type=Path, required=True, help="JSON of the steps and checks")
    parser.add_argument("--per-family", type=int, default=20, help="conversations of a family")
    args = parser.parse_args()
    args.work.mkdir(parents=True)
    walk = Walk(args.work.resolve())
    target, served = walk.folder / "target", walk.folder / "served"
    make_target(target)
    shutil.copytree(target, served)
    write_json(served / "config.json", json.loads((target / "config.json").read_text()) | PORTABLE)
    answer(walk, args.per_family)
    with (walk.folder / "answers.jsonl").open() as lines:
        write_text(walk.folder / "held_out.jsonl", "".join(itertools.islice(lines, 24)))
    walk.run("capture, held out", *capture_command("held_out.jsonl", "held_out"))
    for name in ("undisturbed", "killed"):
        train(walk, name, kill=name == "killed")
    files = [walk.folder / f"drafter_{n}" / "model.safetensors" for n in ("undisturbed", "killed")]
    same = filecmp.cmp(*files, shallow=False)
    walk.checks["killed equals undisturbed, byte by byte"] = same
    options = "--config killed.toml --work work_killed --device cpu --evaluate drafter_killed"
    walk.run("evaluate only", "hyperdflash", "train", *options.split())
    serve(walk)
    report = {"provenance": provenance(), "steps": walk.steps, "checks": walk.checks}
    write_json(args.out, report, indent=1)
    within = all(walk.checks[n]["MB at once"] <= BUDGET / 1e6 for n in ("undisturbed", "killed"))
    return int(not (same and within))


if __name__ == "__main__":
    raise SystemExit(main())
