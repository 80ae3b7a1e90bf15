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
from sglang_hyperdflash.training.checkpoints import read_state, saved_states, step_of
from sglang_hyperdflash.training.store.manifest import Manifest, read_shards

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
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "add", "description": "Adds.", "parameters": PARAMETERS}
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

    def together(self, commands: dict[str, list[str]], kill: Callable | None = None) -> None:
        """Run commands of :data:`COMMANDS` at once, by their steps' names.

        ``kill`` is called with each name and process again and again, until it kills the process.
        """
        started = time.monotonic()
        running = {}
        for name, command in commands.items():
            print(f"{name}: {shlex.join(command)}", flush=True)
            words = [sys.executable, *COMMANDS[command[0]], *command[1:]]
            with self.log(name).open("wb") as log:
                running[name] = subprocess.Popen(
                    words, cwd=self.folder, env=self.environment, stdout=log, stderr=log
                )
        while running:
            for name, process in list(running.items()):
                if kill:
                    kill(name, process)
                if process.poll() is not None:
                    del running[name]
                    self.keep(name, shlex.join(commands[name]), started, process.returncode)
                    good = bool(process.returncode) == bool(kill)
                    assert good, f"{name} ended with {process.returncode}: see {self.log(name)}"
            time.sleep(0.005)

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


def capture(walk: Walk) -> None:
    """Capture with one engine undisturbed, then with two into one store, each killed once."""

    def command(out: str, share: str) -> list[str]:
        options = f"--target target --dtype float32 --data answers.jsonl --out {out}"
        options += f" --share {share} --shard-mib 1 --concurrency 1"
        engine = json.dumps(MEMORY | {"json_model_override_args": json.dumps(PORTABLE)})
        return ["hyperdflash", "capture", *options.split(), "--engine-args", engine]

    def shards(share: str) -> int:
        path = walk.folder / f"states/manifests/capture-{share.replace('/', '-of-')}.jsonl"
        return len(Manifest.read(path).shards) if path.is_file() else 0

    at_kill: dict[str, int] = {}

    def kill(name: str, process: subprocess.Popen) -> None:
        share = name.split()[1].rstrip(",")
        if shards(share) >= 3:
            process.kill()
            process.wait()
            at_kill[share] = shards(share)

    walk.run("capture, undisturbed", *command("alone", "1/1"))
    commands = {share: command("states", share) for share in ("1/2", "2/2")}
    walk.together({f"capture {share}, killed": words for share, words in commands.items()}, kill)
    walk.together({f"capture {share}, again": words for share, words in commands.items()})
    alone, both = (
        [(shard.start, shard.lengths, shard.sha256) for shard in read_shards(walk.folder / name)]
        for name in ("alone", "states")
    )
    walk.checks["store"] = {
        "shards": len(alone),
        "shards at the kills": at_kill,
        "same checksums": alone == both,
    }
    assert all(0 < at_kill[f"{part}/2"] < len(alone[part - 1 :: 2]) for part in (1, 2)), at_kill


def train(walk: Walk) -> None:
    """Train with two processes, with two of which one is killed, and with one."""

    def command(name: str, processes: int) -> list[str]:
        write_text(walk.folder / f"{name}.toml", SCHEDULE.format(name=name))
        options = f"train --config {name}.toml --work work_{name} --device cpu --threads 1"
        ranks = f"torchrun --standalone --nproc-per-node {processes} -m sglang_hyperdflash"
        return f"{ranks if processes > 1 else 'hyperdflash'} {options}".split()

    def states(name: str) -> list[Path]:
        return saved_states(walk.folder / f"work_{name}" / "stage-1")

    def kill(_name: str, process: subprocess.Popen) -> None:
        if states("killed"):
            psutil.Process(process.pid).children()[-1].kill()
            process.wait()

    walk.run("train, two processes", *command("two", 2))
    walk.together({"train, one of two killed": command("killed", 2)}, kill)
    kill_step = step_of(states("killed")[-1])
    walk.run("train, two again", *command("killed", 2))
    walk.run("train, one process", *command("one", 1))
    files = [walk.folder / f"drafter_{name}" / "model.safetensors" for name in ("two", "killed")]
    (parallel, weights), (single, other) = (
        read_state(states(name)[-1], begin="drafter.") for name in ("two", "one")
    )
    tensor_gaps = [
        ((a - other[name]).norm() / a.norm().clamp_min(1e-12)).item() for name, a in weights.items()
    ]
    losses = [[record["loss"] for record in state["records"]] for state in (parallel, single)]
    loss_gaps = [abs(a - b) / a for a, b in zip(*losses, strict=True)]
    walk.checks["drafter"] = {
        "killed after step": kill_step,
        "killed equals undisturbed, byte by byte": filecmp.cmp(*files, shallow=False),
        "one process, relative gap of losses": max(loss_gaps),
        "one process, relative gap of a tensor": max(tensor_gaps),
        "loss": [losses[0][0], losses[0][-1]],
        "simulated tau": parallel["best"]["tau"],
    }
    assert kill_step < parallel["state"]["step"], "it was killed too late"


def serve(walk: Walk) -> None:
    """Compare served methods, and send one request."""
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
        body = {"model": "default", "messages": [question], "temperature": 0, "max_tokens": 48}
        reply = requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=600)
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
    target, served = walk.folder / "target", walk.folder / "served"
    make_target(target)
    shutil.copytree(target, served)
    write_json(served / "config.json", json.loads((target / "config.json").read_text()) | PORTABLE)
    answer(walk, args.per_family)
    capture(walk)
    train(walk)
    serve(walk)
    report = {"provenance": provenance(), "steps": walk.steps, "checks": walk.checks}
    write_json(args.out, report, indent=1)
    same_store = walk.checks["store"]["same checksums"]
    same_drafter = walk.checks["drafter"]["killed equals undisturbed, byte by byte"]
    return int(not (same_store and same_drafter))


if __name__ == "__main__":
    raise SystemExit(main())
