"""A drafter that learns from traffic, while its server and its learner are killed."""

import json
import re
import signal
import subprocess
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle, islice

import pytest

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.draft.published import current
from sglang_hyperdflash.serving.record.settings import ASKED, RECORD
from sglang_hyperdflash.tools.server_process import free_port, hyperdflash_arguments
from sglang_hyperdflash.training.checkpoints import saved_states
from sglang_hyperdflash.training.store.reader import StoreReader
from tests.engine.conftest import FP32, chat_ids, greedy, greedy_all, held_out_problems, ids
from tests.unit.training.streams import learn_arguments
from tests.waiting import until
from tests.warm_start.client import start_command

SHAPE = "--layers 1 --heads 4 --kv-heads 2 --head-dim 64 --intermediate-size 256 --window 0"
LEARN = "--lr 5e-3 --batch 8 --anchors 8 --every 20 --judges 32 --passes 1000"
NEW, NAME = 24, "learning-faults"
Tokens = tuple[int, ...]


class Learning:
    """A server that records, a learner that sends it drafters, and distinct requests."""

    def __init__(
        self, servers, target_dir, folder, prompts: list[Tokens], shape=SHAPE, learn=LEARN
    ) -> None:
        self.servers, self.target, self.folder, self.options = servers, target_dir, folder, learn
        self.environment = {RECORD: str(folder / "store"), f"{RECORD}_SHARE": "0"}
        self.port = free_port()
        self.prompts, self.asked, self.answers = cycle(prompts), Counter(), {}
        names = ("--target", str(target_dir), "--out", str(folder / "draft"))
        assert main(["init", *names, *shape.split()]) == 0
        self.busy = threading.Event()
        self.learner: subprocess.Popen | None = None

    def start_server(self) -> None:
        arguments = (*FP32, "--disable-radix-cache", *hyperdflash_arguments(self.folder / "draft"))
        options = {"environment": self.environment, "port": self.port}
        self.server = self.servers.get(NAME, self.target, *arguments, "--enable-metrics", **options)

    def start_learner(self) -> None:
        options = f"{self.options} --threads 1 --device cpu --server http://127.0.0.1:{self.port}"
        command = learn_arguments(self.target, self.folder, self.folder, options)
        with (self.folder / "learn.log").open("wb") as log:
            self.learner = start_command(*command, stdout=log, stderr=subprocess.STDOUT)

    def kill_learner(self) -> None:
        self.learner.send_signal(signal.SIGKILL)
        self.learner.wait()

    def stop_learner(self) -> None:
        """As a user ends it."""
        self.learner.terminate()
        assert self.learner.wait(120) == 128 + signal.SIGTERM, self.said()

    def kill_server(self) -> None:
        self.servers.stop(NAME)

    def said(self) -> str:
        """What this run of the learner has printed."""
        return (self.folder / "learn.log").read_text(errors="replace")

    def records(self) -> list[dict]:
        log = self.folder / "work" / "training_log.jsonl"
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

    def check(self, before: list[Tokens]) -> list[Tokens]:
        """All that is stored: what was before, and nothing that was not asked for or answered."""
        source = StoreReader(self.folder / "store")
        found = [tuple(sample.tokens.tolist()) for sample in source.samples]
        assert found[: len(before)] == before
        for tokens, count in Counter(found).items():
            prompt, answer = tokens[:-NEW], tokens[-NEW:]
            assert 0 < count <= self.asked[prompt]
            assert self.answers.get(prompt, answer) == answer
        return found


@pytest.mark.faults
@pytest.mark.timeout(3600)
def test_kills_lose_nothing_that_was_on_the_disk_and_double_nothing(
    servers, target_dir, tokenizer, own_prompts, own_reference, tmp_path
):
    """Of the learner, of the server, and of both: what is restarted goes on."""
    prompts = dict.fromkeys(tuple(chat_ids(tokenizer, each)) for each in held_out_problems(1800))
    learning = Learning(servers, target_dir, tmp_path, list(prompts))
    learning.start_server()
    learning.start_learner()
    until(lambda: learning.drafts_with() > 0, meanwhile=learning.traffic)
    stored: list[Tokens] = []
    for victims in (("learner",), ("server",), ("server", "learner")):
        stored = learning.check(stored)
        with ThreadPoolExecutor(1) as pool:
            asked = sum(learning.asked.values())
            learning.busy.set()
            running = pool.submit(learning.keep_asking)
            until(lambda asked=asked: sum(learning.asked.values()) > asked + 8)
            for victim in victims:
                getattr(learning, f"kill_{victim}")()
            learning.busy.clear()
            assert (running.exception() is not None) == ("server" in victims)
        step = int(saved_states(tmp_path / "work")[-1].stem.partition("-")[2])
        version = current(tmp_path / "published")
        version.check()
        stored = learning.check(stored)
        for victim in victims:
            getattr(learning, f"start_{victim}")()
        assert ids(greedy_all(learning.server, own_prompts, 4)) == own_reference

        def is_past(end: tuple[int, int, int]) -> bool:
            """It has learnt from new samples, and drafts with that version or a later one."""
            assert learning.learner.poll() is None, learning.said()
            last = learning.records()[-1]
            now = last["step"] - 1, last["samples"] - 1, learning.drafts_with()
            return all(a >= b for a, b in zip(now, end, strict=True))

        end = step, len(stored), version.number
        until(partial(is_past, end), meanwhile=learning.traffic)
        assert "learner" not in victims or str(step) in learning.said()
    learning.check(stored)
    numbers = [each["published"] for each in learning.records() if "published" in each]
    assert numbers and numbers == sorted(set(numbers))
    learning.stop_learner()
    learning.kill_server()
