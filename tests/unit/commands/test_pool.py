"""Many requests at several servers: who is asked, over how many connections, in what memory."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import pytest

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands import pool
from sglang_hyperdflash.commands.answers import Prompts, hold_answers
from sglang_hyperdflash.commands.regenerate import KIND, read_task
from sglang_hyperdflash.tools.errors import ServerFailed
from tests.unit.commands.native_server import Answers
from tests.waiting import PATIENCE, until


@pytest.fixture
def servers():
    found = [Answers(), Answers()]
    yield found
    for server in found:
        server.shutdown()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(pool, "PAUSE", 0.01)
    monkeypatch.setattr(pool, "LONGEST_PAUSE", 0.02)


def write(path, count, size=1):
    lines = ({"turns": [f"Number {i} " * size]} for i in range(count))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def arguments(servers, target_dir, data, out, *options: str) -> list[str]:
    named = [word for server in servers for word in ("--server", server.url)]
    files = ["--target", str(target_dir), "--input", str(data), "--output", str(out)]
    return ["regenerate", *named, *files, *options]


def indices(out) -> list[int]:
    return sorted(json.loads(line)["index"] for line in out.read_text().splitlines())


def test_the_less_busy_server_gets_more(servers, target_dir, tmp_path):
    fast, slow = servers
    slow.hold = threading.Event()
    data, out = write(tmp_path / "data.jsonl", 60), tmp_path / "out.jsonl"
    command = arguments(servers, target_dir, data, out, "--concurrency", "4")
    run = threading.Thread(target=main, args=(command,))
    run.start()
    try:
        # One is busy until the other has answered all the rest.
        until(lambda: len(slow.prompts) > 3 or len(fast.prompts) + len(slow.prompts) == 60)
        assert 0 < len(slow.prompts) < 4
    finally:
        slow.hold.set()
        run.join()
    assert indices(out) == list(range(60))
    assert max(fast.connections, slow.connections) <= 2 + 4, "connections are kept"


def broken(_ids):
    raise ConnectionAbortedError


@pytest.mark.parametrize("how", ["500", "its connection breaks"])
def test_a_server_that_fails_is_left_out_and_the_other_answers(
    servers, target_dir, tmp_path, capsys, how
):
    alive, dead = servers
    dead.failures = [500] * 10**5 if how == "500" else []
    dead.answer, dead.handle_error = broken, lambda *_: None
    data, out = write(tmp_path / "data.jsonl", 20), tmp_path / "out.jsonl"
    assert main(arguments(servers, target_dir, data, out, "--concurrency", "8")) == 0
    assert indices(out) == list(range(20)) and len(alive.prompts) == 20
    assert f"{dead.url} failed: " in capsys.readouterr().out


class Restarted(Answers):
    """Fails once; the next three probes find another model there."""

    model = property(
        lambda self: "owner/other" if 1 < self.probes < 5 else "owner/target", lambda *_: 0
    )


def test_a_server_that_was_left_out_is_asked_again_once_it_serves_its_model(
    servers, target_dir, tmp_path, capsys
):
    """Found as: a server that was restarted got no request for the rest of the run."""
    alive, restarted, probes = servers[0], Restarted(), []
    restarted.failures, servers[1:] = [500], [*servers[1:], restarted]

    def answer(ids):
        until(lambda: restarted.probes >= 5 and (len(alive.prompts) != 20 or restarted.prompts))
        return [len(ids)] * 3

    alive.answer = answer
    restarted.answer = lambda ids: probes.append(restarted.probes) or [len(ids)] * 3
    data, out = write(tmp_path / "data.jsonl", 30), tmp_path / "out.jsonl"
    command = arguments([alive, restarted], target_dir, data, out, "--concurrency", "2")
    assert main(command) == 0
    assert indices(out) == list(range(30)) and set(probes) == {5}
    assert f"{restarted.url} answers again" in capsys.readouterr().out


ABORTED = {"type": "abort", "message": "Abort in waiting queue"}


@pytest.mark.parametrize("failure", [429, 503, ABORTED, ABORTED | {"status_code": 503}], ids=str)
@pytest.mark.parametrize("count", [1, 2], ids=["alone", "with another"])
def test_a_busy_server_is_asked_for_ever(servers, target_dir, tmp_path, capsys, failure, count):
    """Found as: a full queue ended the run after 6 s, and an aborted turn was a training answer."""
    busy = servers[1]
    busy.failures = [failure] * 8
    data, out = write(tmp_path / "data.jsonl", 40), tmp_path / "out.jsonl"
    chosen = servers[-count:]
    assert main(arguments(chosen, target_dir, data, out, "--concurrency", "4")) == 0
    assert not busy.failures and capsys.readouterr().out.count(f"{busy.url} is busy") == 1
    assert indices(out) == list(range(40))
    answers = [json.loads(line)["samples"][0] for line in out.read_text().splitlines()]
    assert all(one["tokens"][one["spans"][0][0] :][1:] for one in answers), "no aborted answer"


NOT_FINITE = {"type": "stop", "matched": "NaN happened"}


@pytest.mark.parametrize("failure", [413, 422, ABORTED | {"status_code": 400}, NOT_FINITE], ids=str)
def test_a_refused_row_is_left_out_alone(servers, target_dir, tmp_path, capsys, failure):
    """Found as: 413 and 422 ended a server, and NaN was an answer."""
    servers[0].failures = [failure]
    data, out = write(tmp_path / "data.jsonl", 5), tmp_path / "out.jsonl"
    assert main(arguments(servers[:1], target_dir, data, out)) == 0
    assert len(indices(out)) == 4 and "1 left out" in capsys.readouterr().out


def test_a_row_on_which_every_server_fails_is_left_out(servers, target_dir, tmp_path, capsys):
    """Found as: it ended the run, and again each time that the run was resumed."""
    data, out = write(tmp_path / "data.jsonl", 40), tmp_path / "out.jsonl"
    lines = data.read_text().splitlines(keepends=True)
    lines[9] = json.dumps({"turns": ["a b c " * 9]}) + "\n"
    data.write_text("".join(lines))
    assert main(arguments(servers, target_dir, data, tmp_path / "before.jsonl")) == 0
    longest = max(len(prompt["input_ids"]) for server in servers for prompt in server.prompts)
    for server in servers:
        server.breaks = longest
    capsys.readouterr()
    assert main(arguments(servers, target_dir, data, out, "--concurrency", "8")) == 0
    assert indices(out) == [i for i in range(40) if i != 9]
    assert "1 left out" in capsys.readouterr().out


@pytest.mark.parametrize("attempts, ends", [(1, ServerFailed), (2, pool.Refused)])
def test_a_single_failure_is_no_refusal(attempts, ends):
    """``capture`` asks once: a row is not at fault when a server fails on it once."""

    class Failing(pool.Pool):
        async def _ask(self, url, payload):
            self.answered += 1  # another request
            raise pool.Failed("out of memory")

    async def ask() -> None:
        async with Failing({"http://127.0.0.1:9": "model"}, attempts) as failing:
            await failing.ask()

    with pytest.raises(ends, match="out of memory"):
        asyncio.run(ask())


@pytest.mark.parametrize("given, code", [(None, 2), ("option", 0), ("variable", 0)])
def test_a_key_is_given_as_an_option_or_a_variable(
    servers, target_dir, tmp_path, capsys, monkeypatch, given, code
):
    monkeypatch.setenv("HYPERDFLASH_API_KEY", "secret" if given == "variable" else "")
    servers[0].key = "secret"
    data, out = write(tmp_path / "data.jsonl", 3), tmp_path / "out.jsonl"
    options = ["--api-key", "secret"] if given == "option" else []
    assert main(arguments(servers[:1], target_dir, data, out, *options)) == code
    assert ("--api-key" in capsys.readouterr().err) == (given is None)
    assert len(servers[0].prompts) == (0 if code else 3)


def test_servers_of_two_models_and_the_last_one_s_death_are_errors(
    servers, target_dir, tmp_path, capsys
):
    first, second = servers
    data, out = write(tmp_path / "data.jsonl", 8), tmp_path / "out.jsonl"
    second.model = "owner/other"
    assert main(arguments(servers, target_dir, data, out)) == 2
    said = capsys.readouterr().err
    assert f"the server at {first.url} serves target, and the server at {second.url} serves" in said
    assert not first.prompts
    second.model = first.model
    first.failures, second.failures = [500] * 10**5, [500] * 10**5
    assert main(arguments(servers, target_dir, data, out)) == 2
    assert "run the same command again to resume" in capsys.readouterr().err


def test_a_thousand_are_in_flight_at_once_where_few_files_may_be_open(
    servers, target_dir, tmp_path
):
    """The soft limit of open files is often 1,024, and aiohttp's own of connections 100."""
    data, out = write(tmp_path / "data.jsonl", 1024), tmp_path / "out.jsonl"
    for server in servers:
        server.hold = threading.Event()
    options = ["--concurrency", "1024", "--max-new-tokens", "4"]
    command = arguments(servers, target_dir, data, out, *options)
    limit = "import resource, sys; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]; "
    limit += "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard)); "
    limit += "from sglang_hyperdflash.cli import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen([sys.executable, "-c", limit, *command])
    try:
        until(lambda: process.poll() is not None or sum(len(s.prompts) for s in servers) == 1024)
        assert [len(s.prompts) for s in servers] == [512, 512]
    finally:
        for server in servers:
            server.hold.set()
        assert process.wait(PATIENCE) == 0
    assert indices(out) == list(range(1024))


@pytest.mark.skipif(not Path("/proc/net/tcp").is_file(), reason="the kernel lists no sockets")
def test_a_silent_server_is_probed(servers, target_dir, tmp_path):
    """A host that loses its power closes no connection: without probes a run waits for ever."""
    server = servers[0]
    server.hold = threading.Event()
    data, out = write(tmp_path / "data.jsonl", 2), tmp_path / "out.jsonl"
    command = arguments([server], target_dir, data, out)
    run = threading.Thread(target=main, args=(command,))
    run.start()
    try:
        until(lambda: len(server.prompts) == 2)
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        timers = [row[5] for row in rows if row[2].endswith(f":{server.server_port:04X}")]
        probing = [timer for timer in timers if timer.startswith("02:")]
        assert len(probing) == 2, timers
        assert all(0 < int(timer[3:], 16) <= 6100 for timer in probing), "within a minute"
    finally:
        server.hold.set()
        run.join()


def test_a_killed_run_is_resumed_without_asking_twice(servers, target_dir, tmp_path):
    data, out = write(tmp_path / "data.jsonl", 40), tmp_path / "out.jsonl"
    enough, first = threading.Event(), itertools.count(1)

    def answer(ids: list[int]) -> list[int]:
        if next(first) > 16:  # the run cannot end before it is killed
            enough.wait()
        return [len(ids)] * 3

    for server in servers:
        server.answer = answer
    command = arguments(servers, target_dir, data, out, "--concurrency", "4")
    process = subprocess.Popen(
        [sys.executable, "-m", "sglang_hyperdflash.cli", *command], start_new_session=True
    )
    until(lambda: process.poll() is not None or sum(len(s.prompts) for s in servers) == 20)
    until(lambda: process.poll() is not None or (out.is_file() and len(indices(out)) >= 12))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    enough.set()
    done = [json.loads(line) for line in out.read_bytes().split(b"\n")[:-1]]
    assert 12 <= len(done) < 40
    for server in servers:
        server.prompts.clear()
    assert main(command) == 0
    assert indices(out) == list(range(40))
    answered = {tuple(record["samples"][0]["tokens"][:-3]) for record in done}
    again = [tuple(prompt["input_ids"]) for server in servers for prompt in server.prompts]
    assert len(again) == 40 - len(done) and not answered & set(again)


def test_neither_prompts_nor_answers_stay_in_memory(tmp_path):
    """Found as: 40 bytes a token of all earlier answers, and every prompt, for the whole run."""
    count = 400
    data, out = write(tmp_path / "data.jsonl", count, size=400), tmp_path / "out.jsonl"
    tasks = Prompts("conversations", [data], read_task, None, strict=False)
    with hold_answers(out, KIND, {}, tasks) as answers:
        for one in list(answers.waiting()):
            if one.index % 2:
                samples = [{"tokens": list(range(5000)), "spans": [[1, 5000]]}]
                record = {"index": one.index, "digest": one.digest, "samples": samples}
                answers.writer.append(record)
    assert out.stat().st_size > 5e6 and data.stat().st_size > 1.5e6
    tracemalloc.start()
    try:
        with hold_answers(out, KIND, {}, tasks) as answers:
            waiting = answers.waiting()
            assert sum(1 for _ in waiting) == answers.left == count / 2
            _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1e6, f"{peak / 1e6:.1f} MB"
