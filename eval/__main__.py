"""``python -m eval run``, ``serving``, ``report`` and ``fetch``."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from contextlib import nullcontext
from typing import Any

from eval import fetch, runner, serving_study
from eval.errors import FAILED, INTERRUPTED, UNUSABLE, USER_ERRORS, one_line
from eval.identity import measure_gaps
from eval.methods import Method
from eval.options import parser, plan_of, study_of
from eval.report import read, write
from eval.runner import Cell
from sglang_hyperdflash.tools.ownership import claim, lock


def _terminated(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)  # so that servers are stopped on the way out


def _report(args: argparse.Namespace) -> None:
    content = write(args.out)
    for row in (row for row in content["rows"] if row.get("error")):
        print(f"incomplete: {row['method']} on {row['benchmark']}: {row['error'][:200]}")
    print(f"report: {args.out / 'report.md'} and report.html ({len(content['rows'])} rows)")


def _run(args: argparse.Namespace) -> int:
    plan = plan_of(args)
    started = time.monotonic()

    def progress(number: int, total: int, round_index: int, cell: Cell, method: Method) -> None:
        minutes = (time.monotonic() - started) / 60
        where = f"round {round_index + 1}, {cell.folder}, {method.name}"
        print(f"[{number + 1}/{total}, {minutes:.1f} min] {where}", flush=True)

    with claim(plan.out, runner.KIND, plan.settings()):
        runner.write_run(plan)
        with runner.Servers(plan) as servers:
            failed = runner.run_units(plan, servers, progress)
            missing = measure_gaps(plan, servers)
        if missing is not None:
            print(f"logit gaps of differing answers were not measured: {missing}")
        _report(args)
    return FAILED if failed else 0


def _serving(args: argparse.Namespace) -> int:
    study = study_of(args)
    read(args.out)  # refuses a folder without a run before an hour of work, not after it
    if (run_file := args.out / runner.RUN).is_file():
        measured = runner.read_run(args.out).get("identities", {})
        serving_study.check_identities(study.methods, measured, run_file)
    # The report at its end is written into the run's folder, so that is held as well.
    with (
        lock(args.out, runner.KIND),
        claim(study.out, serving_study.KIND, study.settings()),
    ):
        serving_study.run(study)
        _report(args)
    return 0


def _fetch(args: argparse.Namespace) -> int:
    names = args.benchmarks or list(fetch.SOURCES)
    with lock(args.out, fetch.KIND):
        fetch.fetch(args.out, names, args.copies)
    return 0


def _report_again(args: argparse.Namespace) -> int:
    # A lock makes its folder: where none is, the report refuses without one.
    held = lock(args.out, runner.KIND) if args.out.exists() else nullcontext()
    with held:
        _report(args)
    return 0


COMMANDS = {"run": _run, "serving": _serving, "fetch": _fetch, "report": _report_again}


def main(argv: list[str] | None = None) -> int:
    """Run a command; 0, 1 when a unit failed, 2 for what the user must mend, 130 for Ctrl-C."""
    args = parser().parse_args(argv)
    try:
        return COMMANDS[args.command](args)
    except USER_ERRORS as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:
        print("stopped: the same command goes on where this one ended.", file=sys.stderr)
        return INTERRUPTED


def entry(argv: list[str] | None = None) -> int:
    """:func:`main` as a process of its own: a SIGTERM stops its servers, too."""
    signal.signal(signal.SIGTERM, _terminated)
    return main(argv)


if __name__ == "__main__":
    raise SystemExit(entry())
