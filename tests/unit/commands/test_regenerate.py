"""``hyperdflash regenerate`` against an HTTP server that answers like SGLang's native API."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands import pool, regenerate
from sglang_hyperdflash.targets.chats import Chat, load_chats
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.conversations import load_samples
from tests.unit.targets.published_v4 import published_v4
from tests.waiting import PATIENCE, until


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    chat = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "THROWN AWAY"},
        {"role": "user", "content": "Two?"},
    ]
    lines = [{"messages": chat}, {"turns": ["Three?"]}, {"instruction": "Four?", "output": "x"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def call(server, target_dir, data, out, *options: str) -> int:
    arguments = ["--server", server.url, "--target", str(target_dir), "--input", str(data)]
    return main(["regenerate", *arguments, "--output", str(out), *options])


def test_every_user_turn_is_answered_by_the_target(server, target_dir, data, tmp_path):
    out = tmp_path / "out.jsonl"
    assert call(server, target_dir, data, out, "--temperature", "0.5", "--concurrency", "2") == 0
    records = sorted(map(json.loads, out.read_text().splitlines()), key=lambda r: r["index"])
    assert [len(r["samples"]) for r in records] == [2, 1, 1]
    assert "THROWN AWAY" not in out.read_text()
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    second = records[0]["samples"][1]
    (start, end), tokens = second["spans"][0], second["tokens"]
    assert tokens[start:end] == [start] * 3
    first_length = len(records[0]["samples"][0]["tokens"]) - 3
    assert f"answer {first_length}" in tokenizer.decode(tokens[:start])
    expected = {"temperature": 0.5, "top_p": 0.8, "top_k": 20, "max_new_tokens": 2048}
    assert all(p["sampling_params"] == expected for p in server.prompts)
    assert len(load_samples([out], load_chats(str(target_dir)), 512).samples) == 4


def test_a_conversation_of_many_turns_is_stored_once(server, target_dir, tmp_path):
    """Found as: every turn was stored with all before it, (T + 1) / 2 times the tokens."""
    chats = load_chats(str(target_dir))
    end = chats.tokenizer.eos_token_id
    server.answer = lambda ids: [*chats.tokenizer.encode(f"answer {len(ids)}"), end]
    turns = [f"Question {i}?" for i in range(6)]
    data, out = tmp_path / "data.jsonl", tmp_path / "out.jsonl"
    data.write_text(json.dumps({"turns": turns}))
    assert call(server, target_dir, data, out) == 0
    (record,) = records_of(out)
    last = server.prompts[-1]["input_ids"]
    (stored,) = record["samples"]
    assert stored["tokens"] == [*last, *server.answer(last)]
    said = [chats.tokenizer.decode(stored["tokens"][a:b]) for a, b in stored["spans"]]
    lengths = [len(prompt["input_ids"]) for prompt in server.prompts]
    assert said == [f"answer {n}{chats.tokenizer.eos_token}" for n in lengths]


def test_a_published_v4_is_asked_as_it_is_served(server, target_dir, tmp_path, capsys):
    """Found as: no chat template, and a refusal of the ``tool`` role."""
    folder = published_v4(tmp_path / "v4", target_dir)
    chats, out = load_chats(str(folder)), tmp_path / "out.jsonl"
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    made = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    thought = {"role": "assistant", "content": None, "reasoning_content": "I add."}
    calls = thought | {"tool_calls": [made]}
    result = {"role": "tool", "tool_call_id": "1", "content": "2"}
    users = [{"role": "user", "content": f"{n}?"} for n in ("One", "Two")]
    asked = [users[0], {"role": "assistant", "content": "x"} | calls, result, users[1]]
    thinking = {"thinking": True}
    with_tools = Chat(asked, [tool], thinking)
    call_tokens = chats.answer(with_tools.with_messages(asked[:2]), "here")
    word = {"role": "assistant", "content": "Done.", "reasoning_content": "I am told."}
    word_tokens = chats.answer(Chat([users[0], word], None, thinking), "here")

    def answer(ids):  # the call to the first prompt that has tools, words to all others
        first = chats.prompt(with_tools.with_messages(asked[:1]), "here")
        return call_tokens if ids == first else word_tokens

    server.answer = answer
    data = tmp_path / "data.jsonl"
    lines = [{"messages": asked, "tools": [tool]}, {"turns": ["One?", "Two?"]}]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--concurrency", "1", "--template-args", '{"thinking": true}']
    assert call(server, folder, data, out, *options) == 0

    history = [users[0], calls, result, word, users[1]]
    expected = [Chat(history[:n], [tool], thinking) for n in (1, 3, 5)]
    expected += [Chat(m, None, thinking) for m in (users[:1], [users[0], word, users[1]])]
    prompts = [chats.prompt(chat, "here") for chat in expected]
    assert [prompt["input_ids"] for prompt in server.prompts] == prompts
    first, second = records_of(out)
    (stored,) = first["samples"]  # with tools no reasoning is dropped
    assert stored["tokens"] == prompts[2] + word_tokens and len(stored["spans"]) == 3
    assert [s["tokens"] for s in second["samples"]] == [p + word_tokens for p in prompts[3:]]
    assert "I am told." not in chats.tokenizer.decode(prompts[4])
    assert first["messages"] == [*history[:1], calls | {"content": ""}, *history[2:], word]
    assert call(server, folder, data, tmp_path / "b", "--template-args", '{"think": 1}') == 2
    assert "found think" in capsys.readouterr().err


def test_results_of_calls_that_the_target_did_not_make_follow_those_of_the_data(
    server, target_dir, tmp_path
):
    folder = published_v4(tmp_path / "v4", target_dir)
    chats, out, data = load_chats(str(folder)), tmp_path / "out.jsonl", tmp_path / "data.jsonl"
    made = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    asked = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    words = chats.answer(Chat([asked[0], {"role": "assistant", "content": "Two."}]), "here")
    server.answer = lambda ids: words
    data.write_text(json.dumps({"messages": asked}))
    assert call(server, folder, data, out) == 0
    prompts = [chats.prompt(Chat(asked[:n]), "here") for n in (1, 3)]
    assert [prompt["input_ids"] for prompt in server.prompts] == prompts
    (record,) = records_of(out)
    assert [s["tokens"] for s in record["samples"]] == [prompt + words for prompt in prompts]


def test_it_resumes_and_drops_a_cut_line(server, target_dir, data, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert call(server, target_dir, data, out, "--limit", "2", "--concurrency", "1") == 0
    asked = len(server.prompts)
    with out.open("a") as file:
        file.write('{"index": 2, "dig')
    assert call(server, target_dir, data, out) == 0
    assert len(server.prompts) == asked + 1
    assert sorted(json.loads(line)["index"] for line in out.read_text().splitlines()) == [0, 1, 2]
    assert call(server, target_dir, data, out) == 0
    assert len(server.prompts) == asked + 1
    assert "3 already answered" in capsys.readouterr().out


def test_a_server_that_fails_is_asked_again_and_a_dead_one_named(
    server, target_dir, data, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(pool, "PAUSE", 0)
    server.failures = [500, 500]
    assert call(server, target_dir, data, tmp_path / "a.jsonl", "--concurrency", "1") == 0
    server.failures = [500] * 100
    assert call(server, target_dir, data, tmp_path / "b.jsonl") == 2
    assert "run the same command again to resume" in capsys.readouterr().err


def records_of(path):
    return sorted(map(json.loads, path.read_text().splitlines()), key=lambda r: r["index"])


def test_a_prompt_that_is_too_long_is_skipped_and_listed(
    server, target_dir, data, tmp_path, capsys
):
    """Found as: the run ended at it for good, on every re-run, and named no line."""
    lines = data.read_text().splitlines()
    lines.insert(1, json.dumps({"turns": ["Long? " * 300]}))
    data.write_text("\n".join(lines) + "\n")
    out, server.context = tmp_path / "out.jsonl", 400
    assert call(server, target_dir, data, out, "--concurrency", "1") == 0
    said = capsys.readouterr().out
    assert f"1: {data}:2: turn 1: the prompt has " in said
    assert "the server accepts 399" in said
    assert "3 conversations answered" in said
    listed = tmp_path / "out.left_out.jsonl"
    assert f"4 rows read, 3 kept, 1 left out, listed in {listed}" in said
    assert [r["index"] for r in records_of(out)] == [0, 2, 3]
    (entry,) = records_of(listed)
    assert (entry["index"], entry["where"]) == (1, f"{data}:2")
    room = [p["sampling_params"]["max_new_tokens"] + len(p["input_ids"]) for p in server.prompts]
    assert set(room) == {400}, "answers are cut to what the context leaves"
    asked = len(server.prompts)
    assert call(server, target_dir, data, out) == 0
    assert "3 already answered" in capsys.readouterr().out
    assert len(server.prompts) == asked and listed.exists()
    server.context = 4096
    assert call(server, target_dir, data, out) == 0
    assert [r["index"] for r in records_of(out)] == [0, 1, 2, 3]
    assert not listed.exists()


def test_a_conversation_that_the_chat_template_refuses_is_skipped_and_listed(
    server, target_dir, data, tmp_path, capsys
):
    """Found as: the run ended at it, and without its line the next one was refused."""
    target = tmp_path / "target"
    shutil.copytree(target_dir, target)
    path = target / "chat_template.jinja"
    refusal = "{% if messages[-1]['content'] == 'Two?' %}{{ raise_exception('no two') }}{% endif %}"
    path.write_text(refusal + path.read_text())
    two = json.dumps({"turns": ["Two?", "More?"]})
    data.write_text(f"{data.read_text()}{two}\n")
    out = tmp_path / "out.jsonl"
    assert call(server, target, data, out, "--concurrency", "1") == 0
    said = capsys.readouterr().out
    reason = "the target's chat template refuses the conversation: no two"
    assert f"2: {data}:1: turn 2: {reason}\n" in said
    assert [len(r["samples"]) for r in records_of(out)] == [1, 1, 1]
    listed = records_of(tmp_path / "out.left_out.jsonl")
    assert [e["index"] for e in listed] == [0, 3]
    asked = len(server.prompts)
    assert call(server, target, data, out) == 0
    assert len(server.prompts) == asked


def test_a_conversation_that_is_refused_half_way_keeps_its_first_answers(
    server, target_dir, data, tmp_path, capsys
):
    out = tmp_path / "out.jsonl"
    assert call(server, target_dir, data, tmp_path / "whole.jsonl", "--concurrency", "1") == 0
    server.refuses = len(server.prompts[1]["input_ids"])
    assert call(server, target_dir, data, out, "--concurrency", "1") == 0
    assert f"1: {data}:1: turn 2: no such prompt" in capsys.readouterr().out
    assert [len(r["samples"]) for r in records_of(out)] == [1, 1, 1]
    assert records_of(out)[0]["messages"][-1]["role"] == "assistant"
    assert records_of(tmp_path / "out.left_out.jsonl")[0]["index"] == 0
    assert records_of(out)[0]["refused"] == "turn 2: no such prompt"
    assert len(load_samples([out], load_chats(str(target_dir)), 512).samples) == 3
    # A later run lists it again.
    listed, lines = (tmp_path / "out.left_out.jsonl").read_text(), out.read_text().splitlines(True)
    out.write_text("".join(lines[:-1]))
    assert call(server, target_dir, data, out, "--concurrency", "1") == 0
    assert (tmp_path / "out.left_out.jsonl").read_text() == listed


CUT, STOP = {"type": "length", "length": 3}, {"type": "stop", "matched": 1}


def test_answers_that_are_cut_are_counted_and_can_be_left_out(
    server, target_dir, data, tmp_path, capsys
):
    """Found as: they were kept without a word."""
    kept, left = tmp_path / "kept.jsonl", tmp_path / "left.jsonl"
    for out, options in (kept, []), (left, ["--finished-only", "--strict"]):
        server.failures = [STOP, CUT, CUT, STOP]
        assert call(server, target_dir, data, out, "--concurrency", "1", *options) == 0
        assert "2 of 4 answers are cut" in capsys.readouterr().out
    assert [len(r["samples"]) for r in records_of(kept)] == [2, 1, 1]
    assert [len(r["samples"]) for r in records_of(left)] == [1, 0, 1]
    assert [len(r["messages"]) for r in records_of(left)] == [3, 0, 2]
    assert [r["index"] for r in records_of(left) if "refused" in r] == [0, 1]
    asked = len(server.prompts)
    assert call(server, target_dir, data, left, "--finished-only", "--strict") == 0
    assert len(server.prompts) == asked, "they would be cut again"
    assert call(server, target_dir, data, left) == 2
    assert "finished_only was true, now false" in capsys.readouterr().err


def test_an_empty_answer_is_no_sample(server, target_dir, data, tmp_path):
    """Found as: no later command could read the file, for a span of no tokens."""
    out, server.failures = tmp_path / "out.jsonl", [STOP]
    server.answer = lambda ids: [] if len(server.prompts) == 1 else [len(ids)] * 3
    assert call(server, target_dir, data, out, "--concurrency", "1") == 0
    loaded = load_samples([out], load_chats(str(target_dir)), 512)
    assert [sample.answer_tokens for sample in loaded.samples] == [3, 3, 3]


def test_a_server_that_refuses_everything_is_an_error(server, target_dir, data, tmp_path, capsys):
    server.context = 3
    assert call(server, target_dir, data, tmp_path / "out.jsonl") == 2
    assert f"no usable row of 3 in the conversations; {data}:" in capsys.readouterr().err


def test_other_settings_another_file_and_a_second_run_are_refused(
    server, target_dir, data, tmp_path, capsys
):
    """Found as: answers at two temperatures in one file, and doubled lines, both with exit 0."""
    out = tmp_path / "out.jsonl"
    assert call(server, target_dir, data, out, "--limit", "1") == 0
    before, asked = out.read_bytes(), len(server.prompts)

    def refused(path, *options: str) -> str:
        assert call(server, target_dir, data, path, *options) == 2
        return capsys.readouterr().err

    assert "temperature was 0.7, now 0.0" in refused(out, "--temperature", "0")
    template = ["--template-args", '{"thinking": true}']
    assert "other settings: template.thinking was unset, now true" in refused(out, *template)
    assert "is the input" in refused(data)
    assert "lies inside the target" in refused(target_dir / "out.jsonl")
    (tmp_path / "notes").write_text("mine")
    assert "expected no file" in refused(tmp_path / "notes")
    mine = tmp_path / "new.left_out.jsonl"
    mine.write_text('{"mine": 1}\n')
    for _ in range(2):  # found as: the second time it was moved away
        assert str(mine) in refused(tmp_path / "new.jsonl")
    assert mine.read_text() == '{"mine": 1}\n'
    assert not list(tmp_path.glob("*new.jsonl*"))
    server.hold = threading.Event()
    first = threading.Thread(target=call, args=(server, target_dir, data, out))
    first.start()
    until(lambda: len(server.prompts) > asked)
    assert f"in use by process {os.getpid()}" in refused(out)
    server.hold.set()
    first.join()
    assert out.read_bytes().startswith(before)
    assert [r["index"] for r in records_of(out)] == [0, 1, 2]


def test_answers_of_another_model_are_refused(server, target_dir, data, tmp_path, capsys):
    """Found as: another model at the address gave its answers as the target's own, exit 0."""
    other, copy, out = tmp_path / "other", tmp_path / "copy", tmp_path / "out.jsonl"
    for folder in (other, copy):
        shutil.copytree(target_dir, folder)
    tensors = load_file(other / "model.safetensors")
    (norm,) = (name for name in tensors if name in ("norm.weight", "model.norm.weight"))
    save_file(tensors | {norm: tensors[norm] + 1}, other / "model.safetensors")
    server.model = str(other)
    assert call(server, target_dir, data, out) == 2
    said = capsys.readouterr().err
    assert f"serves {other}, expected --target {target_dir}: their final norms differ" in said
    assert not server.prompts and not out.read_bytes()
    server.model = str(copy)
    assert call(server, target_dir, data, out, "--limit", "1") == 0
    assert f"{server.url} serves {copy}" in capsys.readouterr().out
    server.model = "owner/other"
    assert call(server, target_dir, data, out) == 2
    said = capsys.readouterr().err
    assert f"holds answers of copy, and the server at {server.url} serves owner/other" in said
    assert len(records_of(out)) == 1
    server.model = "copy/"  # the same, spelled otherwise
    assert call(server, target_dir, data, out) == 0
    assert [record["served"] for record in records_of(out)] == ["copy"] * 3


def test_a_finished_output_needs_no_server(server, target_dir, data, tmp_path):
    out = tmp_path / "out.jsonl"
    assert call(server, target_dir, data, out) == 0
    server.url = "http://127.0.0.1:9"
    assert call(server, target_dir, data, out) == 0


@pytest.mark.parametrize(
    "url, model",
    [
        ("http://gpu7:30000", "{other}"),
        ("http://127.0.0.1:1", "other"),
        ("http://127.0.0.1:1", "/no/such/folder"),
        ("http://127.0.0.1:1", "{tmp_path}"),
    ],
)
def test_only_what_is_surely_another_model_is_refused(
    target_dir, tmp_path, monkeypatch, url, model
):
    other = tmp_path / "other"
    other.mkdir()
    save_file({"model.norm.weight": torch.ones(256)}, other / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HyperDFlashConfigError, match="final norms differ"):
        regenerate.Served("http://localhost:1", str(other), 9).check(str(target_dir), {})
    served = model.format(other=other, tmp_path=tmp_path)
    regenerate.Served(url, served, 9).check(str(target_dir), {})


def test_a_folder_that_may_not_be_read_is_not_judged(monkeypatch):
    """Found as: "Permission denied" and exit 2, with a healthy server of another user."""

    def refused(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", refused)
    regenerate.Served("http://localhost:1", "/srv/v4", 9).check("/here/v4", {})


def test_an_interrupt_does_not_wait_for_answers(server, target_dir, data, tmp_path):
    """Found as: Ctrl-C hung until the server had answered all that was asked."""
    server.hold = threading.Event()
    command = [sys.executable, "-m", "sglang_hyperdflash.cli", "regenerate"]
    command += ["--server", server.url, "--target", str(target_dir), "--input", str(data)]
    process = subprocess.Popen(
        [*command, "--output", str(tmp_path / "out.jsonl")],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    until(lambda: server.prompts or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE)
    server.hold.set()
    assert process.returncode == 130
    assert b"interrupted" in said
    assert b"Traceback" not in said


def test_bad_options_are_named(server, target_dir, data, tmp_path, capsys):
    cases = [
        (["--template-args", "{"], "--template-args is not JSON"),
        (["--template-args", "[]"], "must be a JSON object"),
        (["--server", "http://127.0.0.1:9"], "no SGLang server answers"),
        (["--input", str(tmp_path / "none")], "does not exist"),
    ]
    for options, message in cases:
        assert call(server, target_dir, data, tmp_path / "out.jsonl", *options) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, message",
    [
        (["--concurrency", "0"], "--concurrency: must be from 1 to 1024, found 0"),
        (["--concurrency", "1025"], "--concurrency: must be from 1 to 1024, found 1025"),
        (["--limit", "-1"], "--limit: must be at least 1, found -1"),
        (["--top-p", "0"], "--top-p: must be above 0 and at most 1, found 0"),
        (["--top-k", "many"], "--top-k: invalid int value: 'many'"),
    ],
)
def test_a_number_out_of_range_is_one_line(server, target_dir, data, capsys, options, message):
    with pytest.raises(SystemExit, match="2"):
        call(server, target_dir, data, "nowhere", *options)
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
