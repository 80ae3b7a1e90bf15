"""One file as people have them, through every command that reads chat data."""

from __future__ import annotations

import gzip
import json

import pytest

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands import capture
from tests.unit.commands.test_train import small

COUNT = ", ".join(map(str, range(30)))
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
NAMES = ("regenerate", "train", "capture")
# Of the last two an answer is unusable, which regenerate replaces.
BAD = [0, 2, 3, 4, 7]


@pytest.fixture
def commands(tmp_path, target_dir, server, monkeypatch):
    """Each command's line, where it lists what it leaves out, and what it makes only of work."""
    config = small(tmp_path, target_dir)
    config.write_text(config.read_text().replace('["a.jsonl"]', '["data"]'))
    monkeypatch.setattr(capture, "_capture", lambda *_: (tmp_path / "shards").touch())
    data, target = tmp_path / "data", ["--target", str(target_dir)]
    output, work, out = (tmp_path / name for name in ("answers.jsonl", "work", "states"))
    regenerate = ["regenerate", "--server", server.url, "--input", str(data)]
    captured = ["capture", "--data", str(data), "--out", str(out)]
    return {
        "regenerate": (
            [*regenerate, *target, "--output", str(output)],
            tmp_path / "answers.left_out.jsonl",
            output,
        ),
        "train": (
            ["train", "--config", str(config), "--work", str(work)],
            work / "left_out.jsonl",
            work / "states",
        ),
        "capture": (
            [*captured, *target],
            out / "capture-1-of-1.left_out.jsonl",
            tmp_path / "shards",
        ),
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_row_is_listed_and_left_out_by_every_command(
    tmp_path, commands, capsys, server, name
):
    """Found as: the first of them ended the run, some with a traceback; systems were dropped."""
    command, listed, _ = commands[name]
    folder = tmp_path / "data"
    folder.mkdir()
    with gzip.open(folder / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in ROWS[:5])
    (folder / "b.json").write_text("\ufeff" + json.dumps(ROWS[5:]))
    for _ in range(2):
        assert main(command) == 0
        said = capsys.readouterr().out
        places = [f"{folder / 'a.jsonl.gz'}:{n}" for n in range(1, 6)]
        places += [f"{folder / 'b.json'}, row {n}" for n in (1, 2, 3)]
        entries = [json.loads(line) for line in listed.read_text().splitlines()]
        rows = [(entry["index"], entry["where"]) for entry in entries]
        bad = BAD[:3] if name == "regenerate" else BAD
        assert rows == [(index, places[index]) for index in bad]
        assert f"{len(bad)} left out, listed in" in said
        assert all(places[index] in said for index in bad)
    if name == "regenerate":
        records = map(json.loads, (tmp_path / "answers.jsonl").read_text().splitlines())
        assert {r["index"]: r["messages"][0]["content"] for r in records} == {
            1: "Be short.",
            4: "Hi",
            5: "Count",
            6: "Count",
            7: "a",
        }
        assert len(server.prompts) == 5


PAST = {"samples": [{"tokens": [5, 99_999], "spans": [[1, 2]]}]}
OVERLAPPING = {"samples": [{"tokens": [5] * 4, "spans": [[1, 3], [2, 4]]}]}


@pytest.mark.parametrize(
    "name, rows, options, message",
    [
        *((name, [ROWS[5], ROWS[0]], ["--strict"], "data:2: ") for name in NAMES),
        *((name, [ROWS[0], ROWS[2]], [], "no usable row of ") for name in NAMES),
        *(
            (name, [ROWS[5], bad], [], "data:2: ")
            for name in NAMES[1:]
            for bad in (PAST, OVERLAPPING)
        ),
    ],
)
def test_a_run_ends_before_any_work(
    tmp_path, commands, capsys, server, name, rows, options, message
):
    """Found as: an IndexError inside torch of the ids, and overlapping spans were trained on."""
    command, _, made = commands[name]
    (tmp_path / "data").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([*command, *options]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not made.exists() and not server.prompts
