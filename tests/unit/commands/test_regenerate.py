"""``hyperdflash regenerate`` against an HTTP server that answers like SGLang's native API."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from transformers import AutoTokenizer

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands import regenerate
from sglang_hyperdflash.training.conversations import load_samples


class Answers(ThreadingHTTPServer):
    """Answers a prompt of n tokens with ``[n, n, n]``; records prompts; fails on demand."""

    def __init__(self) -> None:
        self.prompts: list[dict] = []
        self.failures: list[int] = []
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def reply(self, code: int, body) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.reply(200, {})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.failures:
            self.reply(self.server.failures.pop(), "no")
            return
        self.server.prompts.append(request)
        n = len(request["input_ids"])
        self.reply(200, {"output_ids": [n] * 3, "text": f"answer {n}"})


@pytest.fixture
def server():
    server = Answers()
    yield server
    server.shutdown()


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
    assert len(load_samples([out], tokenizer, 512).samples) == 4


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


def test_a_busy_server_is_asked_again_and_a_dead_one_named(
    server, target_dir, data, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(regenerate.time, "sleep", lambda _: None)
    server.failures = [503, 503]
    assert call(server, target_dir, data, tmp_path / "a.jsonl", "--concurrency", "1") == 0
    server.failures = [500] * 100
    assert call(server, target_dir, data, tmp_path / "b.jsonl") == 2
    assert "run the same command again to go on" in capsys.readouterr().err
    server.failures = [400]
    assert call(server, target_dir, data, tmp_path / "c.jsonl", "--concurrency", "1") == 2
    assert "the server refused a prompt" in capsys.readouterr().err


def test_bad_options_are_named(server, target_dir, data, tmp_path, capsys):
    cases = [
        (["--template-args", "{"], "--template-args is not JSON"),
        (["--template-args", "[]"], "must be a JSON object"),
        (["--concurrency", "0"], "must be at least 1"),
        (["--server", "http://127.0.0.1:9"], "no SGLang server answers"),
        (["--input", str(tmp_path / "none")], "does not exist"),
    ]
    for options, message in cases:
        assert call(server, target_dir, data, tmp_path / "out.jsonl", *options) == 2
        assert message in capsys.readouterr().err
