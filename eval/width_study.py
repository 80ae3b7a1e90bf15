"""Throughput of an adaptive width beside no speculation and a fixed block, interleaved in one run.

    python -m eval.width_study --target T --draft D --untrained U --prompts FILE ... --out DIR

All servers are up for the whole run and are loaded in turn, so that what the machine does meanwhile
falls on all of them. A load is a closed loop: ``c`` requests in flight, prompts in turn, answers as
long as they are. The first pass of a server at a load is not counted. The same command measures
everything anew.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import requests

from eval.errors import INTERRUPTED, UNUSABLE, USER_ERRORS, EvalError, one_line
from eval.prompts import turns_of
from eval.width_account import account
from eval.width_report import ADAPTIVE, AGAIN, FULL, ONE, TARGET, UNTRAINED, write_report
from sglang_hyperdflash.serving.round_times import ROUND_TIMES, read_passes
from sglang_hyperdflash.serving.width_metrics import WIDTH_ROUNDS
from sglang_hyperdflash.serving.width_settings import WIDTH, WIDTHS
from sglang_hyperdflash.targets.files import load_tokenizer
from sglang_hyperdflash.tools.checksum import short_hash
from sglang_hyperdflash.tools.command_line import Parser
from sglang_hyperdflash.tools.jsonl import read_lines
from sglang_hyperdflash.tools.ownership import claim, location
from sglang_hyperdflash.tools.provenance import provenance
from sglang_hyperdflash.tools.server_process import (
    Server,
    comparable_arguments,
    hyperdflash_arguments,
)

KIND = "python -m eval.width_study"
LEVELS = (1, 2, 4, 8, 16, 32, 64)
# Requests of a pass: so many times the concurrency (so that few of its rounds see the batch fill
# or drain), and at least so many.
WAVES, FEWEST = 8, 24
# Requests of a step of one at a time: hundreds of rounds.
ALONE = 40


@dataclass(frozen=True)
class Load:
    """A closed loop of ``concurrency`` requests of at most ``tokens`` new tokens each."""

    concurrency: int
    tokens: int
    temperature: float
    fewest: int = FEWEST

    @property
    def requests(self) -> int:
        return max(self.fewest, WAVES * self.concurrency)


async def _closed_loop(url: str, prompts: Sequence[Sequence[int]], load: Load) -> float:
    """Output tokens a second."""
    waiting = list(range(load.requests))
    sampling = {"temperature": load.temperature, "max_new_tokens": load.tokens}
    timeout = aiohttp.ClientTimeout(total=3600)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def worker() -> int:
            done = 0
            while waiting:
                prompt = list(prompts[waiting.pop() % len(prompts)])
                payload = {"input_ids": prompt, "sampling_params": sampling}
                async with session.post(f"{url}/generate", json=payload) as answer:
                    answer.raise_for_status()
                    done += (await answer.json())["meta_info"]["completion_tokens"]
            return done

        started = time.perf_counter()
        counts = await asyncio.gather(*(worker() for _ in range(load.concurrency)))
        return sum(counts) / (time.perf_counter() - started)


def width_rounds(url: str) -> dict[str, float]:
    """Batch rounds by width so far; empty for a server without speculation."""
    text = requests.get(f"{url}/metrics", timeout=30).text
    found = re.findall(rf'^{WIDTH_ROUNDS}{{.*width="(\d+)".*}} (\S+)$', text, re.MULTILINE)
    return {width: float(count) for width, count in found}


def measure(url: str, prompts: Sequence[Sequence[int]], load: Load) -> tuple[float, dict]:
    """Tokens a second, and rounds by width."""
    before = width_rounds(url)
    rate = asyncio.run(_closed_loop(url, prompts, load))
    after = width_rounds(url)
    return rate, {w: after[w] - before.get(w, 0) for w in after}


def servers_of(args: argparse.Namespace) -> dict[str, tuple[tuple[str, ...], dict[str, str]]]:
    """Arguments and environment of every server."""
    common = (*comparable_arguments(args.pool), "--enable-metrics", "--max-running-requests", "64")
    widths = {WIDTH: "adaptive"} | ({WIDTHS: args.widths} if args.widths else {})
    found = {
        TARGET: (common, {}),
        FULL: ((*common, *hyperdflash_arguments(args.draft)), {WIDTH: "full"}),
        ADAPTIVE: ((*common, *hyperdflash_arguments(args.draft)), widths),
    }
    if args.untrained:
        found[UNTRAINED] = ((*common, *hyperdflash_arguments(args.untrained)), widths)
    return found


def interleaved(names: Sequence[str], repeats: int) -> Iterator[tuple[str, bool]]:
    """All names in turn, each time the other way round; whether the pass counts: no first does.

    With an even number of ``repeats`` a machine that slows down does so for all alike.
    """
    for repeat in range(repeats + 1):
        for name in names if repeat % 2 else reversed(names):
            yield name, repeat > 0


def run_levels(
    args: argparse.Namespace, servers: Mapping[str, Server], prompts: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    """Every load of every server, in turn; one row each."""
    # What is compared stands side by side; target-only again is no nearer to itself.
    others = [name for name in servers if name == UNTRAINED]
    rows = []
    for temperature in args.temperature:
        for level in args.levels:
            load = Load(level, args.tokens, temperature)
            rates: dict[str, list[float]] = {}
            widths: dict[str, Counter[str]] = {}
            for name, counted in interleaved(
                [FULL, ADAPTIVE, TARGET, *others, AGAIN], args.repeats
            ):
                url = servers[TARGET if name == AGAIN else name].url
                rate, rounds = measure(url, prompts, load)
                if counted:
                    rates.setdefault(name, []).append(rate)
                    widths.setdefault(name, Counter()).update(rounds)
            for name, found in rates.items():
                row = {"temperature": temperature, "concurrency": level, "method": name}
                rows.append({**row, "tokens_per_s": found, "rounds_by_width": dict(widths[name])})
            said = ", ".join(f"{name} {median(found):.0f}" for name, found in rates.items())
            print(f"T {temperature:g}, c {level}: {said}", flush=True)
    return rows


def run_steps(args: argparse.Namespace, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """A load of 1, then 64, then 1 request; ``[start, requests, width]`` of every round."""
    with ExitStack() as stack:
        server, times = timed_server(args, stack, "steps", *servers_of(args)[ADAPTIVE])
        for concurrency in (1, 64, 1):
            load = Load(concurrency, args.tokens, 0.0, ALONE)
            asyncio.run(_closed_loop(server.url, prompts, load))
    rounds = [one for one in read_passes(times) if one.decoding]
    times.unlink()
    return [[one.start - rounds[0].start, one.requests, one.width] for one in rounds]


def timed_server(
    args: argparse.Namespace,
    stack: ExitStack,
    name: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
) -> tuple[Server, Path]:
    """A server that is up, and the file of its passes' times."""
    times = args.out / f"{name}.jsonl"
    times.unlink(missing_ok=True)
    environment = {**environment, ROUND_TIMES: str(times.resolve())}
    log = args.out / "logs" / f"{name}-timed.log"
    server = stack.enter_context(Server(args.target, *arguments, log=log, environment=environment))
    server.wait(1800)
    return server, times


def run_accounts(
    args: argparse.Namespace, prompts: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    """Where the time of each server goes at the loads of ``--account``, at temperature 0."""
    every = servers_of(args)
    chosen = {TARGET: every[TARGET], ONE: (every[ADAPTIVE][0], {WIDTH: "1"})} | every
    loads = []
    with ExitStack() as stack:
        servers = {
            name: timed_server(args, stack, name.replace(" ", "-"), *server)
            for name, server in chosen.items()
        }
        for level in args.account:
            load = Load(level, args.tokens, 0.0)
            methods: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
            for name, counted in interleaved(list(servers), args.repeats):
                server, times = servers[name]
                times.unlink(missing_ok=True)
                rate = asyncio.run(_closed_loop(server.url, prompts, load))
                if counted:
                    methods[name].append(account(read_passes(times), rate))
            loads.append({"concurrency": level, "methods": methods})
    for _, times in servers.values():
        times.unlink(missing_ok=True)
    return loads


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every line of a file with its place."""
    return ((f"{path}:{number}", entry) for number, entry in read_lines(path))


def read_prompts(target: str, paths: Sequence[Path], count: int) -> list[list[int]]:
    """Tokens of first turns in JSONL files of ``{"turns": [...]}`` or ``{"messages": [...]}``.

    The files' lines by turns, ``count`` in all.

    Raises:
        EvalError, JsonlError: a line without them, or no line. OSError: no file.
        HyperDFlashConfigError: no tokenizer.
    """
    tokenizer = load_tokenizer(target)
    prompts = []
    by_turns = chain.from_iterable(zip_longest(*map(_lines, paths)))
    for place, entry in islice(filter(None, by_turns), count):
        messages = entry.get("messages")
        if not messages:
            turns = turns_of(entry, place)
            messages = [{"role": "user", "content": turns[0]}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer.encode(text, add_special_tokens=False))
    if not prompts:
        raise EvalError(f"{' '.join(map(str, paths))} holds no prompt.")
    return prompts


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = Parser(prog="python -m eval.width_study", description=__doc__.splitlines()[0])
    add = found.add_argument
    add("--target", required=True, help="target folder or hub id")
    add("--draft", required=True, help="its drafter")
    add("--untrained", help="a drafter of random weights (default: none is measured)")
    files = "JSONL with turns or messages in each line"
    add("--prompts", required=True, type=Path, nargs="+", metavar="FILE", help=files)
    add("--num-prompts", type=int, default=64, help="prompts, the files' first by turns")
    add("--out", required=True, type=Path, help="new folder of results, report and plots")
    add("--levels", type=int, nargs="+", default=list(LEVELS), help="requests in flight")
    add("--temperature", type=float, nargs="+", default=[0.0, 1.0], help="of sampling")
    add("--repeats", type=int, default=4, help="counted passes of each server at each load")
    add("--tokens", type=int, default=128, help="new tokens of an answer at most")
    add("--pool", type=int, default=32768, help="K/V slots of every server")
    add("--widths", help=f"as {WIDTHS} (default: the server's)")
    add("--account", type=int, nargs="*", default=[16, 64], help="loads to account for in parts")
    add("--no-steps", action="store_true", help="leave the stepped load out")
    return found


def settings_of(args: argparse.Namespace, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """All that makes another study of another folder."""
    drafts = {name: getattr(args, name) for name in ("target", "draft", "untrained")}
    names = ("levels", "temperature", "repeats", "tokens", "pool", "widths", "account")
    return {
        **{name: value and location(value) for name, value in drafts.items()},
        **{name: getattr(args, name) for name in names},
        "prompts": short_hash(prompts),
        "steps": not args.no_steps,
    }


def study(args: argparse.Namespace, prompts: Sequence[Sequence[int]]) -> None:
    """Measure, and write ``results.json``, ``report.md`` and the plots."""
    content: dict[str, Any] = {"provenance": provenance()}
    with ExitStack() as stack:
        servers = {}
        for name, (arguments, environment) in servers_of(args).items():
            log = args.out / "logs" / f"{name.replace(' ', '-')}.log"
            server = Server(args.target, *arguments, log=log, environment=environment)
            servers[name] = stack.enter_context(server)
            server.wait(1800)
        content["rows"] = run_levels(args, servers, prompts)
    content |= {"accounts": [], "steps": []}
    write_report(args.out, content)  # what was measured stays, should a later part fail
    if args.account:
        content["accounts"] = run_accounts(args, prompts)
        write_report(args.out, content)
    if not args.no_steps:
        content["steps"] = run_steps(args, prompts)
    write_report(args.out, content)
    print(f"report: {args.out / 'report.md'}")


def main(argv: list[str] | None = None) -> int:
    """Run a study; 0, 2 for what the user must mend, 130 for Ctrl-C."""
    args = parser().parse_args(argv)
    try:
        prompts = read_prompts(args.target, args.prompts, args.num_prompts)
        with claim(args.out, KIND, settings_of(args, prompts)):
            study(args, prompts)
    except (*USER_ERRORS, aiohttp.ClientError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:
        print("stopped: the same command begins anew.", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
