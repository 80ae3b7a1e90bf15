"""What ``hyperdflash demo`` refuses before it starts a server."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import httpx
import openai
import pytest

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands import demo
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.ownership import lock
from tests.conftest import EXAMPLE

GOOD = {"kind": "math", "messages": [{"role": "user", "content": "1 + 1?"}]}


@pytest.fixture
def said(tmp_path, monkeypatch, capsys):
    """Runs the demo without any server; gives what it said on standard error."""

    def no_server(*_, **__):
        raise AssertionError("a server was started")

    monkeypatch.setattr(demo, "Server", no_server)

    def run(*options: str) -> str:
        command = ["demo", "--out", str(tmp_path / "demo.json"), *options]
        assert main(command) == 2
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    "line, message",
    [
        ("[1]", "p.jsonl:2: expected a JSON object"),
        (json.dumps({"messages": GOOD["messages"]}), "p.jsonl:2: kind is missing"),
        (json.dumps(GOOD | {"messages": []}), "p.jsonl:2: messages must have at least 1 item"),
        (json.dumps(GOOD | {"messages": [{"role": "user"}]}), "p.jsonl:2: messages: 0: content is"),
    ],
)
def test_prompts_are_checked_before_any_server_starts(tmp_path, said, line, message):
    """Found as: a KeyError after both servers had loaded."""
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + line + "\n")
    assert message in said("--prompts", str(path))
    path.write_text("")
    assert "is empty; expected lines" in said("--prompts", str(path))
    assert "must be at least 1" in said("--rounds", "0")


def test_only_a_demo_s_own_report_is_written_over(tmp_path, said, monkeypatch):
    """Found as: any file that --out named was replaced."""
    mine = tmp_path / "demo.json"
    for content in ("notes", '{"mine": 1}', "[]"):
        mine.write_text(content)
        assert "expected no file, or the report of an earlier demo" in said()
        assert mine.read_text() == content
    assert "lies inside the target" in said("--out", str(EXAMPLE / "target" / "demo.json"))
    assert "is the prompts" in said("--out", str(EXAMPLE / "prompts.jsonl"))
    mine.write_text(json.dumps({"outputs_identical": True, "round_cost": 1.0}))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="a server was started"):
        main(["demo", "--out", "demo.json"])


def test_a_second_demo_beside_is_refused(tmp_path, said):
    """Found as: two demos wrote into one folder of logs and one report."""
    with lock(tmp_path / "demo-logs", demo.KIND):
        assert f"{tmp_path / 'demo-logs'} is in use by process {os.getpid()}" in said()


def test_an_installed_package_says_that_the_example_is_not_there(tmp_path, said, monkeypatch):
    missing = tmp_path / "examples" / "tiny_deepseek_v4"
    monkeypatch.setattr(demo, "EXAMPLE", missing)
    message = said()
    expected = f"the tiny DeepSeek-V4 is not part of the installed package (expected {missing}"
    assert f"--target: {expected}/target). Run the demo in a checkout" in message
    mine = ["--target", str(tmp_path), "--draft", str(tmp_path)]
    assert f"--prompts: {expected}/prompts.jsonl)" in said(*mine)


def answer(rounds: int) -> demo.Answer:
    return demo.Answer("a", [1], 1.0, rounds, rounds, [0, rounds])


@pytest.mark.parametrize(
    "rounds, tau, said",
    [(0, None, "not measured"), (3, 2.0, "2.00")],
)
def test_without_a_verification_round_nothing_is_measured(
    monkeypatch, capsys, tmp_path, rounds, tau, said
):
    """Found as: one token an answer, and a tau and a round cost of 0.00."""
    monkeypatch.setattr(demo, "ask", lambda *_, **__: answer(rounds))
    args = SimpleNamespace(rounds=1, max_new_tokens=1)
    clients = dict.fromkeys(demo.METHODS)
    report, histogram = demo.compare(clients, GOOD, args, stream=False)
    result = demo.summarise([report], [histogram], 1)
    demo.print_answer(0, report)
    demo.print_summary(result, tmp_path / "demo.json")
    printed = capsys.readouterr().out
    assert [report.tau, result["tau"], result["round_cost"]] == [tau] * 3
    assert f"    tau {said}, 1 tokens" in printed
    assert f"bonus included): {said}\n" in printed
    assert f"round cost: {said}" in printed


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_the_server_refuses_is_one_line(stream):
    """Found as: a traceback of openai, after both servers had loaded."""
    message = "Requested 4096 tokens is longer than the context.\nMore."
    refuse = lambda _: httpx.Response(400, json={"message": message})  # noqa: E731
    client = openai.OpenAI(
        base_url="http://test/v1",
        api_key="none",
        http_client=httpx.Client(transport=httpx.MockTransport(refuse)),
    )
    with pytest.raises(HyperDFlashConfigError) as caught:
        demo.ask(client, GOOD["messages"], 4096, stream=stream)
    said = str(caught.value)
    assert "'1 + 1?' with --max-new-tokens 4096: Requested 4096 tokens is longer" in said
    assert said.count("\n") == 0
