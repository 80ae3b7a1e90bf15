"""A drafter learns from the traffic of the server that it drafts for: ``make learn-demo``.

    python examples/tiny_deepseek_v4/learn_demo.py --out build/learn_demo

1. A server without speculation answers exchanges of five families: the baseline.
2. A server with an *untrained* drafter answers such exchanges, records half of them and gets what
   ``hyperdflash learn`` publishes next to it.
3. The traffic turns to three families that were never seen.
4. A random drafter is published, which ``learn`` sends and takes back.
5. ``learn`` on a store of random tokens publishes nothing.

``result.json`` holds tau and tokens per second by minute, ``learning-*.svg`` show them. Every
answer is compared with the baseline's. ``learn`` shares the machine with the server and its
clients, at the lowest priority; the baseline is timed with and without it. Parts that
``result.json`` has are not repeated.

The families are the eight with the longest answers, 26 to 45 tokens on average: over all families
half of an answer's time is its prefill, which no drafter shortens.
"""

import argparse
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from subprocess import STDOUT, Popen, TimeoutExpired
from typing import Any

import requests
import torch

from docs.figures.draw import THEMES, svg
from eval.client import Answer, Sampling, converse, converse_all
from exchanges import FAMILIES
from sglang_hyperdflash.cli import main as hyperdflash
from sglang_hyperdflash.commands.servers import read_metrics
from sglang_hyperdflash.draft.published import current, publish
from sglang_hyperdflash.tools.acceptance import accept_length
from sglang_hyperdflash.tools.atomic import write_json, write_text
from sglang_hyperdflash.tools.provenance import provenance
from sglang_hyperdflash.tools.server_process import (
    Server,
    comparable_arguments,
    hyperdflash_arguments,
)
from sglang_hyperdflash.training.samples import Sample
from sglang_hyperdflash.training.store.reader import StoreReader
from sglang_hyperdflash.training.store.writer import open_writer
from study import SHAPE

TARGET = Path(__file__).resolve().parent / "target"
GREEDY = Sampling(0.0, 160)
CONCURRENCY = 4
LEARN = "--lr 2e-3 --batch 16 --anchors 8 --every 100 --judges 32 --passes 100"
LEARN += " --threads 1 --device cpu"
SEEN = ("trace", "subtraction", "order", "multiplication", "count")
UNSEEN = ("units", "addition", "facts")
POISONED_REQUESTS, POISONED_MINUTES = 400, 1.0
# Accept length that must be reached, in so many minutes; seconds that a random drafter may draft.
LEARNED, LEARNED_IN, POISONED_FOR = 3.0, 10, 60.0


@dataclass
class Request:
    """An answered request."""

    ended: float  # seconds of the monotonic clock
    turns: list[str]  # what the user said
    answer: Answer


class Traffic(AbstractContextManager):
    """Exchanges at a fixed concurrency, from now until the end of the ``with`` block."""

    def __init__(self, url: str, families: tuple[str, ...], seed: int) -> None:
        self.url, self.families, self.seed = url, families, seed
        self.answered: list[Request] = []
        self.errors: list[BaseException] = []
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        for client in range(CONCURRENCY):
            self._threads.append(threading.Thread(target=self._ask, args=(client,), daemon=True))
            self._threads[-1].start()

    def _ask(self, client: int) -> None:
        rng = Random(f"{self.seed}/{client}")
        try:
            while not self._stop.is_set():
                exchange = FAMILIES[rng.choice(self.families)].draw(rng, held_out=True)
                turns = [m["content"] for m in exchange.messages if m["role"] == "user"]
                answer = converse(self.url, turns, GREEDY)
                self.answered.append(Request(time.monotonic(), turns, answer))
        except BaseException as error:
            self.errors.append(error)

    def run(self, minutes: float, until: Callable[[], bool] = lambda: False) -> None:
        """Wait for so many minutes, or until ``until``; raise what a request raised."""
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end and not until():
            if self.errors:
                raise self.errors[0]
            time.sleep(0.5)

    def __exit__(self, *_exception) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)


def by_minute(answered: list[Request], start: float) -> list[dict[str, Any]]:
    """Return tau and tokens per second of every whole minute."""
    rows = []
    for minute in range(int((answered[-1].ended - start) / 60) if answered else 0):
        answers = [r.answer for r in answered if int((r.ended - start) / 60) == minute]
        tokens = sum(len(ids) for answer in answers for ids in answer.output_ids)
        drafts = sum(answer.correct_drafts for answer in answers)
        tau = accept_length(drafts, sum(answer.verify_rounds for answer in answers))
        rows.append({"minute": minute + 1, "tau": tau, "tokens_per_second": tokens / 60})
    return rows


@contextmanager
def learning(folder: Path, *servers: str, **paths: Path) -> Iterator[None]:
    """Run ``hyperdflash learn`` with these paths; its output goes to ``folder/learn.log``."""
    paths |= {"target": TARGET, "work": folder / "work"}
    options = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    options += [word for url in servers for word in ("--server", url)]
    command = ["nice", "-n", "19", sys.executable, "-m", "sglang_hyperdflash", "learn"]
    command += [*options, *LEARN.split()]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "learn.log").open("ab") as log:
        process = Popen(command, stdout=log, stderr=STDOUT)
        try:
            yield
            if process.poll() is not None:
                raise SystemExit(f"learn ended: {folder / 'learn.log'}")
        finally:
            process.terminate()
            with suppress(TimeoutExpired):
                process.wait(120)
            process.kill()


def new_draft(folder: Path, seed: int) -> None:
    """Write an untrained drafter."""
    options = ("--target", str(TARGET), "--out", str(folder), "--seed", str(seed))
    if hyperdflash(["init", *options, *SHAPE]):
        raise SystemExit(2)


def version_in_use(url: str) -> int | None:
    """Return the version that the server drafts with."""
    return read_metrics(requests.get(f"{url}/metrics", timeout=30).text)[0]


def poisoned_version(traffic: Traffic, folder: Path, published: Path) -> dict[str, Any]:
    """Publish a random drafter; return the seconds until it is sent, and until it is taken back."""
    previous = version_in_use(traffic.url)
    new_draft(folder, seed=1)
    number, start = publish(published, folder), time.monotonic()
    seconds: dict[str, float | None] = {"sent": None, "returned": None}

    def returned() -> bool:
        in_use = version_in_use(traffic.url) == number
        if in_use and seconds["sent"] is None:
            seconds["sent"] = time.monotonic() - start
        elif not in_use and seconds["sent"] is not None:
            seconds["returned"] = time.monotonic() - start
        return seconds["returned"] is not None

    traffic.run(3.0, returned)
    return {"version": number, "before": previous, "after": version_in_use(traffic.url), **seconds}


def poisoned_store(folder: Path, store: Path, draft: Path) -> dict[str, Any]:
    """Learn from random tokens with the states of real ones; nothing may be published."""
    source, rng = StoreReader(store), torch.Generator().manual_seed(0)
    with open_writer(folder / "store", source.identity, "poison", "learn_demo", {}) as writer:
        for i in range(min(POISONED_REQUESTS, len(source.samples))):
            sample, rows = source.samples[i], source.states([i]).residual[0]
            tokens = torch.randint(0, 1000, sample.tokens.shape, generator=rng)
            writer.add(writer.position, [Sample(tokens, sample.spans)], [(rows,)])
    with learning(folder, draft=draft, store=folder / "store", publish=folder / "published"):
        time.sleep(60 * POISONED_MINUTES)
    lines = (folder / "learn.log").read_text(errors="replace").splitlines()
    judgements = [line for line in lines if "samples: " in line]
    return {"published": current(folder / "published") is not None, "said": judgements[-1:]}


def baseline_rate(out: Path, minutes: float) -> float:
    """Measure tokens per second without speculation."""
    server = Server(TARGET, *comparable_arguments(), log=out / "baseline.log")
    with server.wait(), Traffic(server.url, SEEN, 1) as traffic:
        start = time.monotonic()
        traffic.run(minutes)
        rows = by_minute(traffic.answered, start)
    return sum(row["tokens_per_second"] for row in rows) / max(len(rows), 1)


def learned(out: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run everything with the server that learns, and compare its answers."""
    result: dict[str, Any] = {}
    draft, store, published = out / "draft", out / "store", out / "published"
    new_draft(draft, seed=0)
    environment = {"HYPERDFLASH_RECORD": str(store), "HYPERDFLASH_RECORD_SHARE": "0.5"}
    arguments = (*comparable_arguments(), *hyperdflash_arguments(draft), "--enable-metrics")
    server = Server(TARGET, *arguments, log=out / "server.log", environment=environment)
    published_minutes: dict[int, float] = {}
    with server.wait():
        start = time.monotonic()

        def minutes_passed() -> float:
            return (time.monotonic() - start) / 60

        def note_version() -> bool:
            """Note when a version was published; never ends the traffic."""
            version = current(published)
            if version is not None:
                published_minutes.setdefault(version.number, minutes_passed())
            return False

        with learning(out, server.url, draft=draft, store=store, publish=published):
            with Traffic(server.url, SEEN, 2) as seen_traffic:
                seen_traffic.run(args.minutes, note_version)
            result["turned_at_minute"] = minutes_passed()
            with Traffic(server.url, UNSEEN, 3) as unseen_traffic:
                unseen_traffic.run(args.unseen_minutes, note_version)
            result["published_minutes"] = published_minutes
            with Traffic(server.url, UNSEEN, 4) as last_traffic:
                last_traffic.run(1.0)
                minute = minutes_passed()
                poisoned = poisoned_version(last_traffic, out / "random", published)
                result["poisoned_version"] = poisoned | {"minute": minute}
                last_traffic.run(1.0)
    answered = seen_traffic.answered + unseen_traffic.answered + last_traffic.answered
    answered.sort(key=lambda request: request.ended)
    result["minutes"] = by_minute(answered, start)
    result["poisoned_store"] = poisoned_store(out / "poison", store, draft)
    with Server(TARGET, *comparable_arguments(), log=out / "baseline.log").wait() as baseline:
        compared = answered[:: args.compare_every]
        turns = [request.turns for request in compared]
        answers, _ = converse_all(baseline.url, turns, GREEDY, 4 * CONCURRENCY)
    pairs = zip(compared, answers, strict=True)
    identical = sum(request.answer.output_ids == answer.output_ids for request, answer in pairs)
    result["identity"] = {"answers": len(compared), "identical": identical}
    return result | {"provenance": provenance()}


def main() -> int:
    """Make the parts that ``result.json`` lacks; return 1 if the result is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="new folder for everything that this makes")
    add("--baseline-minutes", type=float, default=2, help="without speculation")
    add("--minutes", type=float, default=20, help="of the families that it learns first")
    add("--unseen-minutes", type=float, default=12, help="of the families never seen")
    add("--compare-every", type=int, default=1, help="compare one answer of so many")
    args = parser.parse_args()
    out, path = args.out, args.out / "result.json"
    result = json.loads(path.read_text()) if path.is_file() else {}
    if "baseline_tokens_per_second" not in result:
        result["baseline_tokens_per_second"] = baseline_rate(out, args.baseline_minutes)
        write_json(path, result, indent=1)
    if "minutes" not in result:
        result |= learned(out, args)
        write_json(path, result, indent=1)
    if "baseline_next_to_learn" not in result:
        # It goes on with what it has recorded, and so has something to do.
        with learning(out, draft=out / "draft", store=out / "store", publish=out / "published"):
            result["baseline_next_to_learn"] = baseline_rate(out, args.baseline_minutes)
    write_json(path, result, indent=1)
    for theme in THEMES:
        write_text(out / f"learning-{theme}.svg", svg("learning", theme, {"learning": result}))
    print(f"{path}: {result['minutes'][-1]}, {result['identity']}")
    identical = result["identity"]["answers"] == result["identity"]["identical"]
    refused = not result["poisoned_store"]["published"]
    returned = (result["poisoned_version"]["returned"] or math.inf) <= POISONED_FOR
    reached = any((row["tau"] or 0) >= LEARNED for row in result["minutes"][:LEARNED_IN])
    return 0 if identical and refused and returned and reached else 1


if __name__ == "__main__":
    sys.exit(main())
