"""``hyperdflash regenerate`` against an HTTP server that answers like SGLang's native API."""

import shutil
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands.regenerate import TargetServer
from sglang_hyperdflash.targets.chats import Chat, load_chats
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.conversations import load_samples
from tests.unit.commands.builders import dialogue, regenerate, rows_of, write_rows
from tests.unit.targets.published_v4 import published_v4
from tests.waiting import PATIENCE, until
from tests.warm_start.client import start_command

ONE_BY_ONE = ("--concurrency", "1")
MADE = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "2"}
CUT, STOP = {"type": "length", "length": 3}, {"type": "stop", "matched": 1}


@pytest.fixture
def data(tmp_path) -> Path:
    messages = dialogue("Be short.", "One?", "THROWN AWAY", "Two?")
    others = {"turns": ["Three?"]}, {"instruction": "Four?", "output": "x"}
    return write_rows(tmp_path / "data.jsonl", {"messages": messages}, *others)


@pytest.fixture
def call(server, target_dir, data, tmp_path):
    """Answers a file; gives the exit code."""

    def run(out="out.jsonl", *options: str, target=target_dir, source=data) -> int:
        return main(regenerate([server], target, source, tmp_path / out, *options))

    return run


def test_every_user_turn_is_answered_by_the_target(call, server, target_dir, tmp_path):
    out = tmp_path / "out.jsonl"
    assert call("out.jsonl", "--temperature", "0.5", "--concurrency", "2") == 0
    records = rows_of(out)
    assert [len(r["samples"]) for r in records] == [2, 1, 1]
    assert "THROWN AWAY" not in out.read_text()
    second = records[0]["samples"][1]
    (start, end), tokens = second["spans"][0], second["tokens"]
    assert tokens[start:end] == [start] * 3
    first_length = len(records[0]["samples"][0]["tokens"]) - 3
    chats = load_chats(str(target_dir))
    assert f"answer {first_length}" in chats.tokenizer.decode(tokens[:start])
    expected = {"temperature": 0.5, "top_p": 0.8, "top_k": 20, "max_new_tokens": 2048}
    assert all(p["sampling_params"] == expected for p in server.prompts)
    assert len(load_samples([out], chats, 512).samples) == 4


def test_a_published_v4_is_asked_as_it_is_served(call, server, target_dir, tmp_path, refused):
    """With tools, whose calls the target makes itself, and with its reasoning."""
    folder = published_v4(tmp_path / "v4", target_dir)
    chats = load_chats(str(folder))
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    thought = {"role": "assistant", "content": None, "reasoning_content": "I add."}
    calls = thought | {"tool_calls": [MADE]}
    users = [{"role": "user", "content": f"{n}?"} for n in ("One", "Two")]
    asked = [users[0], {"role": "assistant", "content": "x"} | calls, RESULT, users[1]]
    thinking = {"thinking": True}
    with_tools = Chat(asked, [tool], thinking)
    call_tokens = chats.answer(with_tools.with_messages(asked[:2]), "here")
    word = {"role": "assistant", "content": "Done.", "reasoning_content": "I am told."}
    word_tokens = chats.answer(Chat([users[0], word], None, thinking), "here")

    def answer(ids):  # the call to the first prompt that has tools, words to all others
        first = chats.prompt(with_tools.with_messages(asked[:1]), "here")
        return call_tokens if ids == first else word_tokens

    server.answer = answer
    lines = {"messages": asked, "tools": [tool]}, {"turns": ["One?", "Two?"]}
    source = write_rows(tmp_path / "tools", *lines)
    options = [*ONE_BY_ONE, "--template-args", '{"thinking": true}']
    assert call("out.jsonl", *options, target=folder, source=source) == 0
    history = [users[0], calls, RESULT, word, users[1]]
    expected = [Chat(history[:n], [tool], thinking) for n in (1, 3, 5)]
    expected += [Chat(m, None, thinking) for m in (users[:1], [users[0], word, users[1]])]
    prompts = [chats.prompt(chat, "here") for chat in expected]
    assert [prompt["input_ids"] for prompt in server.prompts] == prompts
    first, second = rows_of(tmp_path / "out.jsonl")
    (stored,) = first["samples"]  # with tools no reasoning is dropped
    assert stored["tokens"] == prompts[2] + word_tokens and len(stored["spans"]) == 3
    assert [s["tokens"] for s in second["samples"]] == [p + word_tokens for p in prompts[3:]]
    assert "I am told." not in chats.tokenizer.decode(prompts[4])
    assert first["messages"] == [*history[:1], calls | {"content": ""}, *history[2:], word]
    wrong = regenerate([server], folder, source, tmp_path / "b", "--template-args", '{"think": 1}')
    assert "think" in refused(*wrong)


def test_results_of_calls_it_did_not_make_follow_the_data_s(call, server, target_dir, tmp_path):
    folder = published_v4(tmp_path / "v4", target_dir)
    chats = load_chats(str(folder))
    made = {"role": "assistant", "content": "", "tool_calls": [MADE]}
    asked = [{"role": "user", "content": "One?"}, made, RESULT]
    words = chats.answer(Chat([asked[0], {"role": "assistant", "content": "Two."}]), "here")
    server.answer = lambda ids: words
    assert call(target=folder, source=write_rows(tmp_path / "tools", {"messages": asked})) == 0
    prompts = [chats.prompt(Chat(asked[:n]), "here") for n in (1, 3)]
    assert [prompt["input_ids"] for prompt in server.prompts] == prompts
    (record,) = rows_of(tmp_path / "out.jsonl")
    assert [s["tokens"] for s in record["samples"]] == [prompt + words for prompt in prompts]


def test_an_answer_has_the_room_that_every_server_leaves(servers, target_dir, data, tmp_path):
    servers[1].context = 400
    assert main(regenerate(servers, target_dir, data, tmp_path / "out.jsonl")) == 0
    asked = [p for server in servers for p in server.prompts]
    assert {p["sampling_params"]["max_new_tokens"] + len(p["input_ids"]) for p in asked} == {400}


def test_answers_that_are_cut_are_counted_and_can_be_left_out(call, server, tmp_path, capsys):
    for out, options in ("kept.jsonl", []), ("left.jsonl", ["--finished-only", "--strict"]):
        server.failures = [STOP, CUT, CUT, STOP]
        assert call(out, *ONE_BY_ONE, *options) == 0
        assert "2 of 4 answers" in capsys.readouterr().out
    kept, left = rows_of(tmp_path / "kept.jsonl"), rows_of(tmp_path / "left.jsonl")
    assert [len(r["samples"]) for r in kept] == [2, 1, 1]
    assert [len(r["samples"]) for r in left] == [1, 0, 1]
    assert [len(r["messages"]) for r in left] == [3, 0, 2]
    assert [r["index"] for r in left if "refused" in r] == [0, 1]
    asked = len(server.prompts)
    assert call("left.jsonl", "--finished-only", "--strict") == 0
    assert len(server.prompts) == asked, "they would be cut again"


def test_answers_of_another_model_are_refused(call, server, target_dir, tmp_path, capsys):
    other, copy = (shutil.copytree(target_dir, tmp_path / name) for name in ("other", "copy"))
    tensors = load_file(other / "model.safetensors")
    (norm,) = (name for name in tensors if name in ("norm.weight", "model.norm.weight"))
    save_file(tensors | {norm: tensors[norm] + 1}, other / "model.safetensors")
    server.model = str(other)
    assert call() == 2 and str(other) in capsys.readouterr().err
    assert not server.prompts and not (tmp_path / "out.jsonl").read_bytes()
    server.model = str(copy)
    assert call("out.jsonl", "--limit", "1") == 0
    server.model = "owner/other"
    assert call() == 2 and "owner/other" in capsys.readouterr().err
    assert len(rows_of(tmp_path / "out.jsonl")) == 1
    server.model = "copy/"  # the same, spelled otherwise
    assert call() == 0
    assert [row["served"] for row in rows_of(tmp_path / "out.jsonl")] == ["copy"] * 3


def test_only_what_is_surely_another_model_is_refused(target_dir, tmp_path, monkeypatch):
    """Another host's folder, a relative one, none, one without weights, or one that is closed."""
    other = tmp_path / "other"
    other.mkdir()
    save_file({"model.norm.weight": torch.ones(256)}, other / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HyperDFlashConfigError, match="other"):
        TargetServer("http://localhost:1", str(other), 9).check(str(target_dir), {})
    TargetServer("http://gpu7:30000", str(other), 9).check(str(target_dir), {})
    for model in ("other", "/no/such/folder", str(tmp_path)):
        TargetServer("http://127.0.0.1:1", model, 9).check(str(target_dir), {})

    def closed(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", closed)
    TargetServer("http://localhost:1", str(other), 9).check("/here/v4", {})


@pytest.mark.heavy
def test_an_interrupt_does_not_wait_for_answers(server, target_dir, data, tmp_path):
    server.hold = threading.Event()
    command = regenerate([server], target_dir, data, tmp_path / "out.jsonl")
    process = start_command(*command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    until(lambda: server.prompts or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE)
    server.hold.set()
    assert process.returncode == 130 and b"Traceback" not in said
