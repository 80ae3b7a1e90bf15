"""A long mixed load: nothing leaks, nothing hangs, nothing is wrong.

``HYPERDFLASH_SOAK_MINUTES`` (30) is its length. The second run records every request next to a
learner that publishes drafters, which the server follows. Reports are added to ``build/soak.json``.
"""

from __future__ import annotations

import json
import os
import random
import signal
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
from sglang_hyperdflash.serving.record.settings import RECORD
from sglang_hyperdflash.serving.scheduler.follow import FOLLOW
from sglang_hyperdflash.serving.scheduler.metrics import RECORDED, WIDTH_ROUNDS
from sglang_hyperdflash.serving.width.settings import ADAPTIVE, WIDTH
from sglang_hyperdflash.tools.atomic import write_json
from sglang_hyperdflash.tools.provenance import provenance
from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from tests.conftest import ROOT
from tests.engine.asking import HOT, SCHEMA, by_label, is_idle, post, samples
from tests.engine.conftest import COMMON, NEW_TOKENS
from tests.engine.test_context_end import CONTEXT
from tests.unit.training.streams import learn_arguments
from tests.waiting import until
from tests.warm_start.client import COMMAND

MINUTES = float(os.environ.get("HYPERDFLASH_SOAK_MINUTES", "30"))
CONCURRENCY = 16
# Less than sixteen requests of the mix want: the pool is full, and prefixes are evicted.
POOL = 3000
STUCK_SECONDS = 180.0
GROWTH = {"memory_mib": 200, "handles": 16, "threads": 8}
STORE_GIB = 0.5
SHAPE = "--layers 3 --heads 4 --kv-heads 2 --head-dim 64 --intermediate-size 768 --window 0"
LEARN = "--lr 2e-3 --batch 16 --anchors 8 --every 50 --judges 32 --passes 100 --threads 1"


class Traffic:
    """Requests of seven kinds, drawn at random, sixteen at a time; ``i`` numbers the prompt.

    A method of a kind returns whether an answer is right, ``greedy`` and ``prefix`` by token.
    """

    def __init__(self, server: Server, prompts: list[list[int]], answers: list[list[int]]) -> None:
        self.server, self.prompts, self.answers = server, prompts, answers
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

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
        with post(self.server, "/generate", payload, stream=True) as answer:
            lines = answer.iter_lines()
            for _ in range(draw.randrange(1, 6)):
                next(lines)
        return True

    KINDS = (greedy, prefix, long, full_context, sampled, constrained, aborted)

    def run(self, minutes: float, seed: int) -> None:
        """Ask until the time is over; ends early when twenty answers are wrong."""
        end = time.monotonic() + 60 * minutes

        def loop(worker: int) -> None:
            draw = random.Random(f"{seed}-{worker}")
            while time.monotonic() < end and len(self.wrong) < 20:
                kind, i = draw.choice(self.KINDS), draw.randrange(len(self.prompts))
                try:
                    problem = "" if kind(self, i, draw) else "a wrong answer"
                except Exception as error:
                    problem = f"{type(error).__name__}: {error}"
                self.counts[kind.__name__] += 1
                if problem:
                    self.wrong.append(f"{kind.__name__} of prompt {i}: {problem}")

        threads = [threading.Thread(target=loop, args=(w,)) for w in range(CONCURRENCY)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60 * minutes + 2 * STUCK_SECONDS)
        assert not any(thread.is_alive() for thread in threads), "a request is stuck"


def usage(process: Popen) -> dict[str, float]:
    """What a process and its children hold: memory without mapped files, handles without shards.

    Of these a learner keeps up to 256 open, removed ones until its next checkpoint.
    """
    parent, named = psutil.Process(process.pid), 0
    every = [parent, *parent.children(recursive=True)]
    memory = [one.memory_info() for one in every]
    for one in every:
        for handle in Path(f"/proc/{one.pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                named += "/shards/" not in os.readlink(handle)
    return {
        "memory_mib": sum(one.rss - one.shared for one in memory) / 2**20,
        "handles": named,
        "threads": sum(one.num_threads() for one in every),
    }


def idle_state(server: Server, prompt: list[int], learner: Popen | None) -> dict[str, dict]:
    """Pool, queue and processes once everything is answered and the cache is flushed."""
    until(lambda: is_idle(server), "a request is stuck")
    requests.post(f"{server.url}/flush_cache", timeout=60).raise_for_status()
    # Gauges move with batches: one small request after the flush brings them up to date.
    server.generate(input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 1})
    names = ("num_running_reqs", "num_queue_reqs")
    pool = {name: next(iter(samples(server, f"sglang:{name}").values())) for name in names}
    found = {"pool": pool, "server": usage(server.process)}
    return found | ({"learner": usage(learner)} if learner else {})


def start_learner(target_dir: Path, folder: Path) -> tuple[Popen, dict[str, str]]:
    """A learner from an untrained drafter, and the environment of its server."""
    names = ("--target", str(target_dir), "--out", str(folder / "draft"))
    assert main(["init", *names, *SHAPE.split()]) == 0
    command = learn_arguments(target_dir, folder, folder, f"{LEARN} --device cpu")
    with (folder / "learn.log").open("ab") as log:
        learner = Popen([*COMMAND, *map(str, command)], stdout=log, stderr=STDOUT)
    # Prompts are cached, so a recorded request is mostly its answer.
    own = {"SHARE": "1", "GIB": str(STORE_GIB), "LENGTH": "256", "CONTEXT": "0"}
    environment = {f"{RECORD}_{name}": value for name, value in own.items()}
    environment |= {RECORD: str(folder / "store"), FOLLOW: str(folder / "published")}
    return learner, environment


@pytest.mark.slow
@pytest.mark.parametrize("learns", [False, True])
def test_soak(servers, target_dir, drafter_dir, own_prompts, own_reference, tmp_path, learns):
    draft, environment, learner, code = drafter_dir, {WIDTH: ADAPTIVE}, None, None
    if learns:
        learner, more = start_learner(target_dir, tmp_path)
        draft, environment = tmp_path / "draft", environment | more
    arguments = ("--dtype", "float32", "--max-total-tokens", str(POOL), "--enable-metrics")
    arguments += (*COMMON, *hyperdflash_arguments(draft))
    try:
        server = servers.get("soak", target_dir, *arguments, environment=environment)
        traffic = Traffic(server, own_prompts, own_reference)
        # Memory settles while caches and allocators fill; what grows later is a leak.
        traffic.run(max(MINUTES / 6, 0.5), seed=0)
        before = idle_state(server, own_prompts[0], learner)
        traffic.run(MINUTES * 5 / 6, seed=1)
        after = idle_state(server, own_prompts[0], learner)
    finally:
        if learner is not None:
            learner.terminate()
            code = learner.wait(120)
    report = {"provenance": provenance(), "minutes": MINUTES, "before": before, "after": after}
    report |= {"requests": dict(traffic.counts), "wrong": traffic.wrong}
    report["rounds_by_width"] = by_label(server, WIDTH_ROUNDS, "width")
    reports = ROOT / "build" / "soak.json"
    pieces = json.loads(reports.read_text()) if reports.is_file() else []
    write_json(reports, [*pieces, report], indent=1)
    assert not traffic.wrong and min(traffic.counts.values()) > 0
    assert sum(rounds > 0 for rounds in report["rounds_by_width"].values()) > 1
    assert server.process.poll() is None
    assert before["pool"] == after["pool"] and set(after["pool"].values()) == {0}
    for process in before.keys() - {"pool"}:
        for what, growth in GROWTH.items():
            assert after[process][what] < before[process][what] + growth, (process, what)
    if learns:
        assert code == 128 + signal.SIGTERM and sum(samples(server, RECORDED).values()) > 0
        assert "drafting with version" in server.log.read_text(errors="replace")
        shards = (tmp_path / "store" / "shards").iterdir()
        assert sum(shard.stat().st_size for shard in shards) < 1.01 * STORE_GIB * 2**30
    servers.stop("soak")
