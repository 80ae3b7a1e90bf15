"""A drafter learns from the traffic of the server that it drafts for: ``make learn-demo``.

    python examples/tiny_deepseek_v4/learn_demo.py --out build/learn_demo

1. A server without speculation answers exchanges of five families: the baseline.
2. A server with an *untrained* drafter answers such exchanges, records half of them and gets what
   ``hyperdflash learn`` publishes next to it.
3. The traffic turns to three families that were never seen.
4. A random drafter is published, which ``learn`` sends and takes back.
5. ``learn`` on a store of random tokens publishes nothing.

``result.json`` holds tau and tokens per second by minute, ``result.svg`` shows them. Every answer
is compared with the baseline's. ``learn`` shares the machine with the server and its clients, at
the lowest priority; the baseline is timed with and without it. Parts that ``result.json`` has are
not repeated.

The families are the eight with the longest answers, 26 to 45 tokens on average: over all of them
half of an answer's time is its prefill, which no drafter shortens.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from subprocess import STDOUT, Popen, TimeoutExpired
from typing import Any

import requests
import torch

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

HERE = Path(__file__).resolve().parent
TARGET = HERE / "target"
GREEDY = Sampling(0.0, 160)
CONCURRENCY = 4
LEARN = (
    "--lr 2e-3 --batch 16 --anchors 8 --every 100 --judges 32 --passes 100 --threads 1 --device cpu"
)
SEEN = ("trace", "subtraction", "order", "multiplication", "count")
UNSEEN = ("units", "addition", "facts")
POISONED_REQUESTS, POISONED_MINUTES = 400, 1.0
# Accept length that must be reached, in so many minutes; seconds that a random drafter may draft.
LEARNED, LEARNED_IN, POISONED_FOR = 3.0, 10, 60.0


@dataclass
class Request:
    """An answered request: when it ended, what was asked, and the answer."""

    at: float
    turns: list[str]
    answer: Answer


class Traffic:
    """Exchanges without end at a fixed concurrency; a context manager."""

    def __init__(self, url: str, families: tuple[str, ...], seed: int) -> None:
        self.url, self.families, self.seed = url, families, seed
        self.done: list[Request] = []
        self.failed: list[BaseException] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(part,), daemon=True)
            for part in range(CONCURRENCY)
        ]

    def _ask(self, part: int) -> None:
        rng = Random(f"{self.seed}/{part}")
        try:
            while not self._stop.is_set():
                family = FAMILIES[rng.choice(self.families)]
                exchange = family.draw(rng, held_out=True)
                turns = [m["content"] for m in exchange.messages if m["role"] == "user"]
                answer = converse(self.url, turns, GREEDY)
                self.done.append(Request(time.monotonic(), turns, answer))
        except BaseException as error:
            self.failed.append(error)

    def run(self, minutes: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let so many minutes pass, or fewer; raises what a request raised."""
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end and not until():
            if self.failed:
                raise self.failed[0]
            time.sleep(0.5)

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_exception) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)


class Published:
    """When each version was published, in minutes; looks whenever it is called."""

    def __init__(self, folder: Path, start: float) -> None:
        self.folder, self.start = folder, start
        self.minutes: dict[int, float] = {}

    def __call__(self) -> bool:
        """Never stops what asks it (see :meth:`Traffic.run`)."""
        version = current(self.folder)
        if version is not None:
            self.minutes.setdefault(version.number, (time.monotonic() - self.start) / 60)
        return False


def by_minute(requests_: list[Request], start: float) -> list[dict[str, Any]]:
    """tau and tokens per second of every whole minute."""
    minutes = int((requests_[-1].at - start) / 60) if requests_ else 0
    found = []
    for minute in range(minutes):
        part = [r.answer for r in requests_ if int((r.at - start) / 60) == minute]
        tokens = sum(len(ids) for answer in part for ids in answer.output_ids)
        drafts, rounds = (
            sum(getattr(answer, name) for answer in part)
            for name in ("correct_drafts", "verify_rounds")
        )
        tau = accept_length(drafts, rounds)
        found.append({"minute": minute + 1, "tau": tau, "tokens_per_second": tokens / 60})
    return found


@contextmanager
def learning(
    folder: Path, draft: Path, store: Path, publish_to: Path, *servers: str
) -> Iterator[Popen]:
    """``hyperdflash learn`` as a process; its output goes to ``learn.log``."""
    places = {"target": TARGET, "draft": draft, "store": store}
    places |= {"publish": publish_to, "work": folder / "work"}
    options = [part for name, place in places.items() for part in (f"--{name}", str(place))]
    options += [part for url in servers for part in ("--server", url)]
    command = ["nice", "-n", "19", sys.executable, "-m", "sglang_hyperdflash.cli", "learn"]
    command += [*options, *LEARN.split()]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "learn.log").open("ab") as log:
        process = Popen(command, stdout=log, stderr=STDOUT)
        try:
            yield process
            if process.poll() is not None:
                raise SystemExit(f"learn ended: {folder / 'learn.log'}")
        finally:
            process.terminate()
            with suppress(TimeoutExpired):
                process.wait(120)
            process.kill()


def new_draft(folder: Path, seed: int) -> None:
    """An untrained drafter."""
    places = ("--target", str(TARGET), "--out", str(folder), "--seed", str(seed))
    if hyperdflash(["init", *places, *SHAPE]):
        raise SystemExit(2)


def version_in_use(url: str) -> int | None:
    """The version that the server drafts with."""
    return read_metrics(requests.get(f"{url}/metrics", timeout=30).text)[0]


def poisoned_version(traffic: Traffic, folder: Path, published: Path) -> dict[str, Any]:
    """Publish a random drafter; seconds until the server has it, and until it is taken back."""
    before = version_in_use(traffic.url)
    new_draft(folder, seed=1)
    number, start = publish(published, folder), time.monotonic()
    seconds: dict[str, float | None] = {"sent": None, "returned": None}

    def returned() -> bool:
        used = version_in_use(traffic.url)
        if seconds["sent"] is None and used == number:
            seconds["sent"] = time.monotonic() - start
        elif seconds["sent"] is not None and used != number:
            seconds["returned"] = time.monotonic() - start
        return seconds["returned"] is not None

    traffic.run(3.0, returned)
    return {"version": number, "before": before, "after": version_in_use(traffic.url), **seconds}


def poisoned_store(folder: Path, store: Path, draft: Path) -> dict[str, Any]:
    """Learn from random tokens with the states of real ones; nothing may be published."""
    source, g = StoreReader(store), torch.Generator().manual_seed(0)
    held = open_writer(folder / "store", source.identity, "poison", "learn_demo", {})
    with held as writer:
        for i in range(min(POISONED_REQUESTS, len(source.samples))):
            sample, rows = source.samples[i], source.states([i]).residual[0]
            tokens = torch.randint(0, 1000, sample.tokens.shape, generator=g)
            writer.add(writer.position, [Sample(tokens, sample.spans)], [(rows,)])
    with learning(folder, draft, folder / "store", folder / "published"):
        time.sleep(60 * POISONED_MINUTES)
    lines = (folder / "learn.log").read_text(errors="replace").splitlines()
    judged = [line for line in lines if "samples: " in line]
    return {"published": current(folder / "published") is not None, "said": judged[-1:]}


def identical(requests_: list[Request], url: str) -> dict[str, int]:
    """Answers that a server without speculation gives as well, of all."""
    again, _ = converse_all(url, [r.turns for r in requests_], GREEDY, 4 * CONCURRENCY)
    pairs = zip(requests_, again, strict=True)
    same = sum(r.answer.output_ids == other.output_ids for r, other in pairs)
    return {"answers": len(requests_), "identical": same}


def draw(result: dict[str, Any]) -> str:
    """The two curves over the minutes, as SVG."""
    from matplotlib.figure import Figure

    minutes = [row["minute"] - 0.5 for row in result["minutes"]]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    tau, speed = figure.subplots(2, 1, sharex=True)
    events = (
        (result["turned_at_minute"], "black", "traffic turns to families never seen"),
        (
            result["poisoned_version"]["minute"],
            "tab:red",
            "a random drafter is published, and taken back",
        ),
    )
    for axis, name in ((tau, "tau"), (speed, "tokens_per_second")):
        axis.plot(minutes, [row[name] for row in result["minutes"]], marker="o", markersize=3)
        for number, minute in enumerate(result["published_minutes"].values()):
            text = "a version is published" if number == 0 else None
            axis.axvline(minute, color="tab:green", linewidth=0.8, alpha=0.5, label=text)
        for minute, color, text in events:
            axis.axvline(minute, color=color, linestyle=":", label=text)
        axis.set(ylim=(0, None))
        axis.grid(alpha=0.25)
    tau.set_ylabel("accept length \N{GREEK SMALL LETTER TAU}")
    for name, style, text in (
        ("baseline_next_to_learn", "--", "without speculation"),
        ("baseline_tokens_per_second", "-.", "without speculation, no learner"),
    ):
        if name in result:
            speed.axhline(result[name], color="black", linestyle=style, linewidth=1, label=text)
    speed.set(ylabel="tokens/s", xlabel="minutes")
    figure.legend(*speed.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def baseline_rate(out: Path, minutes: float) -> float:
    """Tokens per second without speculation."""
    plain = Server(TARGET, *comparable_arguments(), log=out / "baseline.log")
    with plain.wait(), Traffic(plain.url, SEEN, 1) as traffic:
        start = time.monotonic()
        traffic.run(minutes)
        rows = by_minute(traffic.done, start)
    return sum(row["tokens_per_second"] for row in rows) / max(len(rows), 1)


def learned(out: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Everything with the server that learns, and its answers compared."""
    result: dict[str, Any] = {}
    draft, store, published = out / "draft", out / "store", out / "published"
    new_draft(draft, seed=0)
    environment = {"HYPERDFLASH_RECORD": str(store), "HYPERDFLASH_RECORD_SHARE": "0.5"}
    arguments = (*comparable_arguments(), *hyperdflash_arguments(draft), "--enable-metrics")
    server = Server(TARGET, *arguments, log=out / "server.log", environment=environment)
    with ExitStack() as stack:
        stack.enter_context(server.wait())
        start = time.monotonic()
        versions_seen = Published(published, start)
        with learning(out, draft, store, published, server.url):
            with Traffic(server.url, SEEN, 2) as first:
                first.run(args.minutes, versions_seen)
            result["turned_at_minute"] = (time.monotonic() - start) / 60
            with Traffic(server.url, UNSEEN, 3) as second:
                second.run(args.unseen_minutes, versions_seen)
            result["published_minutes"] = versions_seen.minutes
            with Traffic(server.url, UNSEEN, 4) as third:
                third.run(1.0)
                minute = (time.monotonic() - start) / 60
                refused = poisoned_version(third, out / "random", published)
                result["poisoned_version"] = refused | {"minute": minute}
                third.run(1.0)
    answered = sorted(first.done + second.done + third.done, key=lambda r: r.at)
    result["minutes"] = by_minute(answered, start)
    result["poisoned_store"] = poisoned_store(out / "poison", store, draft)
    with Server(TARGET, *comparable_arguments(), log=out / "baseline.log").wait() as plain:
        result["identity"] = identical(answered[:: args.compare_every], plain.url)
    return result | {"provenance": provenance()}


def run(args: argparse.Namespace) -> int:
    """The parts that ``result.json`` lacks; 1 where the result is not as it should be."""
    out, place = args.out, args.out / "result.json"
    result = json.loads(place.read_text()) if place.is_file() else {}
    if "baseline_tokens_per_second" not in result:
        result["baseline_tokens_per_second"] = baseline_rate(out, args.baseline_minutes)
        write_json(place, result, indent=1)
    if "minutes" not in result:
        result |= learned(out, args)
        write_json(place, result, indent=1)
    if "baseline_next_to_learn" not in result:
        # It goes on with what it has recorded, and so has something to do.
        with learning(out, out / "draft", out / "store", out / "published"):
            result["baseline_next_to_learn"] = baseline_rate(out, args.baseline_minutes)
    write_json(place, result, indent=1)
    write_text(out / "result.svg", draw(result))
    print(f"{place}: {result['minutes'][-1]}, {result['identity']}")
    same = result["identity"]["answers"] == result["identity"]["identical"]
    refused = not result["poisoned_store"]["published"]
    returned = (result["poisoned_version"]["returned"] or math.inf) <= POISONED_FOR
    reached = any((row["tau"] or 0) >= LEARNED for row in result["minutes"][:LEARNED_IN])
    return 0 if same and refused and returned and reached else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="new folder for everything that this makes")
    add("--baseline-minutes", type=float, default=2, help="without speculation")
    add("--minutes", type=float, default=20, help="of the families that it learns first")
    add("--unseen-minutes", type=float, default=12, help="of the families never seen")
    add("--compare-every", type=int, default=1, help="compare one answer of so many")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
