"""Runs every cell with every method in interleaved rounds; each unit is a file, so a run resumes.

A unit holds one method's answers to the prompts of one cell in one round. A unit fails alone: its
file then holds the error, the other units are kept, and the next run measures it again. Every file
carries a checksum: a truncated or changed file counts as missing.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import requests

from eval import rivals
from eval.client import Sampling, converse, converse_all
from eval.errors import EvalError, one_line
from eval.methods import BASELINE, NOISE, Method
from sglang_hyperdflash.tools.atomic import write_json
from sglang_hyperdflash.tools.checksum import short_hash
from sglang_hyperdflash.tools.errors import ServerFailed
from sglang_hyperdflash.tools.ownership import location
from sglang_hyperdflash.tools.provenance import provenance, published
from sglang_hyperdflash.tools.server_process import Server

KIND = "python -m eval run"
RUN, UNITS = "run.json", "units"
# ``seconds`` (wall clock) and ``answers`` (fields of ``client.Answer``), or ``error``.
Unit = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One benchmark in one setting; every method answers its prompts."""

    benchmark: str
    temperature: float
    thinking: str  # a key of Plan.template_args: "on" or "off"
    concurrency: int  # requests in flight

    @property
    def folder(self) -> str:
        """The name of its folder of units."""
        return f"{self.benchmark}-t{self.temperature:g}-{self.thinking}-c{self.concurrency}"


@dataclass(frozen=True)
class Plan:
    """What a run measures, and how its servers are started."""

    target: str  # folder or hub id
    methods: tuple[Method, ...]
    prompts: dict[str, list[list[str]]]  # user turns of every conversation, by benchmark
    cells: tuple[Cell, ...]
    rounds: int
    max_new_tokens: int  # of each turn
    out: Path
    server_args: tuple[str, ...] = ()
    template_args: dict[str, dict[str, Any]] = field(default_factory=dict)  # by thinking mode
    together: bool = True  # all servers stay up; False: one at a time, for a single GPU
    threads: int | None = 1  # OpenMP threads of a server; None: the environment's
    start_minutes: float = 15.0  # how long a server may take to answer its first request

    def settings(self) -> dict[str, Any]:
        """All that must not change between two runs into one folder, prompts as hashes."""
        return {
            "target": location(self.target),
            "methods": {m.name: m.identity() for m in self.methods},
            "prompts": {name: short_hash(turns) for name, turns in self.prompts.items()},
            "prompts of each benchmark": {n: len(turns) for n, turns in self.prompts.items()},
            "cells": [cell.folder for cell in self.cells],
            "rounds": self.rounds,
            "max_new_tokens": self.max_new_tokens,
            "server_args": list(self.server_args),
            "template_args": self.template_args,
            "one server at a time": not self.together,
            "threads": self.threads,
        }

    def sampling(self, cell: Cell) -> Sampling:
        """How the prompts of a cell are answered."""
        template_args = self.template_args.get(cell.thinking, {})
        return Sampling(cell.temperature, self.max_new_tokens, template_args)


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Write JSON with a hash of itself, which :func:`read_sealed` checks."""
    write_json(path, content | {"checksum": short_hash(content)}, indent=1)


def read_sealed(path: Path) -> dict[str, Any] | None:
    """What :func:`write_sealed` wrote; None when the file is missing, truncated or changed."""
    try:
        content = json.loads(path.read_bytes())
        checksum = content.pop("checksum")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return content if checksum == short_hash(content) else None


def unit_path(out: Path, cell: Cell, method: str, round_index: int) -> Path:
    """The file of one unit of a run's folder."""
    return out / UNITS / cell.folder / f"{method}-r{round_index}.json"


def read_units(out: Path, cell: Cell, method: str, rounds: int) -> list[Unit | None]:
    """A method's units of one cell by round; None where the file is missing or damaged."""
    return [read_sealed(unit_path(out, cell, method, i)) for i in range(rounds)]


def is_whole(unit: Unit | None) -> bool:
    """Whether a unit was measured and did not fail."""
    return unit is not None and "error" not in unit


def with_noise_floor(methods: Sequence[Method]) -> tuple[Method, ...]:
    """The methods and the baseline once more on the same server, to measure the noise."""
    baseline = next(method for method in methods if method.name == BASELINE)
    return (*methods, replace(baseline, name=NOISE))


class Servers(AbstractContextManager):
    """Servers of methods: started on first use, restarted when they died, stopped at the end.

    Methods with equal arguments and environment share one.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.running: dict[tuple[tuple[Any, ...], ...], Server] = {}

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop every running server."""
        for key in list(self.running):
            self.running.pop(key).stop()

    def url(self, method: Method) -> str:
        """The address of a method's server, started and warm; raises ``ServerFailed``."""
        if method.url is not None:
            return method.url
        # Methods may differ in their environment alone, for example in the verify width.
        key = (method.arguments, method.environment)
        if key in self.running and self.running[key].process.poll() is not None:
            self.running.pop(key).stop()
        if key not in self.running:
            if not self.plan.together:
                self.stop()
            arguments = (self.plan.target, *self.plan.server_args, *method.arguments)
            environment = rivals.environment(method.arguments) | dict(method.environment)
            log = self.plan.out / "logs" / f"{method.name}.log"
            options = {"log": log, "threads": self.plan.threads, "environment": environment}
            self.running[key] = server = Server(*arguments, **options)
            try:
                server.wait(60 * self.plan.start_minutes)
                # The first request pays for lazy set-up.
                converse(server.url, ["Hello"], Sampling(0.0, 16))
            except BaseException:
                self.running.pop(key).stop()
                raise
        return self.running[key].url


def order(plan: Plan) -> Iterator[tuple[int, Cell, Method, Path]]:
    """Round, cell, method and file of every unit, in the order in which they are measured.

    Methods alternate as finely as the servers allow, and every round starts with another one.
    """
    for round_index in range(plan.rounds):
        first = round_index % len(plan.methods)
        methods = [*plan.methods[first:], *plan.methods[:first]]
        pairs = [(cell, method) for cell in plan.cells for method in methods]
        if not plan.together:  # all cells of one method, then all of the next
            pairs.sort(key=lambda pair: methods.index(pair[1]))
        for cell, method in pairs:
            yield round_index, cell, method, unit_path(plan.out, cell, method.name, round_index)


def write_run(plan: Plan) -> None:
    """Write ``run.json``, which the report reads, unless an intact one exists."""
    if read_sealed(plan.out / RUN) is not None:
        return
    methods = [replace(m, arguments=tuple(published(m.arguments))) for m in plan.methods]
    content = {
        "rounds": plan.rounds,
        "provenance": provenance(),
        "methods": [asdict(method) for method in methods],
        "identities": {method.name: method.identity() for method in plan.methods},
        "cells": [asdict(cell) for cell in plan.cells],
        "prompts": {name: len(turns) for name, turns in plan.prompts.items()},
        "max_new_tokens": plan.max_new_tokens,
        "server_args": published(plan.server_args),
    }
    write_sealed(plan.out / RUN, content)


def read_run(out: Path) -> dict[str, Any]:
    """``run.json`` of a run's folder; raises ``EvalError`` where it is missing or damaged."""
    content = read_sealed(out / RUN)
    if content is None:
        state = "is damaged" if (out / RUN).is_file() else "is missing"
        raise EvalError(
            f"{out} holds no whole run: {out / RUN} {state}. Give --out the folder of an "
            "`eval run`, or repeat that run's command (what it measured is kept)."
        )
    return content


def run_units(plan: Plan, servers: Servers) -> int:
    """Measure the units that are not finished yet; return how many of them failed.

    Raises ``WriteFailed`` for a full disk; what was measured before is kept.
    """
    pending = [entry for entry in order(plan) if not is_whole(read_sealed(entry[-1]))]
    failed, started = 0, time.monotonic()
    for number, (round_index, cell, method, path) in enumerate(pending, start=1):
        progress = f"{number}/{len(pending)}, {(time.monotonic() - started) / 60:.1f} min"
        print(f"[{progress}] round {round_index + 1}, {cell.folder}, {method.name}", flush=True)
        prompts, sampling = plan.prompts[cell.benchmark], plan.sampling(cell)
        try:
            url = servers.url(method)
            answers, seconds = converse_all(url, prompts, sampling, cell.concurrency)
            unit = {"seconds": seconds, "answers": [asdict(answer) for answer in answers]}
        except (requests.RequestException, ServerFailed) as error:
            unit = {"error": f"{type(error).__name__}: {one_line(error)}"[:2000]}
            failed += 1
        write_sealed(path, unit)
    return failed
