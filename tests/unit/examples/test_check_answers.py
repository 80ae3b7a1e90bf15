"""What check_answers reports of a server's replies."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.conftest import EXAMPLE


@pytest.fixture
def check_answers(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import check_answers

    return check_answers


def test_accuracy_is_of_greedy_answers_and_nats_of_sampled_ones(check_answers):
    exchanges = list(check_answers.generate(1000, 4, ("addition", "sort")))

    def ask(exchange, temperature, seed):
        if temperature == 0:
            return exchange.reply if exchange.family == "sort" else "Answer: 0", ()
        return "", (-1.0, -2.0) if exchange.family == "sort" else (-0.5,)

    report = check_answers.measure(ask, exchanges, 1000)
    assert report["seed"] == 1000
    assert report["held_out"] is True
    assert report["accuracy"] == 0.5
    assert report["nats_per_token"] == pytest.approx((4 * 3.0 + 4 * 0.5) / 12)
    assert list(report["families"]) == ["addition", "sort"]
    assert report["families"]["sort"]["accuracy"] == 1.0
    assert report["families"]["addition"]["accuracy"] == 0.0
    assert report["families"]["sort"]["nats_per_token"] == pytest.approx(1.5)
    assert "| all | 50% | 1.167 |" in check_answers.table(report)


def test_sampled_answers_have_seeds_of_their_own(check_answers):
    exchanges = list(check_answers.generate(1000, 3, ("addition",)))
    asked = []

    def ask(exchange, temperature, seed):
        asked.append((exchange.key, temperature, seed))
        return "", (-1.0,)

    check_answers.measure(ask, exchanges, 7)
    seeds = [seed for _, temperature, seed in asked if temperature == 1.0]
    assert len(set(seeds)) == len(exchanges)


def test_a_server_without_log_probabilities_is_refused(check_answers):
    exchanges = list(check_answers.generate(1000, 1, ("addition",)))
    with pytest.raises(ValueError, match="no log probabilities"):
        check_answers.measure(lambda *_: ("Answer: 1", ()), exchanges, 1000)


class Handler(BaseHTTPRequestHandler):
    """An OpenAI server that says the same thing always, each token at -0.25."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append((self.path, body))
        content = [{"token": "x", "logprob": -0.25, "bytes": None, "top_logprobs": []}] * 3
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "Answer: 12"},
            "logprobs": {"content": content} if body["logprobs"] else None,
        }
        reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
        data = json.dumps(reply | {"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_) -> None:
        pass


@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
def test_a_given_server_is_asked_through_its_openai_api(
    check_answers, tmp_path, monkeypatch, suffix
):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.bodies = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url, out = f"http://127.0.0.1:{server.server_port}{suffix}", tmp_path / "deep" / "answers.json"
    arguments = ["--seed", "5", "--per-family", "1", "--out", str(out), "--server", url]
    monkeypatch.setattr("sys.argv", ["check_answers.py", *arguments])
    try:
        check_answers.main()
    finally:
        server.shutdown()
    report = json.loads(out.read_text())
    assert report["nats_per_token"] == pytest.approx(0.25)
    assert set(report) >= {"accuracy", "nats_per_token", "families"}
    assert len(report["families"]) == len(check_answers.FAMILIES)
    paths, bodies = zip(*server.bodies, strict=True)
    assert set(paths) == {"/v1/chat/completions"}
    assert sorted({body["temperature"] for body in bodies}) == [0.0, 1.0]
    assert all(body["messages"][-1]["role"] == "user" for body in bodies)
