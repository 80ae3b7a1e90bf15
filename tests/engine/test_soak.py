"""A long mixed load: nothing leaks, nothing hangs, nothing is wrong.

``HYPERDFLASH_SOAK_MINUTES`` (30) is its length. Writes ``build/soak.json``, of which
``eval/results/soak`` holds a copy.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter

import psutil
import pytest
import requests

from sglang_hyperdflash.serving.scheduler.metrics import WIDTH_ROUNDS
from sglang_hyperdflash.serving.width.settings import ADAPTIVE, WIDTH
from sglang_hyperdflash.tools.provenance import provenance
from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from tests.conftest import ROOT
from tests.engine.conftest import COMMON, HOT, NEW_TOKENS
from tests.engine.test_api import CONTEXT, SCHEMA, wait_until_idle
from tests.engine.test_metrics import samples

MINUTES = float(os.environ.get("HYPERDFLASH_SOAK_MINUTES", "30"))
CONCURRENCY = 16
# Less than sixteen requests of the mix want: the pool is full, and prefixes are evicted.
POOL = 3000
STUCK_SECONDS = 180.0
GROWTH_MIB = 200


class Traffic:
    """Requests of every kind, drawn at random, sixteen at a time.

    A method of a kind returns whether an answer is right; ``i`` numbers the prompt.
    """

    def __init__(self, server: Server, prompts: list[list[int]], answers: list[list[int]]) -> None:
        self.server, self.prompts, self.answers = server, prompts, answers
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.lock = threading.Lock()

    def ask(self, ids: list[int], tokens: int, **sampling) -> dict:
        settings = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **sampling}
        return self.server.generate(input_ids=ids, sampling_params=settings, timeout=STUCK_SECONDS)

    def greedy(self, i: int, draw: random.Random) -> bool:
        tokens = draw.randint(1, NEW_TOKENS)
        return self.ask(self.prompts[i], tokens)["output_ids"] == self.answers[i][:tokens]

    def prefix(self, i: int, draw: random.Random) -> bool:
        """A conversation that goes on: its prefix is in the cache, and so is the drafter's K/V."""
        cut = draw.randrange(1, NEW_TOKENS - 1)
        answer = self.ask(self.prompts[i] + self.answers[i][:cut], NEW_TOKENS - cut)
        return answer["output_ids"] == self.answers[i][cut:]

    def long(self, i: int, draw: random.Random) -> bool:
        """Several prompts in a row; only the answer's length is known."""
        some = [token for prompt in draw.sample(self.prompts, 4) for token in prompt]
        return len(self.ask(some, 400)["output_ids"]) == 400

    def full_context(self, i: int, draw: random.Random) -> bool:
        """As many tokens as the context leaves: SGLang ends an answer two before its end."""
        left = draw.randint(16, 32)
        some = [token for prompt in self.prompts for token in prompt] * 8
        return len(self.ask(some[: CONTEXT - left], left)["output_ids"]) == left - 2

    def sampled(self, i: int, draw: random.Random) -> bool:
        setting = draw.choice([{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}])
        return len(self.ask(self.prompts[i], 64, temperature=HOT, **setting)["output_ids"]) == 64

    def constrained(self, i: int, draw: random.Random) -> bool:
        answer = self.ask(self.prompts[i], 96, ignore_eos=False, json_schema=json.dumps(SCHEMA))
        if answer["meta_info"]["finish_reason"]["type"] == "length":
            return True
        return set(json.loads(answer["text"])) <= set(SCHEMA["properties"])

    def aborted(self, i: int, draw: random.Random) -> bool:
        sampling = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
        payload = {"input_ids": self.prompts[i], "sampling_params": sampling, "stream": True}
        url = f"{self.server.url}/generate"
        with requests.post(url, json=payload, stream=True, timeout=STUCK_SECONDS) as answer:
            lines = answer.iter_lines()
            for _ in range(draw.randrange(1, 6)):
                next(lines)
        return True

    KINDS = (greedy, prefix, long, full_context, sampled, constrained, aborted)

    def one(self, draw: random.Random) -> None:
        kind, i = draw.choice(self.KINDS), draw.randrange(len(self.prompts))
        try:
            problem = "" if kind(self, i, draw) else "a wrong answer"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        with self.lock:
            self.counts[kind.__name__] += 1
            if problem:
                self.wrong.append(f"{kind.__name__} of prompt {i}: {problem}")

    def run(self, minutes: float, seed: int) -> None:
        """Ask until the time is over; ends early when twenty answers are wrong."""
        end = time.monotonic() + 60 * minutes

        def loop(worker: int) -> None:
            draw = random.Random(f"{seed}-{worker}")
            while time.monotonic() < end and len(self.wrong) < 20:
                self.one(draw)

        threads = [threading.Thread(target=loop, args=(w,)) for w in range(CONCURRENCY)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60 * minutes + 2 * STUCK_SECONDS)
        assert not any(thread.is_alive() for thread in threads), "a request is stuck"


def resident_mib(server: Server) -> float:
    """Memory of the server and its children."""
    parent = psutil.Process(server.process.pid)
    every = [parent, *parent.children(recursive=True)]
    return sum(process.memory_info().rss for process in every) / 2**20


def idle_state(server: Server, prompt: list[int]) -> dict[str, float]:
    """Pool, queue and memory once everything is answered and the cache is flushed."""
    wait_until_idle(server, 60)
    requests.post(f"{server.url}/flush_cache", timeout=60).raise_for_status()
    # Gauges move with batches: one small request after the flush brings them up to date.
    server.generate(input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 1})
    time.sleep(2)
    names = ("num_running_reqs", "num_queue_reqs", "num_used_tokens")
    return {
        **{name: next(iter(samples(server, f"sglang:{name}").values())) for name in names},
        "resident_mib": resident_mib(server),
    }


def rounds_by_width(server: Server) -> dict[str, int]:
    """Verification rounds of each width, from the server's metrics."""
    found = {dict(labels)["width"]: n for labels, n in samples(server, WIDTH_ROUNDS).items()}
    return {width: int(found[width]) for width in sorted(found)}


@pytest.mark.slow
def test_soak(servers, target_dir, drafter_dir, own_prompts, own_reference):
    arguments = ("--dtype", "float32", "--max-total-tokens", str(POOL), "--enable-metrics")
    arguments += (*COMMON, *hyperdflash_arguments(drafter_dir))
    server = servers.get("soak", target_dir, *arguments, environment={WIDTH: ADAPTIVE})
    traffic = Traffic(server, own_prompts, own_reference)
    # Memory settles while caches and allocators fill; what grows later is a leak.
    traffic.run(max(MINUTES / 6, 0.5), seed=0)
    before = idle_state(server, own_prompts[0])
    traffic.run(MINUTES * 5 / 6, seed=1)
    after = idle_state(server, own_prompts[0])
    log = server.log.read_text(errors="replace")
    report = {
        "provenance": provenance(),
        "minutes": MINUTES,
        "requests": dict(traffic.counts),
        "wrong": traffic.wrong,
        "rounds_by_width": rounds_by_width(server),
        "retractions": log.count("Retract"),
        "before": before,
        "after": after,
    }
    (ROOT / "build" / "soak.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    assert not traffic.wrong
    assert min(traffic.counts.values()) > MINUTES
    assert sum(rounds > 0 for rounds in report["rounds_by_width"].values()) > 1
    assert server.process.poll() is None
    pool = {name: before[name] for name in before if name != "resident_mib"}
    assert pool == {name: after[name] for name in pool}
    assert after["num_running_reqs"] == after["num_queue_reqs"] == 0
    assert after["resident_mib"] < before["resident_mib"] + GROWTH_MIB
    servers.stop("soak")
