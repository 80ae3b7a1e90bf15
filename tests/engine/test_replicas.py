"""Two servers behind SGLang's own router; one is killed in the middle of 200 requests.

Not in every run: it needs ``sglang-router`` (``make router-test``).
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from sglang_hyperdflash.serving.scheduler.metrics import ROUNDS
from sglang_hyperdflash.tools.server_process import Server, free_port, hyperdflash_arguments
from tests.conftest import ROOT
from tests.engine.asking import samples
from tests.engine.conftest import FP32, NEW_TOKENS
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.replicas
REQUESTS, AT_ONCE = 200, 8
# A killed server is noticed within seconds instead of minutes, and after one failure instead of
# ten: the router's retries of a request then go to the other server.
NOTICE = ("--health-check-interval-secs", "2", "--health-failure-threshold", "2")
NOTICE += ("--cb-timeout-duration-secs", "3", "--cb-failure-threshold", "1")
LOGS = ROOT / "build" / "test-logs" / "main"
ANSWERED, REFUSED, CUT, WRONG = "answered", "refused", "cut", "wrong"


class Replicas:
    """Two servers of one drafter, and ``sglang_router.launch_router`` in front of them."""

    def __init__(self, target: Path, drafter: Path) -> None:
        arguments = (*FP32, "--enable-metrics", *hyperdflash_arguments(drafter))
        logs = [LOGS / f"replica-{number}.log" for number in range(2)]
        self.servers = [Server(target, *arguments, log=log) for log in logs]
        for server in self.servers:
            server.wait(PATIENCE)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--policy", "cache_aware", *NOTICE]
        command += ["--worker-urls", *(server.url for server in self.servers)]
        # Prompts share their template: only one that was seen nearly whole has a home.
        command += ["--cache-threshold", "0.8", "--prometheus-port", str(free_port())]
        with (LOGS / "router.log").open("wb") as sink:
            self.router = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
            )
        until(self.ready, "the router is not ready")

    def ready(self) -> bool:
        assert self.router.poll() is None, (LOGS / "router.log").read_text()[-3000:]
        try:
            return requests.get(f"{self.url}/readiness", timeout=5).status_code == 200
        except requests.RequestException:
            return False

    def rounds(self, number: int) -> float:
        """Verification rounds that a server has counted."""
        return sum(samples(self.servers[number], ROUNDS).values())

    def stop(self) -> None:
        kill(self.router)
        for server in self.servers:
            server.stop()


def kill(process: subprocess.Popen) -> None:
    """``kill -9`` of it and every process it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=30)


def ask(url: str, prompt: list[int], expected: list[int], stream: bool) -> tuple[str, int]:
    """How a request ended (an answer that was cut has no end), and its cached tokens."""
    sampling = {"temperature": 0, "max_new_tokens": len(expected), "ignore_eos": True}
    payload = {"input_ids": prompt, "sampling_params": sampling, "stream": stream}
    found: dict = {"output_ids": [], "meta_info": {"finish_reason": None, "cached_tokens": 0}}
    try:
        with requests.post(f"{url}/generate", json=payload, stream=stream, timeout=300) as answer:
            if answer.status_code != 200:
                return REFUSED, 0
            if not stream:
                found = answer.json()
            for line in answer.iter_lines() if stream else ():
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[len(b"data: ") :])
                    if "meta_info" not in chunk:  # the router's own error, inside a stream
                        break
                    found = chunk
    except requests.RequestException:
        if not found["output_ids"]:
            return REFUSED, 0
    tokens, meta = found["output_ids"], found["meta_info"]
    if meta["finish_reason"] is None:
        return (CUT if tokens == expected[: len(tokens)] else WRONG), 0
    return (ANSWERED if tokens == expected else WRONG), meta["cached_tokens"]


@pytest.fixture(scope="module")
def replicas(target_dir, drafter_dir) -> Iterator[Replicas]:
    import sglang_router  # noqa: F401  here, so that its absence is an error of its own

    pair = Replicas(target_dir, drafter_dir)
    yield pair
    pair.stop()


def test_the_same_answers_and_a_prompt_finds_its_cache(replicas, own_prompts, own_reference):
    begun = [replicas.rounds(n) for n in range(2)]
    pairs = list(zip(own_prompts, own_reference, strict=True))
    # Together: a new prompt goes to the server with the least in flight.
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ended = list(pool.map(lambda pair: ask(replicas.url, *pair, stream=False)[0], pairs))
    assert ended == [ANSWERED] * len(pairs)
    again = [ask(replicas.url, *pair, stream=False) for pair in pairs]
    assert [end for end, _ in again] == [ANSWERED] * len(pairs)
    # Only the server that saw a prompt has all of it.
    hits = sum(cached >= len(p) - 1 for (_, cached), p in zip(again, own_prompts, strict=True))
    shares = [replicas.rounds(n) - begun[n] for n in range(2)]
    assert hits >= 0.9 * len(pairs) and min(shares) > 0.1 * sum(shares)


def test_a_killed_server_costs_no_wrong_answer(replicas, own_prompts, own_reference):
    draw, done = random.Random(2), threading.Semaphore(0)

    def one(i: int) -> str:
        n = draw.randrange(len(own_prompts))
        expected = own_reference[n][: draw.randrange(16, NEW_TOKENS)]
        end, _ = ask(replicas.url, own_prompts[n], expected, stream=i % 4 == 0)
        done.release()
        return end

    def kill_in_the_middle() -> None:
        for _ in range(REQUESTS // 3):
            done.acquire()
        kill(replicas.servers[0].process)

    killer = threading.Thread(target=kill_in_the_middle)
    killer.start()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ended = Counter(pool.map(one, range(REQUESTS)))
    killer.join()
    print(f"kill -9 of one of two: {dict(ended)}")
    assert ended[WRONG] == 0 and sum(ended.values()) == REQUESTS
    # Only streams that were in flight: what was not yet answered is asked again elsewhere.
    assert ended[REFUSED] + ended[CUT] <= AT_ONCE
