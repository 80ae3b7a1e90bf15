"""``python -m eval fetch``: the seven benchmarks from data sets of the hub's columns."""

import json
from unittest.mock import Mock

import pytest

from eval import fetch
from eval.__main__ import main
from eval.prompts import BENCHMARKS, load

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
STEPS = "Please reason step by step, and put your final answer within \\boxed{}."
LIVE = "### Answer: (use the provided format with backticks)"
CODE = "Write a solution to the following problem and make sure that it passes the tests:\n"
LAST = {
    **{"gsm8k": [f"2 + 2?\n{STEPS}"], "math500": [f"$x$?\n{STEPS}"], "aime25": [f"$b$?\n{STEPS}"]},
    "humaneval": [f"{CODE}```python\ndef f():\n    \n```"],
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


@pytest.mark.parametrize("where", ["copies", "hub"])
def test_all_seven_become_files_that_run_reads(where, request, tmp_path, monkeypatch):
    out, asked = tmp_path / "data", {}
    names = {(s.name, s.config, s.split): name for name, s in fetch.SOURCES.items()}

    def load_dataset(name, config=None, *, split, streaming, data_files=()):
        asked[name] = data_files
        columns = COLUMNS[names[name, config, split]]
        return datasets.Dataset.from_dict(columns).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    copies = ["--copies", str(request.getfixturevalue("copies"))] if where == "copies" else []
    assert main(["fetch", "--out", str(out), *copies]) == 0
    assert len(asked) == (0 if copies else 7) and len(asked.get("json", "123456")) == 6
    for name, last in LAST.items():
        assert turns_of(out / f"{name}.jsonl")[-1] == last
    plain, started = (turns[0] for turns in turns_of(out / "livecodebench.jsonl"))
    assert plain.endswith(f"```python\n# YOUR CODE HERE\n```\n\n{LIVE}")
    assert started.endswith(f"    def f(self):\n        \n```\n\n{LIVE}")
    assert set(load(out, BENCHMARKS, 5)) == set(BENCHMARKS)


def test_a_file_that_is_there_is_kept_and_a_broken_fetch_goes_on(copies, tmp_path, refused):
    out = tmp_path / "data"
    out.mkdir()
    (out / "other.jsonl").write_text("")
    (copies / "math500").rename(copies / "away")
    command = ["fetch", "--out", str(out), "--copies", str(copies)]
    command += ["--benchmarks", "gsm8k,math500,mbpp"]
    assert "math500" in refused(*command)
    assert sorted(p.name for p in out.glob("*.jsonl")) == ["gsm8k.jsonl", "other.jsonl"]
    (copies / "away").rename(copies / "math500")
    (out / "gsm8k.jsonl").write_text('{"turns": ["kept"]}\n')
    assert main(command) == 0
    assert turns_of(out / "gsm8k.jsonl") == [["kept"]]
    names = ["gsm8k.jsonl", "math500.jsonl", "mbpp.jsonl", "other.jsonl"]
    assert sorted(p.name for p in out.glob("*")) == names


def test_other_columns_empty_turns_and_a_lost_hub_are_named(tmp_path, refused, monkeypatch):
    copies, out = tmp_path / "copies", tmp_path / "data"
    datasets.Dataset.from_dict({"text": ["x"]}).save_to_disk(copies / "mbpp")
    datasets.Dataset.from_dict({"prompt": [["a"], []]}).save_to_disk(copies / "mt-bench")
    command = ["fetch", "--out", out, "--copies", copies, "--benchmarks"]
    assert "columns prompt in" in refused(*command, "mbpp")
    assert "mt-bench, record 2" in refused(*command, "mt-bench")
    lost = ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=lost))
    assert "openai/gsm8k" in refused("fetch", "--out", out)
