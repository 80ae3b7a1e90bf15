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

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from sglang_hyperdflash.tools.provenance import CHECKOUT, provenance
from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from sglang_hyperdflash.training.store.manifest import Manifest, read_shards
from sglang_hyperdflash.training.trainer import read_state, saved_states

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
# Of a server of the target under the portable class's name: an override, as captures have it, would
# be the drafter's too. SGLang finds a published V4's encoder without an option.
SERVER = "--dtype float32 --tool-call-parser deepseekv4 --max-total-tokens 8192"
SERVER += " --mem-fraction-static 0.2"
COMMANDS = {
    "hyperdflash": ["-m", "sglang_hyperdflash.cli"],
    "torchrun": ["-m", "torch.distributed.run"],
    "python": [],
}
TOOL = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
SCHEDULE = """target = "target"
draft = "draft"
out = "drafter_{name}"
features = "captured"

[held_out]
own = "states"

[[stage]]
data = ["states"]
steps = 60
lr = 1e-3
warmup_steps = 10
batch = 4
anchors = 16
every = 10
bf16 = false
"""


def make_target(folder: Path) -> None:
    """The tiny target as a DeepSeek-V4 is published."""
    tokenizer = AutoTokenizer.from_pretrained(HERE / "target")
    before, like = len(tokenizer), tokenizer.convert_tokens_to_ids(list(ADDED.values()))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    tensors = load_file(HERE / "target" / "model.safetensors")
    for name, rows in tensors.items():
        if rows.shape[:1] == (before,):
            tensors[name] = torch.cat([rows, rows[like]])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((HERE / "target" / "config.json").read_text())
    config |= {"architectures": ["DeepseekV4ForCausalLM"], "vocab_size": len(tokenizer)}
    write_json(folder / "config.json", config)
    shutil.copy(HERE / "target" / "generation_config.json", folder)


def make_served(target: Path, folder: Path) -> None:
    """The same files for a server, under the portable class's name."""
    shutil.copytree(target, folder)
    config = json.loads((target / "config.json").read_text())
    write_json(folder / "config.json", config | PORTABLE)


def chats(per_family: int) -> Iterator[dict[str, Any]]:
    """Two user turns each; every second one with reasoning, some with a system prompt or a tool."""
    asked = [e.prompt[-1] for e in generate(1, per_family)]
    for i, first in enumerate(asked):
        system = [{"role": "system", "content": "Be short."}] if i % 3 == 0 else []
        line = {"messages": [*system, first, asked[i - 1]]}
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

    def start(self, name: str, command: list[str]) -> subprocess.Popen:
        """Start a command of :data:`COMMANDS` whose output goes to a log."""
        print(f"{name}: {shlex.join(command)}", flush=True)
        words = [sys.executable, *COMMANDS[command[0]], *command[1:]]
        with self.log(name).open("wb") as log:
            return subprocess.Popen(
                words, cwd=self.folder, env=self.environment, stdout=log, stderr=log
            )

    def log(self, name: str) -> Path:
        """Where a step's output goes."""
        return self.folder / "logs" / f"{re.sub(r'[^a-z0-9]+', '-', name)}.log"

    def together(self, commands: dict[str, list[str]], kill: Callable | None = None) -> None:
        """Run commands at once, by their steps' names.

        Args:
            kill: called with each name and process again and again: whether it has killed it.
        """
        started = time.monotonic()
        running = {name: self.start(name, command) for name, command in commands.items()}
        killed: set[str] = set()
        while running:
            for name, process in list(running.items()):
                if kill and name not in killed and kill(name, process):
                    killed.add(name)
                if process.poll() is not None:
                    del running[name]
                    self.keep(name, shlex.join(commands[name]), started, process.returncode)
                    good = (process.returncode != 0) if kill else (process.returncode == 0)
                    assert good, f"{name} ended with {process.returncode}: see {self.log(name)}"
            time.sleep(0.005)

    def run(self, name: str, *command: str) -> None:
        """Run one command to its end."""
        self.together({name: list(command)})

    def keep(self, name: str, command: str, started: float, code: int | None = None) -> None:
        seconds = round(time.monotonic() - started, 1)
        self.steps.append({"step": name, "command": command, "seconds": seconds})
        self.steps[-1] |= {"exit": code} if code else {}
        print(f"{name}: {seconds} s", flush=True)

    @contextmanager
    def server(self, name: str, *more: str) -> Iterator[Server]:
        """A server of the target."""
        started, arguments = time.monotonic(), [*SERVER.split(), *more]
        log, environment = self.log(name), self.environment
        made = Server(self.folder / "served", *arguments, log=log, environment=environment)
        shown = ["python", "-m", "sglang.launch_server", "--model-path", "served", *arguments]
        with made as server:
            server.wait()
            self.keep(name, shlex.join(shown).replace(f"{self.folder}/", ""), started)
            yield server


def answer(walk: Walk, per_family: int) -> None:
    """A drafter, a server, its answers."""
    options = "--target target --out draft --layers 2 --heads 4 --kv-heads 2 --head-dim 64"
    walk.run("init", "hyperdflash", "init", *options.split(), "--intermediate-size", "512")
    lines = list(chats(per_family))
    write_text(walk.folder / "chats.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    options = "--target target --input chats.jsonl --output answers.jsonl --max-new-tokens 48"
    with walk.server("server") as server:
        asked = ["hyperdflash", "regenerate", "--server", server.url, *options.split()]
        walk.run("regenerate", *asked, "--temperature", "0")
    answers = [json.loads(line) for line in (walk.folder / "answers.jsonl").open()]
    replies = [m for a in answers for m in a["messages"] if m["role"] == "assistant"]
    walk.checks["answers"] = {
        "conversations": [len(answers), len(lines)],
        "answers": len(replies),
        "with reasoning": sum("reasoning_content" in reply for reply in replies),
        "samples": sum(len(a["samples"]) for a in answers),
        "of several answers": sum(len(s["spans"]) > 1 for a in answers for s in a["samples"]),
    }


def capture(walk: Walk) -> None:
    """One engine undisturbed; two at once into one store, each killed and run again."""

    def command(out: str, share: str) -> list[str]:
        options = f"--target target --dtype float32 --data answers.jsonl --out {out}"
        options += f" --share {share} --shard-mib 1 --concurrency 1"
        engine = json.dumps(MEMORY | {"json_model_override_args": json.dumps(PORTABLE)})
        return ["hyperdflash", "capture", *options.split(), "--engine-args", engine]

    def shards(part: int) -> int:
        path = walk.folder / "states" / "manifests" / f"capture-{part}-of-2.jsonl"
        return len(Manifest.read(path).shards) if path.is_file() else 0

    at_kill: dict[str, int] = {}

    def kill(name: str, process: subprocess.Popen) -> bool:
        part = int(name.removeprefix("capture ")[0])
        if shards(part) < 3:
            return False
        process.kill()
        process.wait()
        at_kill[f"{part}/2"] = shards(part)
        return True

    walk.run("capture, undisturbed", *command("alone", "1/1"))
    parts = {f"{part}/2": command("states", f"{part}/2") for part in (1, 2)}
    walk.together({f"capture {part}, killed": words for part, words in parts.items()}, kill)
    walk.together({f"capture {part}, again": words for part, words in parts.items()})
    alone, both = (read_shards(walk.folder / name) for name in ("alone", "states"))
    same = [(s.start, s.lengths, s.sha256) for s in alone]
    walk.checks["store"] = {
        "shards": len(alone),
        "shards at the kills": at_kill,
        "same checksums": same == [(s.start, s.lengths, s.sha256) for s in both],
    }
    assert all(0 < at_kill[f"{part}/2"] < len(alone[part - 1 :: 2]) for part in (1, 2)), at_kill


def train(walk: Walk) -> None:
    """Two processes, two with one of them killed, one alone."""

    def command(name: str, processes: int) -> list[str]:
        write_text(walk.folder / f"{name}.toml", SCHEDULE.format(name=name))
        options = f"train --config {name}.toml --work work_{name} --device cpu --threads 1"
        ranks = f"torchrun --standalone --nproc-per-node {processes} -m sglang_hyperdflash.cli"
        return f"{ranks if processes > 1 else 'hyperdflash'} {options}".split()

    def saved(name: str) -> dict[str, Any]:
        return read_state(saved_states(walk.folder / f"work_{name}" / "stage-1")[-1])

    def kill(_name: str, process: subprocess.Popen) -> bool:
        if not saved_states(walk.folder / "work_killed" / "stage-1"):
            return False
        psutil.Process(process.pid).children()[-1].kill()
        process.wait()
        return True

    walk.run("train, two processes", *command("two", 2))
    walk.together({"train, one of two killed": command("killed", 2)}, kill)
    cut = saved("killed")["state"]["step"]
    walk.run("train, two again", *command("killed", 2))
    walk.run("train, one process", *command("one", 1))
    weights = {
        name: (walk.folder / f"drafter_{name}" / "model.safetensors").read_bytes()
        for name in ("two", "killed")
    }
    two, one = saved("two"), saved("one")
    gaps = [
        ((a - one["drafter"][name]).norm() / a.norm().clamp_min(1e-12)).item()
        for name, a in two["drafter"].items()
    ]
    losses = [
        abs(a["loss"] - b["loss"]) / a["loss"]
        for a, b in zip(two["records"], one["records"], strict=True)
    ]
    walk.checks["drafter"] = {
        "killed after step": cut,
        "killed equals undisturbed, byte by byte": weights["two"] == weights["killed"],
        "one process, relative gap of losses": max(losses),
        "one process, relative gap of a tensor": max(gaps),
        "loss": [two["records"][0]["loss"], two["records"][-1]["loss"]],
        "simulated tau": two["best"]["tau"],
    }
    assert cut < two["state"]["step"], "it was killed too late"


def serve(walk: Walk) -> None:
    """The comparison of served methods, and one request."""
    shutil.copy(HERE / "turns.jsonl", walk.folder)
    options = "--target served --methods baseline,hyperdflash2 --hyperdflash2-draft drafter_two"
    options += " --benchmarks turns.jsonl --num-prompts 6 --max-new-tokens 48 --rounds 1"
    options += " --one-at-a-time --out comparison"
    command = ["python", "-m", "eval", "run", *options.split()]
    walk.run("evaluate", *command, "--server-args", SERVER)
    rows = json.loads((walk.folder / "comparison" / "results.json").read_text())["rows"]
    names = ("method", "tau", "num_prompts", "identical_to_baseline")
    walk.checks["served"] = [{name: row.get(name) for name in names} for row in rows]
    with walk.server("serve", *hyperdflash_arguments(walk.folder / "drafter_two")) as server:
        started = time.monotonic()
        question = {"role": "user", "content": "Add 478 and 220."}
        asked = {"model": "default", "messages": [question], "temperature": 0, "max_tokens": 48}
        reply = requests.post(f"{server.url}/v1/chat/completions", json=asked, timeout=600)
        reply.raise_for_status()
        walk.keep("ask", "POST /v1/chat/completions", started)
    walk.checks["answer"] = reply.json()["choices"][0]["message"]["content"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="new folder for all files")
    parser.add_argument("--out", type=Path, required=True, help="JSON of the steps and checks")
    parser.add_argument("--per-family", type=int, default=1, help="conversations of a family")
    args = parser.parse_args()
    args.work.mkdir(parents=True)
    walk = Walk(args.work.resolve())
    make_target(walk.folder / "target")
    make_served(walk.folder / "target", walk.folder / "served")
    answer(walk, args.per_family)
    capture(walk)
    train(walk)
    serve(walk)
    report = {"provenance": provenance(), "steps": walk.steps, "checks": walk.checks}
    write_json(args.out, report, indent=1)
    same = walk.checks["store"]["same checksums"]
    return int(not (same and walk.checks["drafter"]["killed equals undisturbed, byte by byte"]))


if __name__ == "__main__":
    raise SystemExit(main())
