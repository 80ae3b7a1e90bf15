"""``python -m eval fetch``: the seven benchmarks as JSONL of ``{"turns": [...]}``.

Each comes from its home on the Hugging Face hub, or from a folder of copies made with
``datasets.save_to_disk``. The wording around a task is that of the DFlash comparisons: step by
step for mathematics, an instruction for code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.errors import EvalError, one_line
from eval.prompts import BENCHMARKS
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
    starter = record["starter_code"]
    if starter:
        form = f"Use the following code structure:\n```python\n{starter}\n```"
    else:
        form = "Write your code in the following format:\n```python\n# YOUR CODE HERE\n```"
    return [
        f"{PROGRAMMER}\n\n### Question:\n{record['question_content']}\n\n### Format: {form}\n\n"
        "### Answer: (use the provided format with backticks)"
    ]


@dataclass(frozen=True)
class Source:
    """A benchmark's home: arguments of ``datasets.load_dataset``, its columns, its turns.

    turns: from a record to the user turns of one conversation. prompts: how many there are.
    """

    name: str
    split: str
    columns: tuple[str, ...]
    turns: Callable[[Record], list[str]]
    prompts: int
    config: str | None = None
    files: tuple[str, ...] = field(default=())


_LIVE = "hf://datasets/livecodebench/code_generation_lite/test"
SOURCES = {
    "gsm8k": Source(
        "openai/gsm8k", "test", ("question",), _mathematics("question"), 1319, config="main"
    ),
    "math500": Source("HuggingFaceH4/MATH-500", "test", ("problem",), _mathematics("problem"), 500),
    "aime25": Source("MathArena/aime_2025", "train", ("problem",), _mathematics("problem"), 30),
    "humaneval": Source("openai/openai_humaneval", "test", ("prompt",), _humaneval, 164),
    "mbpp": Source(
        "google-research-datasets/mbpp",
        "test",
        ("prompt",),
        lambda record: [record["prompt"]],
        257,
        config="sanitized",
    ),
    # Its own loading script is no longer run by the library: its files are read as they are.
    "livecodebench": Source(
        "json",
        "train",
        ("question_content", "starter_code"),
        _livecodebench,
        1055,
        files=tuple(f"{_LIVE}{number}.jsonl" for number in ("", *range(2, 7))),
    ),
    "mt-bench": Source(
        "HuggingFaceH4/mt_bench_prompts",
        "train",
        ("prompt",),
        lambda record: list(record["prompt"]),
        80,
    ),
}


def _library():
    try:
        import datasets
    except ImportError as error:
        raise EvalError(
            "fetching needs the datasets library: pip install 'sglang-hyperdflash[eval]'."
        ) from error
    return datasets


def open_source(name: str, copies: Path | None) -> Iterable[Record]:
    """A benchmark's records with its columns alone, streamed.

    Args:
        copies: folder of ``NAME/`` data sets written by ``save_to_disk``; None for the hub.

    Raises:
        EvalError: it cannot be reached or read, or lacks a column.
    """
    datasets, source = _library(), SOURCES[name]
    where = f"the hub ({source.files[0] if source.files else source.name})"
    try:
        if copies is not None:
            where = str(copies / name)
            found = datasets.load_from_disk(where)
            if isinstance(found, datasets.DatasetDict):
                found = found[source.split]
        else:
            files = {"data_files": list(source.files)} if source.files else {}
            found = datasets.load_dataset(
                source.name, source.config, split=source.split, streaming=True, **files
            )
        # A hub's data set may know its columns only from its first record.
        columns = found.column_names or list(next(iter(found)))
    except Exception as error:  # the library raises many kinds, of several others
        raise EvalError(
            f"benchmark {name}: {where} cannot be read: {type(error).__name__}: {one_line(error)} "
            "Files that were fetched are kept; run the same command again, or give --copies."
        ) from error
    missing = [column for column in source.columns if column not in columns]
    if missing:
        raise EvalError(
            f"benchmark {name}: expected the columns {', '.join(source.columns)} in {where}, found "
            f"{', '.join(columns)}."
        )
    return found.select_columns(list(source.columns))


def lines_of(name: str, copies: Path | None) -> list[str]:
    """A benchmark's JSON lines.

    Raises:
        EvalError: it cannot be read, or a record is of another form.
    """
    lines = []
    records = iter(open_source(name, copies))
    while True:
        try:
            record = next(records, None)
            if record is None:
                return lines
            turns = SOURCES[name].turns(record)
        except Exception as error:  # a connection that breaks in the middle, a null column
            raise EvalError(
                f"benchmark {name}, record {len(lines) + 1}: {type(error).__name__}: "
                f"{one_line(error)} Run the same command again."
            ) from error
        if not turns or not all(isinstance(turn, str) and turn for turn in turns):
            raise EvalError(f"benchmark {name}, record {len(lines) + 1}: a turn is not a text.")
        lines.append(json.dumps({"turns": turns}, ensure_ascii=False) + "\n")


def fetch(
    out: Path,
    names: Sequence[str] = BENCHMARKS,
    copies: Path | None = None,
    progress: Callable[[str], None] = print,
) -> None:
    """Write ``OUT/NAME.jsonl`` of every benchmark that is not there yet, whole or not at all.

    Raises:
        EvalError: an unknown name, or a source that cannot be read. WriteFailed: a full disk.
    """
    for name in names:
        if name not in SOURCES:
            raise EvalError(f"unknown benchmark {name!r}; known are {', '.join(SOURCES)}.")
    for name in names:
        path = out / f"{name}.jsonl"
        if path.is_file():
            progress(f"{name}: {path} is there already")
            continue
        lines = lines_of(name, copies)
        write_text(path, "".join(lines))
        usual = SOURCES[name].prompts
        note = "" if len(lines) == usual else f" (the comparisons of the paper had {usual})"
        progress(f"{name}: {len(lines)} prompts{note}")
