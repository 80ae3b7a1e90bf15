"""One file as people have them, through every command that reads chat data."""

from __future__ import annotations

import gzip
import json

import pytest

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands import capture
from tests.unit.commands.builders import COUNT, regenerate, rows_of, small, write_rows

ROWS = [
    {"conversations": []},
    {"system": "Be short.", "conversation": [{"from": "human", "value": "Count"}]},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "bing", "value": "Yo"}]},
    {"prompt": "Hi \ud83d", "response": COUNT},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}]},
    {"question": "Count", "answer": COUNT},
    {"conversations": [{"from": "gpt", "value": "Hey"}, {"from": "human", "value": "Count"}]},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>b"}]},
]
ROWS[1]["conversation"].append({"from": "gpt", "value": COUNT})
ROWS[6]["conversations"].append({"from": "gpt", "value": COUNT})
# Of the last two an answer is unusable, which regenerate replaces.
BAD = [0, 2, 3, 4, 7]
ASKED = {1: "Be short.", 4: "Hi", 5: "Count", 6: "Count", 7: "a"}


@pytest.fixture
def commands(tmp_path, target_dir, server, monkeypatch):
    """Each command's line, where it lists what it leaves out, and what it makes only of work."""
    config = small(tmp_path, target_dir)
    config.write_text(config.read_text().replace('["a.jsonl"]', '["data"]'))
    monkeypatch.setattr(capture, "_capture", lambda *_: (tmp_path / "shards").touch())
    data, work, out = tmp_path / "data", tmp_path / "work", tmp_path / "states"
    train = ["train", "--config", config, "--work", work]
    captured = ["capture", "--target", target_dir, "--data", data, "--out", out]
    answers = tmp_path / "answers.jsonl"
    asked = regenerate([server], target_dir, data, answers)
    return {
        "regenerate": (asked, tmp_path / "answers.left_out.jsonl", answers),
        "train": (list(map(str, train)), work / "left_out.jsonl", work / "states"),
        "capture": (
            list(map(str, captured)),
            out / "capture-1-of-1.left_out.jsonl",
            tmp_path / "shards",
        ),
    }


@pytest.mark.parametrize("name", ["regenerate", "train", "capture"])
def test_a_bad_row_is_listed_and_left_out_by_every_command(
    tmp_path, commands, capsys, server, name
):
    command, listed, _ = commands[name]
    folder = tmp_path / "data"
    folder.mkdir()
    with gzip.open(folder / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in ROWS[:5])
    (folder / "b.json").write_text("\ufeff" + json.dumps(ROWS[5:]))
    places = [f"{folder / 'a.jsonl.gz'}:{n}" for n in range(1, 6)]
    places += [f"{folder / 'b.json'}, row {n}" for n in (1, 2, 3)]
    bad = BAD[:3] if name == "regenerate" else BAD
    for _ in range(2):
        assert main(command) == 0
        said, entries = capsys.readouterr().out, rows_of(listed)
        assert [(e["index"], e["where"]) for e in entries] == [(i, places[i]) for i in bad]
        assert f"{len(bad)} left out" in said and all(places[index] in said for index in bad)
    if name == "regenerate":
        records = rows_of(tmp_path / "answers.jsonl")
        assert {r["index"]: r["messages"][0]["content"] for r in records} == ASKED
        assert len(server.prompts) == 5


PAST = {"samples": [{"tokens": [5, 99_999], "spans": [[1, 2]]}]}
OVERLAPPING = {"samples": [{"tokens": [5] * 4, "spans": [[1, 3], [2, 4]]}]}


@pytest.mark.parametrize(
    "name, rows, options",
    [
        ("regenerate", [ROWS[5], ROWS[0]], ["--strict"]),
        ("regenerate", [ROWS[0], ROWS[2]], []),
        ("train", [ROWS[5], ROWS[0]], ["--strict"]),
        ("train", [ROWS[0], ROWS[2]], []),
        ("train", [ROWS[5], PAST], []),
        ("train", [ROWS[5], OVERLAPPING], []),
        ("capture", [ROWS[5], ROWS[0]], ["--strict"]),
    ],
)
def test_a_run_ends_before_any_work(tmp_path, commands, refused, server, name, rows, options):
    """Token ids past the vocabulary, and spans that overlap, are no rows to leave out."""
    command, _, made = commands[name]
    write_rows(tmp_path / "data", *rows)
    assert "data:2: " in refused(*command, *options)
    assert not made.exists() and not server.prompts
