"""Many requests at several servers: who is asked, over how many connections, in what memory."""

import asyncio
import json
import subprocess
import sys
import threading
import tracemalloc
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands import pool
from sglang_hyperdflash.commands.answers import Prompts, hold_answers
from sglang_hyperdflash.commands.regenerate import KIND, read_task
from sglang_hyperdflash.tools.errors import ServerFailed
from tests.unit.commands.builders import regenerate, rows_of, write_rows
from tests.unit.commands.native_server import Answers
from tests.waiting import PATIENCE, until

ABORTED = {"type": "abort", "message": "Abort in waiting queue"}
NOT_FINITE = {"type": "stop", "matched": "NaN happened"}


@pytest.fixture
def run(servers, target_dir, tmp_path, monkeypatch):
    """Has so many conversations answered by some servers; gives the exit code, and the output."""
    monkeypatch.setattr(pool, "PAUSE", 0.01)
    monkeypatch.setattr(pool, "LONGEST_PAUSE", 0.02)
    out = tmp_path / "out.jsonl"

    def answered(count: int, *options: str, asked=servers, code: int = 0) -> list[int]:
        write_rows(tmp_path / "data.jsonl", *({"turns": [f"Number {i} "]} for i in range(count)))
        command = regenerate(asked, target_dir, tmp_path / "data.jsonl", out, *options)
        assert main(command) == code
        return [row["index"] for row in rows_of(out)]

    answered.out = out
    return answered


@contextmanager
def in_a_thread(function, *arguments, released: Answers):
    """A run whose server answers nothing until the block ends."""
    released.hold = threading.Event()
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    try:
        yield
    finally:
        released.hold.set()
        thread.join()


def test_the_less_busy_server_gets_more(servers, run):
    fast, slow = servers
    with in_a_thread(run, 60, "--concurrency", "4", released=slow):
        # One is busy until the other has answered all the rest.
        until(lambda: len(slow.prompts) > 3 or len(fast.prompts) + len(slow.prompts) == 60)
        assert 0 < len(slow.prompts) < 4
        assert rows_of(run.out), "an answer is written when it comes"
    assert [row["index"] for row in rows_of(run.out)] == list(range(60))
    assert max(fast.connections, slow.connections) <= 2 + 4, "connections are kept"


@pytest.mark.parametrize("failures", [[500] * 10**5, []], ids=["500", "its connection breaks"])
def test_a_server_that_fails_is_left_out_and_the_other_answers(servers, run, capsys, failures):
    alive, dead = servers
    dead.failures, dead.handle_error = failures, lambda *_: None
    dead.answer = mock.Mock(side_effect=ConnectionAbortedError)
    assert run(20, "--concurrency", "8") == list(range(20)) and len(alive.prompts) == 20
    assert dead.url in capsys.readouterr().out


class Restarted(Answers):
    """Fails once; the next three probes find another model there."""

    model = property(lambda self: "owner/other" if 1 < self.probes < 5 else "owner/target")


def test_a_server_that_was_left_out_is_asked_again_once_it_serves_its_model(servers, run):
    alive, restarted, probes = servers[0], Restarted(), []
    restarted.failures, servers[1:] = [500], [*servers[1:], restarted]

    def answer(ids):
        until(lambda: restarted.probes >= 5 and (len(alive.prompts) != 20 or restarted.prompts))
        return [len(ids)] * 3

    alive.answer = answer
    restarted.answer = lambda ids: probes.append(restarted.probes) or [len(ids)] * 3
    assert run(30, "--concurrency", "2", asked=[alive, restarted]) == list(range(30))
    assert set(probes) == {5}


@pytest.mark.parametrize("count", [1, 2], ids=["alone", "with another"])
def test_a_busy_server_is_asked_for_ever(servers, run, capsys, count):
    """Its failures are no answers: an aborted one is never kept."""
    busy = servers[1]
    busy.failures = [429, 503, ABORTED, ABORTED | {"status_code": 503}] * 3
    assert run(40, "--concurrency", "4", asked=servers[-count:]) == list(range(40))
    assert not busy.failures and capsys.readouterr().out.count(f"{busy.url} is busy") == 1
    answers = [row["samples"][0] for row in rows_of(run.out)]
    assert all(len(one["tokens"]) - one["spans"][0][0] == 3 for one in answers)


def test_a_refused_row_is_left_out_alone(servers, run):
    """Also one whose logits are not finite, and one that was aborted as a bad request."""
    servers[0].failures = [413, 422, ABORTED | {"status_code": 400}, NOT_FINITE]
    assert len(run(9, asked=servers[:1])) == 5
    assert len(rows_of(run.out.with_suffix(".left_out.jsonl"))) == 4


def test_a_row_on_which_every_server_fails_is_left_out(servers, run, tmp_path, target_dir):
    long = {"turns": ["a b c " * 9]}
    data = write_rows(tmp_path / "long", *[{"turns": ["Hi"]}] * 9, long, *[{"turns": ["Hi"]}] * 30)
    assert main(regenerate(servers, target_dir, data, tmp_path / "before")) == 0
    longest = max(len(prompt["input_ids"]) for server in servers for prompt in server.prompts)
    for server in servers:
        server.refuses = {longest: 500}
    out = tmp_path / "after.jsonl"
    assert main(regenerate(servers, target_dir, data, out, "--concurrency", "8")) == 0
    assert [row["index"] for row in rows_of(out)] == [i for i in range(40) if i != 9]
    assert [row["index"] for row in rows_of(tmp_path / "after.left_out.jsonl")] == [9]


@pytest.mark.parametrize("attempts, ends", [(1, ServerFailed), (2, pool.Refused)])
def test_a_single_failure_is_no_refusal(monkeypatch, attempts, ends):
    """``capture`` asks once: a row is not at fault when a server fails on it once."""

    class Failing(pool.Pool):
        async def _ask(self, url, payload):
            self.answered += 1  # another request
            raise pool.Failed("out of memory")

    async def ask() -> None:
        async with Failing({"http://127.0.0.1:9": "model"}, attempts) as failing:
            await failing.ask()

    monkeypatch.setattr(pool, "PAUSE", 0.01)
    with pytest.raises(ends, match="out of memory"):
        asyncio.run(ask())


@pytest.mark.parametrize("given, code", [(None, 2), ("option", 0), ("variable", 0)])
def test_a_key_is_given_as_an_option_or_a_variable(servers, run, monkeypatch, given, code):
    monkeypatch.setenv("HYPERDFLASH_API_KEY", "secret" if given == "variable" else "")
    servers[0].key = "secret"
    options = ["--api-key", "secret"] if given == "option" else []
    assert run(3, *options, asked=servers[:1], code=code) == ([] if code else [0, 1, 2])
    assert len(servers[0].prompts) == (0 if code else 3)


def test_servers_of_two_models_and_the_last_one_s_death_are_errors(servers, run, capsys):
    first, second = servers
    second.model = "owner/other"
    assert run(8, code=2) == [] and not first.prompts
    said = capsys.readouterr().err
    assert first.url in said and second.url in said
    second.model = first.model
    first.failures, second.failures = [500] * 10**5, [500] * 10**5
    assert run(8, code=2) == []
    assert "run the same command again" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.heavy
def test_a_thousand_are_in_flight_where_few_files_may_be_open(servers, target_dir, tmp_path):
    """The soft limit of open files is often 1,024, and aiohttp's own of connections 100."""
    data = write_rows(tmp_path / "data", *({"turns": [f"Number {i}"]} for i in range(1024)))
    for server in servers:
        server.hold = threading.Event()
    options = ["--concurrency", "1024", "--max-new-tokens", "4"]
    command = regenerate(servers, target_dir, data, tmp_path / "out.jsonl", *options)
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
    assert len(rows_of(tmp_path / "out.jsonl")) == 1024


@pytest.mark.skipif(not Path("/proc/net/tcp").is_file(), reason="the kernel lists no sockets")
def test_a_silent_server_is_probed(servers, run):
    """A host that loses its power closes no connection: without probes a run waits for ever."""
    server = servers[0]
    with in_a_thread(lambda: run(2, asked=[server]), released=server):
        until(lambda: len(server.prompts) == 2)
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        timers = [row[5] for row in rows if row[2].endswith(f":{server.server_port:04X}")]
        probing = [timer for timer in timers if timer.startswith("02:")]
        assert len(probing) == 2, timers
        assert all(0 < int(timer[3:], 16) <= 6100 for timer in probing), "within a minute"


def test_a_cut_run_is_resumed_without_asking_twice(servers, run):
    assert run(40) == list(range(40))
    lines = run.out.read_bytes().splitlines(keepends=True)
    run.out.write_bytes(b"".join(lines[:15]) + lines[15][:9])  # as a kill leaves it
    for server in servers:
        server.prompts.clear()
    assert run(40, "--concurrency", "4") == list(range(40))
    kept = [json.loads(line)["samples"][0]["tokens"][:-3] for line in lines[:15]]
    again = [prompt["input_ids"] for server in servers for prompt in server.prompts]
    assert len(again) == 25 and not any(tokens in again for tokens in kept)
    for server in servers:
        server.url = "http://127.0.0.1:9"
    assert run(40) == list(range(40)), "a finished output needs no server"


@pytest.mark.heavy
def test_neither_prompts_nor_answers_stay_in_memory(tmp_path):
    count = 400
    rows = ({"turns": [f"Number {i} " * 400]} for i in range(count))
    data, out = write_rows(tmp_path / "data.jsonl", *rows), tmp_path / "out.jsonl"
    tasks = Prompts("conversations", [data], read_task, None, strict=False)
    with hold_answers(out, KIND, {}, tasks) as answers:
        for one in list(answers.waiting())[1::2]:
            samples = [{"tokens": list(range(5000)), "spans": [[1, 5000]]}]
            record = {"index": one.index, "digest": one.digest, "samples": samples}
            answers.writer.append(record)
    assert out.stat().st_size > 5e6 and data.stat().st_size > 1.5e6
    tracemalloc.start()
    with hold_answers(out, KIND, {}, tasks) as answers:
        assert sum(1 for _ in answers.waiting()) == answers.left == count / 2
        peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6, f"{peak / 1e6:.1f} MB"
