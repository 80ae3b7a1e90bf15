"""``python -m eval fetch``: the seven benchmarks as JSONL of ``{"turns": [...]}``.

Each comes from its home on the Hugging Face hub, or from a folder of copies made with
``datasets.save_to_disk``. The wording around a task is that of the DFlash comparisons: step by
step for mathematics, an instruction for code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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

    turns: from a record to the user turns of one conversation.
    """

    name: str
    split: str
    columns: tuple[str, ...]
    turns: Callable[[Record], list[str]]
    config: str | None = None
    files: tuple[str, ...] = ()


_LIVE = "hf://datasets/livecodebench/code_generation_lite/test"
_MBPP = ("google-research-datasets/mbpp", "test", ("prompt",), lambda r: [r["prompt"]], "sanitized")
SOURCES = {
    "gsm8k": Source("openai/gsm8k", "test", ("question",), _mathematics("question"), "main"),
    "math500": Source("HuggingFaceH4/MATH-500", "test", ("problem",), _mathematics("problem")),
    "aime25": Source("MathArena/aime_2025", "train", ("problem",), _mathematics("problem")),
    "humaneval": Source("openai/openai_humaneval", "test", ("prompt",), _humaneval),
    "mbpp": Source(*_MBPP),
    # The library no longer runs its own loading script: its files are read as they are.
    "livecodebench": Source(
        "json",
        "train",
        ("question_content", "starter_code"),
        _livecodebench,
        files=tuple(f"{_LIVE}{number}.jsonl" for number in ("", *range(2, 7))),
    ),
    "mt-bench": Source(
        "HuggingFaceH4/mt_bench_prompts", "train", ("prompt",), lambda r: list(r["prompt"])
    ),
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
    found = datasets.load_from_disk(copy)
    return found[source.split] if isinstance(found, datasets.DatasetDict) else found


def lines_of(name: str, copies: Path | None) -> list[str]:
    """A benchmark's JSON lines.

    Args:
        copies: folder of ``NAME/`` data sets written by ``save_to_disk``; None for the hub.

    Raises:
        EvalError: it cannot be read, or a record is of another form.
    """
    source = SOURCES[name]
    hub = source.files[0] if source.files else source.name
    where = f"the hub ({hub})" if copies is None else copies / name
    lines: list[str] = []
    try:
        found = _open(source, None if copies is None else copies / name)
        # A hub's data set may know its columns only from its first record.
        columns = found.column_names or list(next(iter(found)))
        if missing := set(source.columns) - set(columns):
            raise EvalError(
                f"benchmark {name}: expected the columns {', '.join(source.columns)} in {where}, "
                f"found {', '.join(columns)} without {', '.join(sorted(missing))}."
            )
        for record in found.select_columns(list(source.columns)):
            turns = source.turns(record)
            if not turns or not all(isinstance(turn, str) and turn for turn in turns):
                raise EvalError(f"benchmark {name}, record {len(lines) + 1}: a turn is not a text.")
            lines.append(json.dumps({"turns": turns}, ensure_ascii=False) + "\n")
    except EvalError:
        raise
    except Exception as error:  # the library raises many kinds, of several others
        raise EvalError(
            f"benchmark {name}: {where} cannot be read, after {len(lines)} records: "
            f"{type(error).__name__}: {one_line(error)} Files that were fetched are kept; run the "
            "same command again, or give --copies."
        ) from error
    return lines


def fetch(out: Path, names: Sequence[str] = BENCHMARKS, copies: Path | None = None) -> None:
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
            print(f"{name}: {path} exists already")
            continue
        lines = lines_of(name, copies)
        write_text(path, "".join(lines))
        print(f"{name}: {len(lines)} prompts")
