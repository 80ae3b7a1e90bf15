"""Benchmark prompts: JSONL lines of ``{"turns": [...]}`` in a folder, or a hub data set's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from eval.errors import EvalError
from sglang_hyperdflash.tools.jsonl import read_lines

BENCHMARKS = ("gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt-bench")


def _turns_of(value: dict, where: str) -> list[str]:
    turns = value.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        found = f"turns {turns!r}" if "turns" in value else f"the fields {sorted(value)}"
        raise EvalError(
            f'{where}: expected {{"turns": ["...", ...]}}, one text for each user turn; found '
            f"{found[:120]}. Fix or remove this line."
        )
    return turns


def _file(data_dir: Path, name: str) -> Path:
    """``DIR/name.jsonl``, a path of its own, or one file of a hub data set ``hub:owner/set/f``.

    Raises:
        EvalError: a name of the hub without its owner, data set or file.
    """
    if name.startswith("hub:"):
        parts = name.removeprefix("hub:").split("/", 2)
        if len(parts) < 3 or not all(parts):
            raise EvalError(f"benchmark {name}: expected hub:OWNER/DATASET/FILE.jsonl.")
        from huggingface_hub import hf_hub_download

        owner, repository, file = parts
        return Path(hf_hub_download(f"{owner}/{repository}", file, repo_type="dataset"))
    own = Path(name)
    return own if own.suffix == ".jsonl" else data_dir / f"{name}.jsonl"


def _title(name: str) -> str:
    """A benchmark's name in tables: the file's stem for paths and hub files."""
    return Path(name).stem if name.endswith(".jsonl") else name


def load(data_dir: Path, names: Sequence[str], limit: int) -> dict[str, list[list[str]]]:
    """Up to ``limit`` conversations of every benchmark, drawn from its file, always the same.

    Raises:
        EvalError: a missing or empty file, a line without turns, or two benchmarks of one title.
        BadRow: a line that is not a JSON object.
    """
    titles: dict[str, str] = {}
    for name in names:
        if (other := titles.setdefault(_title(name), name)) != name:
            raise EvalError(
                f"benchmarks {other} and {name} would both be called {_title(name)}. Rename or "
                "copy one of the files."
            )
    found = {}
    for name in names:
        path = _file(data_dir, name)
        if not path.is_file():
            raise EvalError(
                f"benchmark {name}: {path} does not exist. Give --data-dir a folder of NAME.jsonl "
                "files (`python -m eval fetch` writes one), or name a .jsonl file or "
                "hub:owner/dataset/file.jsonl."
            )
        lines = list(read_lines(path))
        if not lines:
            raise EvalError(f"benchmark {name}: {path} is empty.")
        # At even distances a file whose kinds of task come in turn would give some kinds only.
        places = random.Random(limit).sample(range(len(lines)), min(limit, len(lines)))
        chosen = [lines[place] for place in sorted(places)]
        found[_title(name)] = [_turns_of(value, where) for where, value in chosen]
    return found
