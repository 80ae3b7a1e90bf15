"""A long mixed load: nothing leaks, nothing hangs, nothing is wrong.

``HYPERDFLASH_SOAK_MINUTES`` (30) is its length. A run is a piece of a longer soak: its report is
added to the list in ``build/soak.json``. With learning next to the server it is
``build/soak_learning.json``, and the next run goes on with what is in ``build/soak_learning``:
remove both to start over.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from subprocess import STDOUT, Popen

import psutil
import pytest
import requests

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.draft.published import KEPT, current, publish
from sglang_hyperdflash.serving.record.settings import RECORD
from sglang_hyperdflash.serving.scheduler.follow import FOLLOW
from sglang_hyperdflash.serving.scheduler.metrics import (
    RECORDED,
    ROUNDS,
    SHED,
    WIDTH_ROUNDS,
)
from sglang_hyperdflash.serving.width.settings import ADAPTIVE, WIDTH
from sglang_hyperdflash.tools.atomic import write_json
from sglang_hyperdflash.tools.provenance import provenance
from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from tests.conftest import ROOT
from tests.engine.conftest import COMMON, HOT, NEW_TOKENS
from tests.engine.drafters import poisoned
from tests.engine.test_api import CONTEXT, SCHEMA, is_idle
from tests.engine.test_following import by_version
from tests.engine.test_metrics import samples
from tests.unit.training.streams import learn_arguments
from tests.waiting import until

MINUTES = float(os.environ.get("HYPERDFLASH_SOAK_MINUTES", "30"))
CONCURRENCY = 16
# Less than sixteen requests of the mix want: the pool is full, and prefixes are evicted.
POOL = 3000
STUCK_SECONDS = 180.0
GROWTH = {"memory_mib": 200, "handles": 16, "threads": 8}
# Prompts are cached, so a recorded request is mostly its answer.
RECORDING = {"SHARE": "1", "GIB": "0.5", "LENGTH": "256", "CONTEXT": "0"}
SHAPE = "--layers 3 --heads 4 --kv-heads 2 --head-dim 64 --intermediate-size 768 --window 0"
LEARN = "--lr 2e-3 --batch 16 --anchors 8 --every 50 --judges 32 --passes 100 --threads 1"
# A drafter of random weights is published so often, for the server to leave.
POISON_MINUTES = min(5.0, MINUTES / 6)


class Traffic:
    """Requests of seven kinds, drawn at random, sixteen at a time.

    A method of a kind returns whether an answer is right, ``greedy`` and ``prefix`` token by token;
    ``i`` numbers the prompt.
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


class Learning:
    """An untrained drafter and ``hyperdflash learn``, next to the server that records and follows.

    Attributes:
        poisoned: versions of random weights that were published. most: the store's largest size,
            bytes of its shards.
    """

    def __init__(self, target: Path, folder: Path) -> None:
        self.draft, self.random = folder / "draft", folder / "random"
        self.store, self.published, self.work = (folder / n for n in ("store", "published", "work"))
        if not self.random.is_dir():
            names = ("--target", str(target), "--out", str(self.draft))
            assert main(["init", *names, *SHAPE.split()]) == 0
            poisoned(self.draft, self.random)
        own = {f"{RECORD}_{name}": value for name, value in RECORDING.items()}
        self.environment = own | {RECORD: str(self.store), FOLLOW: str(self.published)}
        self.first, self.poisoned, self.most = self.newest(), 0, 0
        learn = learn_arguments(target, folder, folder, f"{LEARN} --device cpu")
        command = [sys.executable, "-m", "sglang_hyperdflash.cli", *learn]
        with (folder / "learn.log").open("ab") as log:
            self.process = Popen(command, stdout=log, stderr=STDOUT)
        self._end = threading.Event()
        self._watching = threading.Thread(target=self._watch)
        self._watching.start()

    def newest(self) -> int:
        version = current(self.published)
        return version.number if version else 0

    def _watch(self) -> None:
        due = time.monotonic() + 60 * POISON_MINUTES
        while not self._end.wait(2):
            self.most = max(self.most, size(self.store / "shards"))
            if time.monotonic() > due and self.newest():
                publish(self.published, self.random)
                self.poisoned, due = self.poisoned + 1, time.monotonic() + 60 * POISON_MINUTES

    def stop(self) -> int:
        """End the learner as a user would; its exit status."""
        self._end.set()
        self._watching.join()
        self.process.terminate()
        try:
            return self.process.wait(120)
        finally:
            self.process.kill()

    def report(self, server: Server) -> dict:
        log, lines = server.log.read_text(errors="replace"), (self.work / "training_log.jsonl")
        record, left = json.loads(lines.read_text().splitlines()[-1]), log.count("drafts again")
        return {
            "swaps": log.count("drafting with version") + left,
            "returned": left,
            "published": {"versions": self.newest() - self.first, "random": self.poisoned},
            "published_mib": size(self.published) / 2**20,
            "published_mib_each": size(self.draft) / 2**20,
            "store_mib": {"most": self.most / 2**20, "budget": 1024 * float(RECORDING["GIB"])},
            "recorded": sum(samples(server, RECORDED).values()),
            "shed": {dict(key)["reason"]: n for key, n in samples(server, SHED).items()},
            "rounds_by_version": by_version(server, ROUNDS),
            "learned": {name: record.get(name) for name in ("step", "samples", "tau")},
            "states": len(list(self.work.glob("state-*"))),
        }


def size(folder: Path) -> int:
    """Bytes of its files; some may vanish meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def target_of(handle: Path) -> str:
    """What an open handle is of; empty if it was closed meanwhile."""
    with suppress(FileNotFoundError):
        return os.readlink(handle)
    return ""


def usage(process: Popen) -> dict[str, float]:
    """What a process and its children hold: memory without mapped files, handles without shards.

    Of these a learner keeps up to 256 open, removed ones until its next checkpoint.
    """
    parent = psutil.Process(process.pid)
    every = [parent, *parent.children(recursive=True)]
    memory = [one.memory_info() for one in every]
    handles = [handle for one in every for handle in Path(f"/proc/{one.pid}/fd").iterdir()]
    named = [name for name in map(target_of, handles) if name and "/shards/" not in name]
    return {
        "memory_mib": sum(one.rss - one.shared for one in memory) / 2**20,
        "handles": len(named),
        "threads": sum(one.num_threads() for one in every),
    }


def idle_state(server: Server, prompt: list[int], learning: Learning | None) -> dict[str, dict]:
    """Pool, queue and processes once everything is answered and the cache is flushed."""
    until(lambda: is_idle(server), "a request is stuck")
    requests.post(f"{server.url}/flush_cache", timeout=60).raise_for_status()
    # Gauges move with batches: one small request after the flush brings them up to date.
    server.generate(input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 1})
    time.sleep(2)
    names = ("num_running_reqs", "num_queue_reqs", "num_used_tokens")
    return {
        "pool": {name: next(iter(samples(server, f"sglang:{name}").values())) for name in names},
        "server": usage(server.process),
        **({"learner": usage(learning.process)} if learning else {}),
    }


def rounds_by_width(server: Server) -> dict[str, int]:
    """Verification rounds of each width, from the server's metrics."""
    found = {dict(labels)["width"]: n for labels, n in samples(server, WIDTH_ROUNDS).items()}
    return {width: int(found[width]) for width in sorted(found)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["soak", "soak_learning"])
def test_soak(servers, target_dir, drafter_dir, own_prompts, own_reference, name):
    folder, draft, environment = ROOT / "build" / name, drafter_dir, {WIDTH: ADAPTIVE}
    reports, learning = folder.with_suffix(".json"), None
    pieces = json.loads(reports.read_text()) if reports.is_file() else []
    if name == "soak_learning":
        learning = Learning(target_dir, folder)
        draft, environment = learning.draft, environment | learning.environment
    arguments = ("--dtype", "float32", "--max-total-tokens", str(POOL), "--enable-metrics")
    arguments += (*COMMON, *hyperdflash_arguments(draft))
    try:
        server = servers.get(name, target_dir, *arguments, environment=environment)
        traffic = Traffic(server, own_prompts, own_reference)
        # Memory settles while caches and allocators fill; what grows later is a leak.
        traffic.run(max(MINUTES / 6, 0.5), seed=2 * len(pieces))
        before = idle_state(server, own_prompts[0], learning)
        traffic.run(MINUTES * 5 / 6, seed=2 * len(pieces) + 1)
        after = idle_state(server, own_prompts[0], learning)
    finally:
        code = learning.stop() if learning else None
    piece = {
        "provenance": provenance(),
        "minutes": MINUTES,
        "requests": dict(traffic.counts),
        "wrong": traffic.wrong,
        "rounds_by_width": rounds_by_width(server),
        "retractions": server.log.read_text(errors="replace").count("Retract"),
        "before": before,
        "after": after,
    }
    if learning is not None:
        piece |= learning.report(server) | {"learner_exit": code}
    write_json(reports, [*pieces, piece], indent=1)
    print(json.dumps(piece, indent=1))
    assert not traffic.wrong
    assert min(traffic.counts.values()) > MINUTES
    assert sum(rounds > 0 for rounds in piece["rounds_by_width"].values()) > 1
    assert server.process.poll() is None
    assert before["pool"] == after["pool"]
    assert after["pool"]["num_running_reqs"] == after["pool"]["num_queue_reqs"] == 0
    for process in before.keys() - {"pool"}:
        for what, growth in GROWTH.items():
            assert after[process][what] < before[process][what] + growth, (process, what)
    if learning is not None:
        assert code == 128 + signal.SIGTERM and piece["states"] <= 2
        assert piece["swaps"] >= MINUTES / 6 and piece["returned"]
        assert piece["recorded"] > MINUTES
        assert piece["store_mib"]["most"] < 1.01 * piece["store_mib"]["budget"]
        assert piece["published_mib"] < 1.01 * KEPT * piece["published_mib_each"]
    servers.stop(name)
