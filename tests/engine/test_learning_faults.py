"""A drafter that learns from traffic, while its server and its learner are killed."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import pytest

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.draft.published import current
from sglang_hyperdflash.serving.record.settings import ASKED, RECORD
from sglang_hyperdflash.serving.scheduler.follow import FOLLOW
from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from sglang_hyperdflash.training.store.reader import StoreReader
from sglang_hyperdflash.training.trainer import saved_states
from tests.engine.conftest import FP32, chat_ids, greedy, greedy_all, held_out_problems, ids
from tests.unit.training.streams import learn_arguments
from tests.waiting import until
from tests.warm_start.client import start_command

SHAPE = "--layers 1 --heads 4 --kv-heads 2 --head-dim 64 --intermediate-size 256 --window 0"
LEARN = "--lr 5e-3 --batch 8 --anchors 8 --every 20 --judges 32 --passes 1000 --threads 1"
NEW, PROBLEMS, NAME = 24, 1800, "learning-faults"
Tokens = tuple[int, ...]


class Learning:
    """A server that records and follows, a learner next to it, and distinct requests."""

    def __init__(self, servers, target_dir: Path, folder: Path, prompts: list[Tokens]) -> None:
        self.servers, self.target, self.folder = servers, target_dir, folder
        self.draft, self.store = folder / "draft", folder / "store"
        self.published, self.work = folder / "published", folder / "work"
        self.prompts, self.asked, self.answers = cycle(prompts), Counter(), {}
        names = ("--target", str(target_dir), "--out", str(self.draft))
        assert main(["init", *names, *SHAPE.split()]) == 0
        self.busy = threading.Event()
        self.server: Server | None = None
        self.learner: subprocess.Popen | None = None

    def start_server(self) -> None:
        environment = {RECORD: str(self.store), f"{RECORD}_SHARE": "0", FOLLOW: str(self.published)}
        arguments = (*FP32, "--disable-radix-cache", *hyperdflash_arguments(self.draft))
        self.server = self.servers.get(NAME, self.target, *arguments, environment=environment)

    def start_learner(self) -> None:
        command = learn_arguments(self.target, self.folder, self.folder, f"{LEARN} --device cpu")
        with (self.folder / "learn.log").open("wb") as log:
            self.learner = start_command(*command, stdout=log, stderr=subprocess.STDOUT)

    def kill_learner(self) -> None:
        self.learner.send_signal(signal.SIGKILL)
        self.learner.wait()

    def kill_server(self) -> None:
        self.servers.stop(NAME)

    def said(self) -> str:
        """What this run of the learner has printed."""
        return (self.folder / "learn.log").read_text(errors="replace")

    def step(self) -> int:
        """Of the last checkpoint."""
        return int(saved_states(self.work)[-1].stem.partition("-")[2])

    def records(self) -> list[dict]:
        log = self.work / "training_log.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []

    def drafts_with(self) -> int:
        """The version that this run of the server has taken last."""
        log = self.server.log.read_text(errors="replace")
        return max(map(int, re.findall(r"drafting with version (\d+)", log)), default=0)

    def ask(self, prompt: Tokens) -> None:
        self.asked[prompt] += 1
        sampling = {"custom_params": {ASKED: True}}
        answer = tuple(greedy(self.server, list(prompt), NEW, sampling=sampling)["output_ids"])
        assert self.answers.setdefault(prompt, answer) == answer

    def traffic(self) -> None:
        """Some requests, four at a time."""
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(self.ask, list(islice(self.prompts, 16))))

    def keep_asking(self) -> None:
        while self.busy.is_set():
            self.traffic()

    def is_past(self, end: dict[str, int], version: int) -> bool:
        """Whether it has learnt from new samples, and drafts with the version or a later one."""
        assert self.learner.poll() is None, self.said()
        last = self.records()[-1]
        learnt = all(last[name] > value for name, value in end.items())
        return learnt and self.drafts_with() >= version

    def check(self, before: list[Tokens]) -> list[Tokens]:
        """All that is stored: what was before, and nothing that was not asked for or answered."""
        found = [tuple(sample.tokens.tolist()) for sample in StoreReader(self.store).samples]
        assert found[: len(before)] == before
        for tokens, count in Counter(found).items():
            prompt, answer = tokens[:-NEW], tokens[-NEW:]
            assert 0 < count <= self.asked[prompt]
            assert self.answers.get(prompt, answer) == answer
        return found


@pytest.fixture
def learning(servers, target_dir, tokenizer, tmp_path):
    problems = held_out_problems(PROBLEMS)
    prompts = list(dict.fromkeys(tuple(chat_ids(tokenizer, each)) for each in problems))
    made = Learning(servers, target_dir, tmp_path, prompts)
    yield made
    if made.learner is not None:
        made.kill_learner()
    if NAME in servers.running:
        made.kill_server()


@pytest.mark.faults
@pytest.mark.timeout(3600)
def test_kills_lose_nothing_that_was_on_the_disk_and_double_nothing(
    learning, own_prompts, own_reference
):
    """Of the learner, of the server, and of both: what is restarted goes on."""
    learning.start_server()
    learning.start_learner()
    until(lambda: learning.drafts_with() > 0, meanwhile=learning.traffic)
    stored: list[Tokens] = []
    for victims in (("learner",), ("server",), ("server", "learner")):
        stored = learning.check(stored)
        with ThreadPoolExecutor(1) as pool:
            learning.busy.set()
            running = pool.submit(learning.keep_asking)
            time.sleep(3)
            for victim in victims:
                getattr(learning, f"kill_{victim}")()
            learning.busy.clear()
            assert (running.exception() is not None) == ("server" in victims)
        step, version = learning.step(), current(learning.published)
        version.check()
        stored = learning.check(stored)
        for victim in victims:
            getattr(learning, f"start_{victim}")()
        assert ids(greedy_all(learning.server, own_prompts, 4)) == own_reference

        end = {"step": step, "samples": len(stored)}
        until(partial(learning.is_past, end, version.number), meanwhile=learning.traffic)
        assert "learner" not in victims or f"resumed at step {step}" in learning.said()
        print(f"killed {victims}: {len(stored)} samples, step {step}, version {version.number}")
    stored = learning.check(stored)
    numbers = [each["published"] for each in learning.records() if "published" in each]
    assert numbers and numbers == sorted(set(numbers))
    learning.learner.send_signal(signal.SIGTERM)
    assert learning.learner.wait(120) == 128 + signal.SIGTERM, learning.said()
