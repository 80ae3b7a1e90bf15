"""Two servers behind SGLang's own router; one is killed in the middle of 200 requests.

Not in CI: it needs ``sglang-router`` (``make router-test``).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from sglang_hyperdflash.serving.scheduler.metrics import ROUNDS
from sglang_hyperdflash.tools.server_process import Server, free_port, hyperdflash_arguments
from tests.conftest import ROOT
from tests.engine.conftest import EXAMPLE, FP32, NEW_TOKENS
from tests.engine.test_metrics import samples

pytestmark = pytest.mark.replicas
REQUESTS, AT_ONCE = 200, 8
# A killed server is noticed, and a new one is given requests, within seconds instead of minutes.
NOTICE = ("--health-check-interval-secs", "2", "--health-failure-threshold", "2")
NOTICE += ("--health-success-threshold", "1", "--cb-timeout-duration-secs", "3")
# After one failure instead of ten: the router's retries of a request then go to the other server.
NOTICE += ("--cb-failure-threshold", "1")
ANSWERED, REFUSED, CUT, WRONG = "answered", "refused", "cut", "wrong"


class Router:
    """``sglang_router.launch_router`` on loopback."""

    def __init__(self, urls: list[str], log: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--worker-urls", *urls, "--policy", "cache_aware"]
        # Prompts share their template: only one that was seen nearly whole has a home.
        command += ["--cache-threshold", "0.8", "--prometheus-port", str(free_port()), *NOTICE]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.log = log

    def wait(self, seconds: float = 300) -> Router:
        """Until it knows every server."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-3000:]
            try:
                if requests.get(f"{self.url}/readiness", timeout=5).status_code == 200:
                    return self
            except requests.RequestException:
                pass
            time.sleep(0.5)
        raise AssertionError(f"the router is not ready:\n{self.log.read_text()[-3000:]}")

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(timeout=30)


class Replicas:
    """Two servers of one drafter, and the router in front of them."""

    def __init__(self, target: Path, drafter: Path) -> None:
        self.start = lambda number, port: Server(
            target,
            *(*FP32, "--enable-metrics", *hyperdflash_arguments(drafter)),
            log=ROOT / "build" / "test-logs" / "main" / f"replica-{number}.log",
            port=port,
        )
        self.servers = [self.start(i, None) for i in range(2)]
        for server in self.servers:
            server.wait(1800)
        urls = [server.url for server in self.servers]
        self.router = Router(urls, ROOT / "build" / "test-logs" / "main" / "router.log").wait()

    def kill(self, number: int) -> None:
        """``kill -9`` of a server and every process it started."""
        server = self.servers[number]
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait(timeout=30)

    def start_again(self, number: int) -> None:
        """At the address it had."""
        port = self.servers[number].port
        self.servers[number] = self.start(f"{number}-again", port).wait(1800)

    def rounds(self) -> list[float]:
        """Verification rounds that each server has counted; a dead one's are nan."""
        return [
            sum(samples(server, ROUNDS).values()) if server.process.poll() is None else float("nan")
            for server in self.servers
        ]

    def stop(self) -> None:
        self.router.stop()
        for server in self.servers:
            server.stop()


class Clients:
    """Questions whose answers are known, asked through the router."""

    def __init__(self, url: str, texts: list[str], answers: list[list[int]]) -> None:
        self.url, self.texts, self.answers = url, texts, answers
        self.done = 0
        self.cached: list[int] = []
        self.problems: list[str] = []

    def payload(self, i: int, tokens: int, stream: bool) -> dict:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        return {"text": self.texts[i], "sampling_params": sampling, "stream": stream}

    def ask(self, i: int, tokens: int, stream: bool) -> str:
        """One request: how it ended. A client knows an answer that was cut by its missing end."""
        expected, payload = self.answers[i][:tokens], self.payload(i, tokens, stream)
        read = self.read_stream if stream else self.read_whole
        try:
            found, ended = read(payload)
        except requests.RequestException as error:
            self.problems.append(f"{type(error).__name__}: {error}")
            return REFUSED
        finally:
            self.done += 1
        if ended:
            return ANSWERED if found == expected else WRONG
        return CUT if found == expected[: len(found)] else WRONG

    def read_whole(self, payload: dict) -> tuple[list[int], bool]:
        answer = requests.post(f"{self.url}/generate", json=payload, timeout=300)
        if answer.status_code != 200:
            raise requests.HTTPError(f"{answer.status_code}: {answer.text[:200]}")
        found = answer.json()
        self.cached.append(found["meta_info"]["cached_tokens"])
        return found["output_ids"], found["meta_info"]["finish_reason"] is not None

    def read_stream(self, payload: dict) -> tuple[list[int], bool]:
        found, ended = [], False
        url = f"{self.url}/generate"
        with requests.post(url, json=payload, stream=True, timeout=300) as answer:
            if answer.status_code != 200:
                raise requests.HTTPError(f"{answer.status_code}: {answer.text[:200]}")
            try:
                for line in answer.iter_lines():
                    if line.startswith(b"data: {"):
                        chunk = json.loads(line[len(b"data: ") :])
                        if "meta_info" not in chunk:  # the router's own error, inside a stream
                            self.problems.append(str(chunk)[:200])
                            return found, False
                        found = chunk["output_ids"]
                        ended = chunk["meta_info"]["finish_reason"] is not None
            except requests.RequestException as error:
                self.problems.append(f"stream: {type(error).__name__}")
        return found, ended


@pytest.fixture(scope="module")
def replicas(target_dir, drafter_dir) -> Iterator[Replicas]:
    import sglang_router  # noqa: F401  here, so that its absence is an error of its own

    pair = Replicas(target_dir, drafter_dir)
    yield pair
    pair.stop()


@pytest.fixture(scope="module")
def clients(replicas, tokenizer, own_prompts, own_reference) -> Clients:
    lines = (EXAMPLE / "prompts.jsonl").read_text().splitlines()
    texts = [
        tokenizer.apply_chat_template(
            json.loads(line)["messages"], tokenize=False, add_generation_prompt=True
        )
        for line in lines
    ]
    assert [tokenizer.encode(text) for text in texts] == own_prompts
    return Clients(replicas.router.url, texts, own_reference)


def test_the_same_answers_and_a_prompt_finds_its_cache(replicas, clients, own_prompts):
    order, begun = list(range(len(own_prompts))), replicas.rounds()
    # Together: a new prompt goes to the server with the least in flight.
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ended = list(pool.map(lambda i: clients.ask(i, NEW_TOKENS, stream=False), order))
    assert ended == [ANSWERED] * len(order)
    clients.cached.clear()
    random.Random(1).shuffle(order)
    assert [clients.ask(i, NEW_TOKENS, stream=False) for i in order] == [ANSWERED] * len(order)
    # Only the server that saw a prompt has all of it.
    whole = [len(own_prompts[i]) - 1 for i in order]
    hits = sum(a >= b for a, b in zip(clients.cached, whole, strict=True))
    shares = [now - then for now, then in zip(replicas.rounds(), begun, strict=True)]
    print(f"{hits} of {len(order)} prompts found whole; rounds by server {shares}")
    assert hits >= 0.9 * len(order)
    assert min(shares) > 0.1 * sum(shares)


def test_a_killed_server_costs_no_wrong_answer_and_its_successor_takes_load(replicas, clients):
    draw = random.Random(2)
    prompts = len(clients.texts)
    asked = [(draw.randrange(prompts), draw.randrange(16, NEW_TOKENS), i % 4 == 0)
             for i in range(REQUESTS)]  # fmt: skip
    clients.done = 0

    def kill_in_the_middle() -> None:
        while clients.done < REQUESTS // 3:
            time.sleep(0.01)
        replicas.kill(0)

    killer = threading.Thread(target=kill_in_the_middle)
    killer.start()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ended = Counter(pool.map(lambda one: clients.ask(*one), asked))
    killer.join()
    print(f"kill -9 of one of two: {dict(ended)}; {clients.problems}")
    assert ended[WRONG] == 0
    assert sum(ended.values()) == REQUESTS
    # Only streams that were in flight: what was not yet answered is asked again elsewhere.
    assert ended[REFUSED] + ended[CUT] <= AT_ONCE
    replicas.start_again(0)
    served = served_of_new_prompts(replicas, clients, seconds=120)
    assert served > 0, "the server that came back got no request"


def served_of_new_prompts(replicas, clients, seconds: float) -> float:
    """Rounds of server 0 for prompts that were never asked; their answers are server 1's own.

    Prompts that were seen stay with the server that has their prefix.
    """
    draw, other = random.Random(3), Clients(replicas.servers[1].url, [], [])
    begun, deadline, served = replicas.rounds()[0], time.monotonic() + seconds, 0.0
    while served < 1 and time.monotonic() < deadline:
        clients.texts = [f"{draw.random()} and {draw.random()} are" for _ in range(AT_ONCE)]
        other.texts = clients.texts
        clients.answers = [other.read_whole(other.payload(i, 32, False))[0] for i in range(AT_ONCE)]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            ended = set(pool.map(lambda i: clients.ask(i, 32, False), range(AT_ONCE)))
        assert ended == {ANSWERED}
        served = replicas.rounds()[0] - begun
    return served


def test_without_any_server_a_request_gets_one_clear_error_soon(replicas, clients):
    for number in range(2):
        replicas.kill(number)
    clients.problems.clear()
    begin = time.monotonic()
    assert clients.ask(0, 16, stream=False) == REFUSED
    print(f"after {time.monotonic() - begin:.1f} s: {clients.problems}")
    assert time.monotonic() - begin < 60
