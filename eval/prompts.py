"""Benchmark prompts: JSONL lines of ``{"turns": [...]}``, in a folder or in a hub data set."""

import random
from collections.abc import Sequence
from pathlib import Path

from eval.errors import EvalError
from sglang_hyperdflash.tools.jsonl import read_lines

BENCHMARKS = ("gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt-bench")


def _turns_of(record: dict, where: str) -> list[str]:
    turns = record.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        content = f"turns {turns!r}" if "turns" in record else f"the fields {sorted(record)}"
        raise EvalError(
            f'{where}: expected {{"turns": ["...", ...]}}, one text for each user turn; found '
            f"{content[:120]}. Fix or remove this line."
        )
    return turns


def _file(data_dir: Path, name: str) -> Path:
    """``DIR/name.jsonl``, a path as it is, or one file of a hub data set ``hub:owner/set/file``.

    Raises ``EvalError`` for a hub name without its owner, data set or file.
    """
    if name.startswith("hub:"):
        parts = name.removeprefix("hub:").split("/", 2)
        if len(parts) < 3 or not all(parts):
            raise EvalError(f"benchmark {name}: expected hub:OWNER/DATASET/FILE.jsonl.")
        from huggingface_hub import hf_hub_download

        owner, dataset, file = parts
        return Path(hf_hub_download(f"{owner}/{dataset}", file, repo_type="dataset"))
    return Path(name) if Path(name).suffix == ".jsonl" else data_dir / f"{name}.jsonl"


def load(data_dir: Path, names: Sequence[str], limit: int) -> dict[str, list[list[str]]]:
    """Up to ``limit`` conversations of every benchmark, by its title in tables.

    They are drawn from the benchmark's file, the same in every call. Raises ``EvalError`` for a
    missing or empty file, a line without turns, or two benchmarks of one title, and ``BadRow`` for
    a line that is not a JSON object.
    """
    names_by_title: dict[str, str] = {}
    for name in names:
        title = Path(name).stem if name.endswith(".jsonl") else name
        if (namesake := names_by_title.setdefault(title, name)) != name:
            raise EvalError(
                f"benchmarks {namesake} and {name} would both be called {title}. Rename or "
                "copy one of the files."
            )
    prompts = {}
    for title, name in names_by_title.items():
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
        # Kinds of task come in turn in some files, so that even distances would skip some kinds.
        places = random.Random(limit).sample(range(len(lines)), min(limit, len(lines)))
        drawn = (lines[place] for place in sorted(places))
        prompts[title] = [_turns_of(record, where) for where, record in drawn]
    return prompts
