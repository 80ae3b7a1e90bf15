"""One file as people have them, through every command that reads chat data."""

import gzip
import json

import pytest

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands import capture
from tests.unit.commands.builders import COUNT, regenerate, rows_of, small, write_rows

ROWS = [
    {"conversations": []},
    {"system": "Be short.", "question": "Count", "answer": COUNT},
    # An unusable answer, which regenerate replaces.
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}]},
    {"conversations": [{"from": "human", "value": "Count"}, {"from": "gpt", "value": COUNT}]},
]


@pytest.fixture
def commands(tmp_path, target_dir, server, monkeypatch):
    """Each command's line, where it lists what it leaves out, and what it makes only of work."""
    config = small(tmp_path, target_dir)
    config.write_text(config.read_text().replace('["a.jsonl"]', '["data"]'))
    monkeypatch.setattr(capture, "_capture", lambda *_: (tmp_path / "shards").touch())
    data, work, out = tmp_path / "data", tmp_path / "work", tmp_path / "states"
    train = ["train", "--config", str(config), "--work", str(work)]
    captured = ["capture", "--target", str(target_dir), "--data", str(data), "--out", str(out)]
    asked = regenerate([server], target_dir, data, tmp_path / "answers.jsonl")
    listed = tmp_path / "answers.left_out.jsonl", out / "capture-1-of-1.left_out.jsonl"
    return {
        "regenerate": (asked, listed[0], tmp_path / "answers.jsonl"),
        "train": (train, work / "left_out.jsonl", work / "states"),
        "capture": (captured, listed[1], tmp_path / "shards"),
    }


@pytest.mark.parametrize("name", ["regenerate", "train", "capture"])
def test_every_command_lists_a_bad_row_and_leaves_it_out(tmp_path, commands, capsys, server, name):
    command, listed, _ = commands[name]
    folder = tmp_path / "data"
    folder.mkdir()
    with gzip.open(folder / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in ROWS[:2])
    (folder / "b.json").write_text("\ufeff" + json.dumps(ROWS[2:]))
    places = [f"{folder / 'a.jsonl.gz'}:{n}" for n in (1, 2)]
    places += [f"{folder / 'b.json'}, row {n}" for n in (1, 2)]
    bad = [0] if name == "regenerate" else [0, 2]
    for _ in range(2):
        assert main(command) == 0
        said, entries = capsys.readouterr().out, rows_of(listed)
        assert [(e["index"], e["where"]) for e in entries] == [(i, places[i]) for i in bad]
        assert f"{len(bad)} left out" in said and all(places[index] in said for index in bad)
    if name == "regenerate":
        records = rows_of(tmp_path / "answers.jsonl")
        asked = {r["index"]: r["messages"][0]["content"] for r in records}
        assert asked == {1: "Be short.", 2: "Hi", 3: "Count"} and len(server.prompts) == 3


@pytest.mark.parametrize("name", ["regenerate", "train", "capture"])
@pytest.mark.parametrize("rows, options", [([ROWS[1], ROWS[0]], ["--strict"]), ([ROWS[0]] * 2, [])])
def test_a_run_ends_before_any_work(tmp_path, commands, refused, server, name, rows, options):
    command, _, made = commands[name]
    write_rows(tmp_path / "data", *rows)
    assert "data:2: " in refused(*command, *options)
    assert not made.exists() and not server.prompts
