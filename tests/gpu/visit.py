"""A visit to a GPU, a step a command: ``python -m tests.gpu.visit --only STEP``; ``--plan`` first.

Steps come in the order of what they tell for their minutes. Each ends by itself at its limit; then
``visit.json`` has what it found, added to that of the other steps of the same commit. Nothing is
installed. The command fails when a check did. ``--small`` walks the same steps on a CPU with the
tests' small DeepSeek-V4.
"""

import argparse
import importlib
import json
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sglang_hyperdflash.tools.atomic import write_json
from sglang_hyperdflash.tools.provenance import provenance

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "eval" / "results" / "gpu"
MINUTES = 30
V4 = "FP8 or FP4 weights, more than one GPU, attention data parallelism, prefix hits"


class Step(NamedTuple):
    """A function of the same name in ``module``, and what a reader of its result must know.

    Attributes:
        seconds: after which it is ended. not_covered: what it does not cover.
    """

    module: str
    seconds: int
    not_covered: str


# The first three need torch and Triton alone, no server and no SGLang.
STEPS = {
    "kernels": Step("tests.gpu.kernels", 240, "whole rounds"),
    "kernel_tests": Step("tests.gpu.kernels", 180, "whole rounds"),
    "bench": Step("tests.gpu.kernels", 300, "a served round's time"),
    "tiny": Step("tests.gpu.steps", 470, "DeepSeek-V4"),
    "residual": Step("tests.gpu.steps", 470, f"FA3, {V4}"),
    "windowed": Step("tests.gpu.steps", 470, V4),
    "widths": Step("tests.gpu.steps", 470, V4),
    "poison": Step("tests.gpu.steps", 470, V4),
    "trace": Step("tests.gpu.steps", 300, V4),
    "sampled": Step("tests.gpu.steps", 300, V4),
    "million": Step("tests.gpu.steps", 470, f"whether answers at that length are right, {V4}"),
}
WITHOUT_SERVERS = tuple(name for name, step in STEPS.items() if step.module != "tests.gpu.steps")


@dataclass
class Notes:
    out: Path  # for results that stay
    gpu: bool = True  # whether kernels, graphs and traces are there
    measured: dict[str, Any] = field(default_factory=dict)  # by name
    failed: list[str] = field(default_factory=list)  # checks that did not hold, as sentences

    def check(self, holds: bool, sentence: str) -> None:
        if not holds:
            self.failed.append(sentence)


class OutOfTime(BaseException):
    """A step's limit; no handler of errors may take it for one of its own."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise ``OutOfTime`` in this block after so many seconds, whatever it waits for."""

    def end(*_: Any) -> None:
        raise OutOfTime(f"not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def function_of(name: str) -> Callable[[Any], None]:
    """A step's function; what it needs is imported now."""
    return getattr(importlib.import_module(STEPS[name].module), name)


def earlier(path: Path, report: dict) -> dict:
    """The steps that a file has of the same commit, device and stage."""
    if not path.is_file():
        return {}
    before = json.loads(path.read_text())

    def kind(of: dict) -> tuple:
        return of["small"], of["provenance"]["commit"], of["provenance"]["device"]

    return before["steps"] if kind(before) == kind(report) else {}


def run(
    names: list[str],
    notes_of: Callable[[str], Notes],
    out: Path,
    small: bool = False,
    minutes: float = MINUTES,
    clock: Callable[[], float] = time.monotonic,
) -> dict:
    """Walk steps; ``visit.json`` is written after each. One that might not end in time is left out.

    Returns:
        The report, with what was there before.
    """
    report: dict[str, Any] = {"provenance": provenance(), "small": small}
    path, end = out / "visit.json", clock() + 60 * minutes
    report["steps"] = earlier(path, report)
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        step, begun = STEPS[name], clock()
        if begun + step.seconds > end:
            print(f"{name}: not run, {end - begun:.0f} s are left of its {step.seconds}")
            report["steps"].setdefault(name, {"not run": "no time was left"})
            continue
        notes = notes_of(name)
        try:
            with at_most(step.seconds):
                function = function_of(name)
                print(f"{name}: {function.__doc__.splitlines()[0]}", flush=True)
                function(notes)
        except (Exception, OutOfTime) as error:
            notes.failed.append(f"{type(error).__name__}: {error}"[:2000])
            traceback.print_exc()
        took = {"seconds": round(clock() - begun, 1), "does not cover": step.not_covered}
        report["steps"][name] = took | {"failed": notes.failed, "measured": notes.measured}
        write_json(path, report, indent=1)
        print(json.dumps(report["steps"][name], indent=1), flush=True)
    write_json(path, report, indent=1)
    return report


def plan(out: Path) -> Iterator[str]:
    """What to call, one line a call: for how long, and what it does not show."""
    for name, step in STEPS.items():
        limits = f"at most {step.seconds} s; does not cover {step.not_covered}"
        yield f"python3 -m tests.gpu.visit --out {out} --only {name}    # {limits}"


def main(arguments: list[str] | None = None) -> int:
    """0 when every check held, 1 when one did not, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.visit", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results")
    parser.add_argument("--only", nargs="+", choices=STEPS, help="some of the steps")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of the whole command")
    parser.add_argument("--plan", action="store_true", help="print the commands of a visit")
    parser.add_argument("--small", action="store_true", help="on a CPU, with a small target")
    args = parser.parse_args(arguments)
    if args.plan:
        print("\n".join(plan(args.out)))
        return 0
    if not args.small and not torch.cuda.is_available():
        parser.exit(2, "no CUDA device is visible; --small walks the same steps on a CPU.\n")
    with tempfile.TemporaryDirectory() as name:
        names, folder = args.only or list(STEPS), Path(name)
        if set(names) <= set(WITHOUT_SERVERS):
            given = names, lambda _: Notes(args.out, not args.small)
            report = run(*given, args.out, args.small, args.minutes)
        else:
            from tests.gpu.steps import walk

            report = walk(names, folder, args.out, args.small, args.minutes)
    return int(any(report["steps"][name].get("failed") for name in names))


if __name__ == "__main__":
    sys.exit(main())
