"""``python -m eval fetch``: the seven benchmarks from data sets of the hub's columns."""

from __future__ import annotations

import dataclasses
import json

import pytest

from eval import fetch
from eval.__main__ import main
from eval.prompts import BENCHMARKS, load
from tests.conftest import BENCHMARKS as REAL

datasets = pytest.importorskip("datasets")

# Columns as the hub has them; those that the prompts do not need are there to be left out.
COLUMNS = {
    "gsm8k": {"question": ["1 + 1?", "2 + 2?"], "answer": ["2", "4"]},
    "math500": {"problem": ["$x$?"], "solution": ["1"], "answer": ["1"], "level": [1]},
    "aime25": {"problem_idx": [1], "problem": ["$b$?"], "answer": [70]},
    "humaneval": {"task_id": ["0"], "prompt": ["def f():\n    "], "test": [""]},
    "mbpp": {"task_id": [11], "prompt": ["Write f."], "code": ["def f(): ..."]},
    "livecodebench": {
        "question_content": ["Cards.", "Seniors."],
        "starter_code": ["", "class Solution:\n    def f(self):\n        "],
        "private_test_cases": ["x" * 1000, ""],
    },
    "mt-bench": {"prompt": [["First.", "Second."]], "reference": [[]], "category": ["writing"]},
}
LIVE = "### Answer: (use the provided format with backticks)"
LAST = {
    "gsm8k": ["2 + 2?\nPlease reason step by step, and put your final answer within \\boxed{}."],
    "math500": ["$x$?\nPlease reason step by step, and put your final answer within \\boxed{}."],
    "aime25": ["$b$?\nPlease reason step by step, and put your final answer within \\boxed{}."],
    "humaneval": [
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        "```python\ndef f():\n    \n```"
    ],
    "mbpp": ["Write f."],
    "mt-bench": ["First.", "Second."],
}


@pytest.fixture
def copies(tmp_path):
    """Every benchmark as ``save_to_disk`` leaves it, one of them with its splits."""
    for name, columns in COLUMNS.items():
        data = datasets.Dataset.from_dict(columns)
        if name == "gsm8k":
            data = datasets.DatasetDict({"train": data.select([0]), "test": data})
        data.save_to_disk(tmp_path / "copies" / name)
    return tmp_path / "copies"


def turns_of(path) -> list[list[str]]:
    return [json.loads(line)["turns"] for line in path.read_text().splitlines()]


def test_all_seven_become_files_that_run_reads(copies, tmp_path, capsys):
    out = tmp_path / "data"
    assert main(["fetch", "--out", str(out), "--copies", str(copies)]) == 0
    assert "gsm8k: 2 prompts" in capsys.readouterr().out
    for name, last in LAST.items():
        assert turns_of(out / f"{name}.jsonl")[-1] == last
    plain, started = (turns[0] for turns in turns_of(out / "livecodebench.jsonl"))
    assert plain.endswith(f"```python\n# YOUR CODE HERE\n```\n\n{LIVE}")
    assert started.endswith(f"    def f(self):\n        \n```\n\n{LIVE}")
    assert set(load(out, BENCHMARKS, 5)) == set(BENCHMARKS)


def test_a_prompt_taken_apart_is_put_together_the_same(copies, tmp_path):
    """By our mapping: each real prompt where they are, else each of the copies."""
    folder = tmp_path / "data" if REAL is None else REAL
    if REAL is None:
        assert main(["fetch", "--out", str(folder), "--copies", str(copies)]) == 0
    for name, source in fetch.SOURCES.items():
        real = turns_of(folder / f"{name}.jsonl")
        assert real
        for turns in real:
            record = {column: "" for column in source.columns}
            if name == "mt-bench":
                record["prompt"] = turns
            elif name == "livecodebench":
                body = turns[0].removeprefix(f"{fetch.PROGRAMMER}\n\n### Question:\n")
                question, form = body.rsplit("\n\n### Format: ", 1)
                record["question_content"] = question
                if form.startswith("Use the following"):
                    code = form.split("```python\n", 1)[1]
                    record["starter_code"] = code.rsplit("\n```\n\n### Answer", 1)[0]
            else:
                text = turns[0].removesuffix(f"\n{fetch.STEP_BY_STEP}")
                if name == "humaneval":
                    text = text.removeprefix(f"{fetch.PASSES_TESTS}\n```python\n")
                    text = text.removesuffix("\n```")
                record[source.columns[0]] = text
            assert source.turns(record) == turns


def test_a_file_that_is_there_is_kept_and_a_broken_fetch_goes_on(copies, tmp_path, capsys):
    """Found as: a folder with one file of the user's own was refused."""
    out = tmp_path / "data"
    out.mkdir()
    (out / "mine.jsonl").write_text("")
    (copies / "math500").rename(copies / "away")
    command = ["fetch", "--out", str(out), "--copies", str(copies)]
    command += ["--benchmarks", "gsm8k,math500,mbpp"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "benchmark math500" in error and "Traceback" not in error and error.count("\n") == 1
    assert sorted(p.name for p in out.glob("*.jsonl")) == ["gsm8k.jsonl", "mine.jsonl"]
    (copies / "away").rename(copies / "math500")
    (out / "gsm8k.jsonl").write_text('{"turns": ["mine"]}\n')
    assert main(command) == 0
    assert turns_of(out / "gsm8k.jsonl") == [["mine"]]
    assert sorted(p.name for p in out.glob("*")) == [
        *("gsm8k.jsonl", "math500.jsonl", "mbpp.jsonl", "mine.jsonl")
    ]


def test_other_columns_and_empty_turns_are_named(copies, tmp_path, capsys):
    command = ["fetch", "--out", str(tmp_path / "data"), "--copies", str(copies)]
    data = datasets.Dataset.from_dict({"text": ["x"]})
    data.save_to_disk(copies / "mbpp")
    assert main([*command, "--benchmarks", "mbpp"]) == 2
    assert "expected the columns prompt in" in capsys.readouterr().err
    (copies / "mt-bench").rename(copies / "old")
    datasets.Dataset.from_dict({"prompt": [["a"], []]}).save_to_disk(copies / "mt-bench")
    assert main([*command, "--benchmarks", "mt-bench"]) == 2
    assert "mt-bench, record 2: a turn is not a text" in capsys.readouterr().err
    assert main([*command, "--benchmarks", "nothing"]) == 2
    assert "unknown benchmark 'nothing'" in capsys.readouterr().err


def test_the_hub_is_asked_for_each_benchmark_s_own_split_and_columns(monkeypatch, tmp_path):
    """Through ``load_dataset`` itself, with a data set of the hub's columns in its place."""
    asked = {}

    def load_dataset(name, config=None, *, split, streaming, data_files=None):
        asked[name, config, split] = data_files
        benchmark = next(
            k
            for k, s in fetch.SOURCES.items()
            if (s.name, s.config, s.split) == (name, config, split)
        )
        return datasets.Dataset.from_dict(COLUMNS[benchmark]).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    fetch.fetch(tmp_path)
    assert ("openai/gsm8k", "main", "test") in asked and len(asked) == 7
    assert len(asked["json", None, "train"]) == 6
    for name, last in LAST.items():
        assert turns_of(tmp_path / f"{name}.jsonl")[-1] == last


def test_json_files_are_streamed_by_the_library(monkeypatch, tmp_path):
    """The real ``load_dataset``, with files of this machine in place of the hub's."""
    columns = COLUMNS["livecodebench"]
    lines = [
        json.dumps(dict(zip(columns, row, strict=True)))
        for row in zip(*columns.values(), strict=True)
    ]
    for i, line in enumerate(lines):
        (tmp_path / f"{i}.jsonl").write_text(line + "\n")
    files = tuple(str(tmp_path / f"{i}.jsonl") for i in range(2))
    source = dataclasses.replace(fetch.SOURCES["livecodebench"], files=files)
    monkeypatch.setitem(fetch.SOURCES, "livecodebench", source)
    fetch.fetch(tmp_path / "out", ["livecodebench"])
    found = [turns[0] for turns in turns_of(tmp_path / "out" / "livecodebench.jsonl")]
    assert "Cards." in found[0] and "class Solution" in found[1]


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch, tmp_path, capsys):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert main(["fetch", "--out", str(tmp_path / "data")]) == 2
    error = capsys.readouterr().err
    assert "the hub (openai/gsm8k) cannot be read" in error and error.count("\n") == 1
