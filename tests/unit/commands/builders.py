"""Files of rows, a training file that runs in seconds, and what the commands' tests run."""

import json
from pathlib import Path

from sglang_hyperdflash.cli import main
from tests.conftest import ROOT

SAMPLE = ROOT / "examples/deepseek_v4_flash_config"
RECIPE = ROOT / "examples/recipes/deepseek_v4_flash.toml"
SIZES = [
    *("--layers", "1", "--heads", "2", "--kv-heads", "1", "--head-dim", "32"),
    *("--intermediate-size", "64", "--dependency-rank", "0"),
]
COUNT = ", ".join(map(str, range(30)))


def write_rows(path: Path, *rows: object) -> Path:
    """A line for each row; a string is a line as it is."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(line + "\n" for line in lines))
    return path


def dialogue(system: str, *turns: str) -> list[dict]:
    """What a user and an assistant say in turn, after a system message."""
    roles = ["system", *["user", "assistant"] * len(turns)]
    messages = zip(roles, [system, *turns], strict=False)
    return [{"role": role, "content": text} for role, text in messages]


def rows_of(path: Path) -> list[dict]:
    """The records of a file, by their index where they have one."""
    return sorted(map(json.loads, path.read_text().splitlines()), key=lambda r: r.get("index", 0))


def regenerate(servers, target_dir, data, out, *options: str) -> list[str]:
    named = [word for server in servers for word in ("--server", server.url)]
    files = ["--target", str(target_dir), "--input", str(data), "--output", str(out)]
    return ["regenerate", *named, *files, *options]


def initialise(target: object, out: Path, *options: str) -> int:
    return main(["init", "--target", str(target), "--out", str(out), *options])


def small(folder: Path, target_dir: Path, steps=2, **changes) -> Path:
    """A training file that runs in seconds, with its drafter and data in the same folder."""
    if not (folder / "draft").exists():
        assert initialise(target_dir, folder / "draft", *SIZES) == 0
        write_rows(folder / "a.jsonl", *[{"instruction": "Count", "output": COUNT}] * 2)
    stage = {"lr": 1e-3, "warmup_steps": 5} | changes
    lines = [f'target = "{target_dir}"', 'draft = "draft"', 'out = "out"', "max_length = 300"]
    lines += ["[held_out]", 'count = "a.jsonl"', "[[stage]]", 'data = ["a.jsonl"]']
    lines += [f"steps = {steps}", "batch = 2", "every = 1", "bf16 = false"]
    return write_rows(folder / "train.toml", *lines, *(f"{k} = {v}" for k, v in stage.items()))
