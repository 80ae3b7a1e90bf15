"""Runs every cell with every method in interleaved rounds; each unit is a file, so a run resumes.

A unit is one method answering one cell's prompts once. It fails alone: its file then holds the
error, the others stay, and the next run tries it again. A unit's file carries a checksum: one that
is cut or changed is measured again.
"""

from __future__ import annotations

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
from sglang_hyperdflash.tools.provenance import provenance, without_machine
from sglang_hyperdflash.tools.server_process import Server

KIND = "python -m eval run"
RUN, UNITS, DIFFERENCES = "run.json", "units", "differences.json"


@dataclass(frozen=True)
class Cell:
    """What every method answers alike."""

    benchmark: str
    temperature: float
    thinking: str
    concurrency: int

    @property
    def folder(self) -> str:
        """Its folder of units."""
        return f"{self.benchmark}-t{self.temperature:g}-{self.thinking}-c{self.concurrency}"


@dataclass(frozen=True)
class Plan:
    """A whole run; ``together`` keeps all servers up, else one at a time (one GPU).

    start_minutes: how long a server may take to answer its first request.
    """

    target: str
    methods: tuple[Method, ...]
    prompts: dict[str, list[list[str]]]
    cells: tuple[Cell, ...]
    rounds: int
    max_new_tokens: int
    out: Path
    server_args: tuple[str, ...] = ()
    template_args: dict[str, dict[str, Any]] = field(default_factory=dict)
    together: bool = True
    threads: int | None = 1
    start_minutes: float = 15.0

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
        """How a cell's prompts are answered."""
        template = self.template_args.get(cell.thinking, {})
        return Sampling(cell.temperature, self.max_new_tokens, template)

    def unit(self, cell: Cell, method: str, round_index: int) -> Path:
        """The file of one unit."""
        return unit_path(self.out, cell, method, round_index)


def unit_path(out: Path, cell: Cell, method: str, round_index: int) -> Path:
    """The file of one unit of a run's folder."""
    return out / UNITS / cell.folder / f"{method}-r{round_index}.json"


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Write JSON with a hash of itself, which :func:`read_sealed` checks."""
    write_json(path, content | {"checksum": short_hash(content)}, indent=1)


def read_sealed(path: Path) -> dict[str, Any] | None:
    """What :func:`write_sealed` wrote; None when it is missing, cut or changed."""
    try:
        content = json.loads(path.read_bytes())
        checksum = content.pop("checksum")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return content if checksum == short_hash(content) else None


def is_whole(unit: dict[str, Any] | None) -> bool:
    """Whether a unit was measured and did not fail."""
    return unit is not None and "error" not in unit


def with_noise_floor(methods: Sequence[Method]) -> tuple[Method, ...]:
    """The methods, and the baseline once more on the same server: what noise alone gives."""
    baseline = next(m for m in methods if m.name == BASELINE)
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
        """Stop all that run."""
        for key in list(self.running):
            self.running.pop(key).stop()

    def url(self, method: Method) -> str:
        """The address of a method's server, up and warm; raises ``ServerFailed``."""
        if method.url is not None:
            return method.url
        # The verify width is set by environment alone: equal arguments are not one server yet.
        key = (method.arguments, method.environment)
        server = self.running.get(key)
        if server is not None and server.process.poll() is not None:
            self.running.pop(key).stop()
            server = None
        if server is None:
            if not self.plan.together:
                self.stop()
            server = Server(
                self.plan.target,
                *self.plan.server_args,
                *method.arguments,
                log=self.plan.out / "logs" / f"{method.name}.log",
                threads=self.plan.threads,
                environment=rivals.environment(method.arguments) | dict(method.environment),
            )
            self.running[key] = server
            try:
                server.wait(60 * self.plan.start_minutes)
                # The first request pays for lazy set-up.
                converse(server.url, ["Hello"], Sampling(0.0, 16))
            except BaseException:
                self.running.pop(key).stop()
                raise
        return server.url


def order(plan: Plan) -> Iterator[tuple[int, Cell, Method]]:
    """Units so that methods alternate as finely as the servers allow, each first in turn."""
    for round_index in range(plan.rounds):
        turn = round_index % len(plan.methods)
        methods = [*plan.methods[turn:], *plan.methods[:turn]]
        if plan.together:
            yield from ((round_index, cell, method) for cell in plan.cells for method in methods)
        else:
            yield from ((round_index, cell, method) for method in methods for cell in plan.cells)


def write_run(plan: Plan) -> None:
    """Write ``run.json``, what the report says of the run, unless it is there and whole."""
    path = plan.out / RUN
    if read_sealed(path) is not None:
        return

    def shown(words: Sequence[str]) -> list[str]:
        return [without_machine(word) for word in words]

    content = {
        "rounds": plan.rounds,
        "provenance": provenance(),
        "methods": [asdict(m) | {"arguments": shown(m.arguments)} for m in plan.methods],
        "identities": {method.name: method.identity() for method in plan.methods},
        "cells": [asdict(cell) for cell in plan.cells],
        "prompts": {name: len(turns) for name, turns in plan.prompts.items()},
        "max_new_tokens": plan.max_new_tokens,
        "server_args": shown(plan.server_args),
    }
    write_sealed(path, content)


def _finished(plan: Plan, cell: Cell, method: Method, round_index: int) -> bool:
    """Whether a unit is there, whole, and did not fail."""
    unit = read_sealed(plan.unit(cell, method.name, round_index))
    return is_whole(unit) and len(unit["answers"]) == len(plan.prompts[cell.benchmark])


def _run_unit(plan: Plan, servers: Servers, cell: Cell, method: Method) -> dict[str, Any]:
    """One unit's content: answers and wall seconds, or the error."""
    prompts, sampling = plan.prompts[cell.benchmark], plan.sampling(cell)
    try:
        url = servers.url(method)
        answers, seconds = converse_all(url, prompts, sampling, cell.concurrency)
    except (requests.RequestException, ServerFailed) as error:
        return {"error": f"{type(error).__name__}: {one_line(error)}"[:2000]}
    return {"seconds": seconds, "answers": [asdict(answer) for answer in answers]}


def run_units(plan: Plan, servers: Servers) -> int:
    """Run what is not there yet, with a line of progress for each unit.

    Returns:
        The number of units that failed.

    Raises:
        WriteFailed: the disk is full; what was measured before is whole.
    """
    units = [(r, cell, m) for r, cell, m in order(plan) if not _finished(plan, cell, m, r)]
    failed, started = 0, time.monotonic()
    for number, (round_index, cell, method) in enumerate(units, start=1):
        place = f"{number}/{len(units)}, {(time.monotonic() - started) / 60:.1f} min"
        print(f"[{place}] round {round_index + 1}, {cell.folder}, {method.name}", flush=True)
        content = _run_unit(plan, servers, cell, method)
        failed += "error" in content
        write_sealed(plan.unit(cell, method.name, round_index), content)
    return failed


def read_run(out: Path) -> dict[str, Any]:
    """``run.json`` of a run's folder.

    Raises:
        EvalError: the folder holds no run, or the file is damaged.
    """
    content = read_sealed(out / RUN)
    if content is None:
        state = "is damaged" if (out / RUN).is_file() else "is missing"
        raise EvalError(
            f"{out} holds no whole run: {out / RUN} {state}. Give --out the folder of an "
            "`eval run`, or repeat that run's command (what it measured is kept)."
        )
    return content
