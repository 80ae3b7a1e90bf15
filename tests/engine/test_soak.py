"""A long mixed load: nothing leaks, nothing hangs, nothing is wrong.

``HYPERDFLASH_SOAK_MINUTES`` (30) says how long. Writes ``build/soak.json``.
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

from sglang_hyperdflash.tools.provenance import provenance
from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from tests.conftest import ROOT
from tests.engine.conftest import COMMON, NEW_TOKENS
from tests.engine.test_api import SCHEMA, wait_until_idle
from tests.engine.test_metrics import samples

MINUTES = float(os.environ.get("HYPERDFLASH_SOAK_MINUTES", "30"))
CONCURRENCY = 16
# Less than sixteen requests of the mix want: the pool is full, and prefixes are evicted.
POOL = 3000
STUCK_SECONDS = 180.0
GROWTH_MIB = 200


class Traffic:
    """Requests of every kind, drawn at random, from many threads."""

    def __init__(self, server: Server, prompts: list[list[int]], answers: list[list[int]]) -> None:
        self.server, self.prompts, self.answers = server, prompts, answers
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.lock = threading.Lock()

    def ask(self, ids: list[int], tokens: int, **sampling) -> dict:
        settings = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **sampling}
        return self.server.generate(input_ids=ids, sampling_params=settings, timeout=STUCK_SECONDS)

    def short(self, i: int, draw: random.Random) -> bool:
        tokens = draw.randrange(1, 40)
        return self.ask(self.prompts[i], tokens)["output_ids"] == self.answers[i][:tokens]

    def whole(self, i: int, draw: random.Random) -> bool:
        return self.ask(self.prompts[i], NEW_TOKENS)["output_ids"] == self.answers[i]

    def prefix(self, i: int, draw: random.Random) -> bool:
        """A conversation that goes on: the prefix is in the cache, drafts' K/V too."""
        cut = draw.randrange(1, NEW_TOKENS - 1)
        answer = self.ask(self.prompts[i] + self.answers[i][:cut], NEW_TOKENS - cut)
        return answer["output_ids"] == self.answers[i][cut:]

    def long(self, i: int, draw: random.Random) -> bool:
        """Several prompts in a row, a long answer; the same length is all that is known of it."""
        some = [token for prompt in draw.sample(self.prompts, 4) for token in prompt]
        return len(self.ask(some, 400)["output_ids"]) == 400

    def sampled(self, i: int, draw: random.Random) -> bool:
        setting = draw.choice([{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}])
        return len(self.ask(self.prompts[i], 64, temperature=1, **setting)["output_ids"]) == 64

    def constrained(self, i: int, draw: random.Random) -> bool:
        answer = self.ask(self.prompts[i], 96, ignore_eos=False, json_schema=json.dumps(SCHEMA))
        if answer["meta_info"]["finish_reason"]["type"] == "length":
            return True
        return set(json.loads(answer["text"])) <= set(SCHEMA["properties"])

    def aborted(self, i: int, draw: random.Random) -> bool:
        payload = {
            "input_ids": self.prompts[i],
            "sampling_params": {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True},
            "stream": True,
        }
        with requests.post(
            f"{self.server.url}/generate", json=payload, stream=True, timeout=STUCK_SECONDS
        ) as answer:
            lines = answer.iter_lines()
            for _ in range(draw.randrange(1, 6)):
                next(lines)
        return True

    def one(self, draw: random.Random) -> None:
        kinds = (
            self.short,
            self.whole,
            self.prefix,
            self.long,
            self.sampled,
            self.constrained,
            self.aborted,
        )
        kind, i = draw.choice(kinds), draw.randrange(len(self.prompts))
        try:
            right = kind(i, draw)
            problem = None if right else f"{kind.__name__} of prompt {i}: another answer"
        except Exception as error:
            problem = f"{kind.__name__} of prompt {i}: {type(error).__name__}: {error}"
        with self.lock:
            self.counts[kind.__name__] += 1
            if problem:
                self.wrong.append(problem)

    def run(self, minutes: float, seed: int) -> None:
        """Sixteen at a time until the time is over."""
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


@pytest.mark.slow
def test_soak(servers, target_dir, drafter_dir, own_prompts, own_reference):
    arguments = ("--dtype", "float32", "--max-total-tokens", str(POOL), "--enable-metrics")
    server = servers.get(
        "soak", target_dir, *arguments, *COMMON, *hyperdflash_arguments(drafter_dir)
    )
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
        "retractions": log.count("Retract"),
        "before": before,
        "after": after,
    }
    (ROOT / "build" / "soak.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    assert not traffic.wrong
    assert min(traffic.counts.values()) > MINUTES
    assert server.process.poll() is None
    pool = {name: before[name] for name in before if name != "resident_mib"}
    assert pool == {name: after[name] for name in pool}
    assert after["num_running_reqs"] == after["num_queue_reqs"] == 0
    assert after["resident_mib"] < before["resident_mib"] + GROWTH_MIB
    servers.stop("soak")
