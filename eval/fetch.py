"""``python -m eval fetch``: the seven benchmarks as JSONL of ``{"turns": [...]}``.

Each comes from its home on the Hugging Face hub, or from a folder of copies made with
``datasets.save_to_disk``. The wording around a task is that of the DFlash comparisons: step by
step for mathematics, an instruction for code.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.errors import EvalError, one_line
from sglang_hyperdflash.tools.atomic import write_text

KIND = "python -m eval fetch"
STEP_BY_STEP = "Please reason step by step, and put your final answer within \\boxed{}."
PASSES_TESTS = "Write a solution to the following problem and make sure that it passes the tests:"
PROGRAMMER = (
    "You are an expert Python programmer. You will be given a question (problem specification) "
    "and will generate a correct Python program that matches the specification and passes all "
    "tests. You will NOT return anything except for the program"
)

Record = dict[str, Any]


def _mathematics(column: str) -> Callable[[Record], list[str]]:
    return lambda record: [f"{record[column]}\n{STEP_BY_STEP}"]


def _humaneval(record: Record) -> list[str]:
    return [f"{PASSES_TESTS}\n```python\n{record['prompt']}\n```"]


def _livecodebench(record: Record) -> list[str]:
    instruction = "Write your code in the following format:"
    if record["starter_code"]:
        instruction = "Use the following code structure:"
    code = record["starter_code"] or "# YOUR CODE HERE"
    return [
        f"{PROGRAMMER}\n\n### Question:\n{record['question_content']}\n\n"
        f"### Format: {instruction}\n```python\n{code}\n```\n\n"
        "### Answer: (use the provided format with backticks)"
    ]


@dataclass(frozen=True)
class Source:
    """A benchmark's home: arguments of ``datasets.load_dataset``, and how a record is read."""

    name: str
    split: str
    columns: tuple[str, ...]  # that ``turns`` reads
    turns: Callable[[Record], list[str]]  # user turns of one conversation
    config: str | None = None
    files: tuple[str, ...] = ()


_MBPP = "google-research-datasets/mbpp"
_MT_BENCH = "HuggingFaceH4/mt_bench_prompts"
_LIVE = "hf://datasets/livecodebench/code_generation_lite/test"
_LIVE_FILES = tuple(f"{_LIVE}{number}.jsonl" for number in ("", *range(2, 7)))
_LIVE_COLUMNS = ("question_content", "starter_code")
SOURCES = {
    "gsm8k": Source("openai/gsm8k", "test", ("question",), _mathematics("question"), "main"),
    "math500": Source("HuggingFaceH4/MATH-500", "test", ("problem",), _mathematics("problem")),
    "aime25": Source("MathArena/aime_2025", "train", ("problem",), _mathematics("problem")),
    "humaneval": Source("openai/openai_humaneval", "test", ("prompt",), _humaneval),
    "mbpp": Source(_MBPP, "test", ("prompt",), lambda r: [r["prompt"]], "sanitized"),
    # The library no longer runs this data set's loading script: its files are read as they are.
    "livecodebench": Source("json", "train", _LIVE_COLUMNS, _livecodebench, files=_LIVE_FILES),
    "mt-bench": Source(_MT_BENCH, "train", ("prompt",), lambda r: list(r["prompt"])),
}


def _open(source: Source, copy: Path | None) -> Iterable[Record]:
    """A benchmark's records, streamed; ``copy``: what ``save_to_disk`` wrote."""
    try:
        import datasets
    except ImportError as error:
        raise EvalError(
            "fetching needs the datasets library: pip install 'sglang-hyperdflash[eval]'."
        ) from error
    if copy is None:
        files = {"data_files": list(source.files)} if source.files else {}
        return datasets.load_dataset(
            source.name, source.config, split=source.split, streaming=True, **files
        )
    records = datasets.load_from_disk(copy)
    return records[source.split] if isinstance(records, datasets.DatasetDict) else records


def lines_of(name: str, copies: Path | None) -> list[str]:
    """A benchmark's JSON lines, from ``copies/NAME/`` or, where that is None, from the hub.

    Raises ``EvalError`` where it cannot be read or a record is of another form.
    """
    source, copy = SOURCES[name], None if copies is None else copies / name
    home = copy or f"the hub ({source.files[0] if source.files else source.name})"
    lines: list[str] = []
    try:
        records = _open(source, copy)
        # A hub's data set may know its columns only from its first record.
        columns = records.column_names or list(next(iter(records)))
        if missing := set(source.columns) - set(columns):
            raise EvalError(
                f"benchmark {name}: expected the columns {', '.join(source.columns)} in {home}, "
                f"found {', '.join(columns)} without {', '.join(sorted(missing))}."
            )
        for record in records.select_columns(list(source.columns)):
            turns = source.turns(record)
            if not turns or not all(isinstance(turn, str) and turn for turn in turns):
                raise EvalError(f"benchmark {name}, record {len(lines) + 1}: a turn is not a text.")
            lines.append(json.dumps({"turns": turns}, ensure_ascii=False) + "\n")
    except EvalError:
        raise
    except Exception as error:  # the library and what it uses raise many kinds
        raise EvalError(
            f"benchmark {name}: {home} cannot be read, after {len(lines)} records: "
            f"{type(error).__name__}: {one_line(error)} Files that were fetched are kept; run the "
            "same command again, or give --copies."
        ) from error
    return lines


def fetch(out: Path, names: Sequence[str], copies: Path | None) -> None:
    """Write ``OUT/NAME.jsonl`` of every benchmark without such a file, whole or not at all.

    Raises ``EvalError`` for unknown names and unreadable sources, ``WriteFailed`` for a full disk.
    """
    for name in names:
        if name not in SOURCES:
            raise EvalError(f"unknown benchmark {name!r}; known are {', '.join(SOURCES)}.")
    for name in names:
        path = out / f"{name}.jsonl"
        if path.is_file():
            print(f"{name}: {path} exists already")
            continue
        lines = lines_of(name, copies)
        write_text(path, "".join(lines))
        print(f"{name}: {len(lines)} prompts")
