"""A long mixed load: nothing leaks, nothing hangs, nothing is wrong.

``HYPERDFLASH_SOAK_MINUTES`` (30) is its length; ``build/soak.json`` gets its report. The second run
records every request next to a learner that sends its drafters.
"""

import json
import os
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from subprocess import Popen

import psutil
import pytest

from sglang_hyperdflash.serving.record.settings import RECORD
from sglang_hyperdflash.serving.scheduler.metrics import RECORDED, WIDTH_ROUNDS
from sglang_hyperdflash.serving.settings import ADAPTIVE, WIDTH
from sglang_hyperdflash.tools.atomic import write_json
from sglang_hyperdflash.tools.provenance import provenance
from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from tests.conftest import ROOT
from tests.engine import asking
from tests.engine.asking import UNPROCESSED
from tests.engine.conftest import COMMON, NEW_TOKENS, flush, greedy
from tests.engine.test_learning_faults import Learning
from tests.waiting import until

MINUTES = float(os.environ.get("HYPERDFLASH_SOAK_MINUTES", "30"))
CONCURRENCY = 16
GROWTH = {"memory_mib": 200, "handles": 16, "threads": 8}
STORE_GIB = 0.5
CONTEXT = 2048  # the tiny target's
SHAPE = "--layers 3 --heads 4 --kv-heads 2 --head-dim 64 --intermediate-size 768 --window 0"
LEARN = "--lr 2e-3 --batch 16 --anchors 8 --every 50 --judges 32 --passes 100"


class Traffic:
    """Requests of five kinds, drawn at random, sixteen at a time; ``i`` numbers the prompt."""

    def __init__(self, server: Server, prompts: list[list[int]], baseline: dict[str, list]) -> None:
        self.server, self.prompts, self.baseline = server, prompts, baseline
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def ask(self, prompt: list[int], tokens: int) -> list[int]:
        return greedy(self.server, prompt, tokens, timeout=180.0)["output_ids"]

    def case(self, i: int, draw: random.Random) -> None:
        """Greedy, seeded, penalised or constrained, streams of several choices."""
        name = draw.choice(UNPROCESSED)
        asked = asking.payloads(name, self.prompts)
        number = i % len(asked)
        answer = asking.answers(self.server, [asked[number]], 1)
        asking.assert_equal(answer, [self.baseline[name][number]])

    def prefix(self, i: int, draw: random.Random) -> None:
        """A conversation that goes on: its prefix is in the cache, and so is the drafter's K/V."""
        cut, answer = draw.randrange(1, NEW_TOKENS - 1), self.baseline["own"][i]
        assert self.ask(self.prompts[i] + answer[:cut], NEW_TOKENS - cut) == answer[cut:]

    def long(self, i: int, draw: random.Random) -> None:
        some = [token for prompt in draw.sample(self.prompts, 4) for token in prompt]
        assert len(self.ask(some, 400)) == 400

    def full_context(self, i: int, draw: random.Random) -> None:
        """As many tokens as the context leaves: SGLang ends an answer two before its end."""
        left = draw.randint(16, 32)
        some = [token for prompt in self.prompts for token in prompt] * 8
        assert len(self.ask(some[: CONTEXT - left], left)) == left - 2

    def aborted(self, i: int, draw: random.Random) -> None:
        sampling = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
        payload = {"input_ids": self.prompts[i], "sampling_params": sampling, "stream": True}
        with asking.post(self.server, "/generate", payload, stream=True) as answer:
            lines = answer.iter_lines()
            for _ in range(draw.randrange(1, 6)):
                next(lines)

    KINDS = (case, prefix, long, full_context, aborted)

    def run(self, minutes: float, seed: int) -> None:
        """Ask until the time is over; ends early when twenty answers are wrong."""
        end = time.monotonic() + 60 * minutes

        def loop(worker: int) -> None:
            draw = random.Random(f"{seed}-{worker}")
            while time.monotonic() < end and len(self.wrong) < 20:
                kind, i = draw.choice(self.KINDS), draw.randrange(len(self.prompts))
                self.counts[kind.__name__] += 1
                try:
                    kind(self, i, draw)
                except Exception as error:
                    name = type(error).__name__
                    self.wrong.append(f"{kind.__name__} of prompt {i}: {name}: {error}")

        with ThreadPoolExecutor(CONCURRENCY) as pool:
            list(pool.map(loop, range(CONCURRENCY)))


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
    until(lambda: asking.is_idle(server), "a request is stuck")
    flush(server)
    # Gauges move with batches: one small request after the flush brings them up to date.
    greedy(server, prompt, 1)
    names = ("num_running_reqs", "num_queue_reqs")
    pool = {name: next(iter(asking.samples(server, f"sglang:{name}").values())) for name in names}
    state = {"pool": pool, "server": usage(server.process)}
    return state | ({"learner": usage(learner)} if learner else {})


@pytest.mark.slow
@pytest.mark.parametrize("learns", [False, True])
def test_soak(servers, target_dir, drafter_dir, own_prompts, baseline, tmp_path, learns):
    draft, environment, learner, port = drafter_dir, {WIDTH: ADAPTIVE}, None, None
    if learns:
        learning = Learning(servers, target_dir, tmp_path, [], SHAPE, LEARN)
        learning.start_learner()
        draft, learner, port = tmp_path / "draft", learning.learner, learning.port
        # Prompts are cached, so a recorded request is mostly its answer.
        some = {"SHARE": "1", "GIB": str(STORE_GIB), "LENGTH": "256", "CONTEXT": "0"}
        environment |= learning.environment
        environment |= {f"{RECORD}_{name}": value for name, value in some.items()}
    # Less than sixteen requests of the mix want: the pool is full, and prefixes are evicted.
    arguments = ("--dtype", "float32", "--max-total-tokens", "3000", "--enable-metrics")
    arguments += (*COMMON, *hyperdflash_arguments(draft))
    try:
        options = {"environment": environment, "port": port}
        server = servers.get("soak", target_dir, *arguments, **options)
        traffic = Traffic(server, own_prompts, baseline)
        # Memory settles while caches and allocators fill; what grows later is a leak.
        traffic.run(max(MINUTES / 6, 0.5), seed=0)
        before = idle_state(server, own_prompts[0], learner)
        traffic.run(MINUTES * 5 / 6, seed=1)
        after = idle_state(server, own_prompts[0], learner)
    finally:
        if learns:
            learning.stop_learner()
    report = {"provenance": provenance(), "minutes": MINUTES, "before": before, "after": after}
    report |= {"requests": dict(traffic.counts), "wrong": traffic.wrong}
    report["rounds_by_width"] = asking.by_label(server, WIDTH_ROUNDS, "width")
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
        assert sum(asking.samples(server, RECORDED).values()) > 0
        assert "drafting with version" in server.log.read_text(errors="replace")
        shards = (tmp_path / "store" / "shards").iterdir()
        assert sum(shard.stat().st_size for shard in shards) < 1.01 * STORE_GIB * 2**30
    servers.stop("soak")
