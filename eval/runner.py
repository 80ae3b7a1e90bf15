"""Runs every cell with every method in interleaved rounds; each unit is a file, so a run resumes.

A unit is one method answering one cell's prompts once. It fails alone: its file then holds the
error, the others stay, and the next run tries it again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import requests

from eval.client import Sampling, converse, converse_all
from eval.methods import BASELINE, NOISE, EvalError, Method
from sglang_hyperdflash.tools.errors import ServerFailed
from sglang_hyperdflash.tools.provenance import provenance
from sglang_hyperdflash.tools.server_process import Server


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
    """A whole run; ``together`` keeps all servers up, else one at a time (one GPU)."""

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

    def digest(self) -> str:
        """Of all that must not change between two runs into one folder."""
        content = [self.target, self.prompts, self.max_new_tokens, self.server_args]
        content += [self.template_args, {m.name: [m.arguments, m.url] for m in self.methods}]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def unit(self, cell: Cell, method: str, round_index: int) -> Path:
        """The file of one unit."""
        return self.out / "units" / cell.folder / f"{method}-r{round_index}.json"


def with_noise_floor(methods: Sequence[Method]) -> tuple[Method, ...]:
    """The methods, and ``target`` once more on the same server: what noise alone gives."""
    target = next(m for m in methods if m.name == BASELINE)
    return (*methods, Method(NOISE, target.arguments, 0, target.url))


class Fleet:
    """Servers by their arguments: started on first use, again when they died, stopped at the end.

    Methods with equal arguments share one.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.running: dict[tuple[str, ...], Server] = {}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exception) -> None:
        for key in list(self.running):
            self.running.pop(key).stop()

    def url(self, method: Method) -> str:
        """The address of a method's server, up and warm; raises ``ServerFailed``."""
        if method.url is not None:
            return method.url
        key = method.arguments
        server = self.running.get(key)
        if server is not None and server.process.poll() is not None:
            self.running.pop(key).stop()
            server = None
        if server is None:
            if not self.plan.together:
                self.__exit__()
            log = self.plan.out / "logs" / f"{method.name}.log"
            arguments = (*self.plan.server_args, *method.arguments)
            server = Server(self.plan.target, *arguments, log=log, threads=self.plan.threads)
            self.running[key] = server
            try:
                server.wait()
                # The first request pays for lazy set-up.
                converse(server.url, ["Hello"], Sampling(0.0, 16))
            except BaseException:
                self.running.pop(key).stop()
                raise
        return server.url


def order(plan: Plan) -> Iterator[tuple[int, Cell, Method]]:
    """Units so that methods alternate as finely as the servers allow, the first in turn."""
    for round_index in range(plan.rounds):
        turn = round_index % len(plan.methods)
        methods = [*plan.methods[turn:], *plan.methods[:turn]]
        if plan.together:
            for cell in plan.cells:
                for method in methods:
                    yield round_index, cell, method
        else:
            for method in methods:
                for cell in plan.cells:
                    yield round_index, cell, method


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content))
    partial.replace(path)


def _claim(plan: Plan) -> None:
    """Write ``run.json``, or refuse a folder that holds another run."""
    path = plan.out / "run.json"
    if path.is_file():
        found = json.loads(path.read_text())["digest"]
        if found != plan.digest():
            raise EvalError(
                f"{plan.out} holds a run with other prompts, methods or options; choose another "
                "--out, or repeat that run's command to resume it."
            )
        return
    content = {"digest": plan.digest(), "rounds": plan.rounds, "provenance": provenance()}
    content["methods"] = [asdict(method) for method in plan.methods]
    content["cells"] = [asdict(cell) for cell in plan.cells]
    content["max_new_tokens"] = plan.max_new_tokens
    content["server_args"] = list(plan.server_args)
    _write(path, content)


def finished(path: Path) -> bool:
    """Whether a unit is there and did not fail."""
    return path.is_file() and "error" not in json.loads(path.read_text())


def run_unit(plan: Plan, fleet: Fleet, cell: Cell, method: Method) -> dict[str, Any]:
    """One unit's content: answers and wall seconds, or the error."""
    template = plan.template_args.get(cell.thinking, {})
    sampling = Sampling(cell.temperature, plan.max_new_tokens, template)
    try:
        url = fleet.url(method)
        answers, seconds = converse_all(
            url, plan.prompts[cell.benchmark], sampling, cell.concurrency
        )
    except (requests.RequestException, ServerFailed) as error:
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
    return {"seconds": seconds, "answers": [answer.as_json() for answer in answers]}


def run(plan: Plan, progress=None) -> int:
    """Run what is not there yet; returns the number of units that failed.

    Args:
        progress: called before each unit with (number, total, round, cell, method).
    """
    _claim(plan)
    units = [u for u in order(plan) if not finished(plan.unit(u[1], u[2].name, u[0]))]
    failed = 0
    with Fleet(plan) as fleet:
        for number, (round_index, cell, method) in enumerate(units):
            if progress is not None:
                progress(number, len(units), round_index, cell, method)
            content = run_unit(plan, fleet, cell, method)
            failed += "error" in content
            _write(plan.unit(cell, method.name, round_index), content)
    return failed
