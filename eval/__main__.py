"""``python -m eval run``, ``report``, ``serving``, ``width`` and ``fetch``."""

import argparse
import sys
from contextlib import nullcontext

from eval import fetch, report, runner, serving, width
from eval.errors import FAILED, INTERRUPTED, UNUSABLE, USER_ERRORS, one_line
from eval.identity import measure_gaps
from eval.options import parse, plan_of, study_of, width_plan_of
from sglang_hyperdflash.tools.ownership import claim, lock
from sglang_hyperdflash.tools.process_group import exit_on_signals
from sglang_hyperdflash.tools.provenance import provenance


def _write_report(args: argparse.Namespace) -> None:
    rows = report.write(args.out)["rows"]
    for row in rows:
        if row.get("error"):
            print(f"incomplete: {row['method']} on {row['benchmark']}: {row['error'][:200]}")
    print(f"report: {args.out / 'report.md'} ({len(rows)} rows)")


def _run(args: argparse.Namespace) -> int:
    plan = plan_of(args)
    with claim(plan.out, runner.KIND, plan.settings()):
        runner.write_run(plan)
        with runner.Servers(plan) as servers:
            failed = runner.run_units(plan, servers)
            reason = measure_gaps(plan, servers)
        if reason is not None:
            print(f"logit gaps of differing answers were not measured: {reason}")
        _write_report(args)
    return failed


def _width(args: argparse.Namespace) -> int:
    plan = width_plan_of(args)
    with claim(plan.out, width.KIND, plan.settings()):
        with runner.Servers(plan) as servers:
            failed = runner.run_units(plan, servers)
        width.write_report(plan.out, {"provenance": provenance(), "rows": width.rows_of(plan)})
    print(f"report: {args.out / 'report.md'}")
    return failed


def _serving(args: argparse.Namespace) -> None:
    study = study_of(args)
    report.read(args.out)  # refuses a folder without a run before an hour of work, not after it
    if (args.out / runner.RUN).is_file():
        serving.check_drafts(study, args.out)
    # The run's folder is locked too, because the report at the end is written there.
    with lock(args.out, runner.KIND), claim(study.plan.out, serving.KIND, study.settings()):
        serving.run(study)
        _write_report(args)


def _fetch(args: argparse.Namespace) -> None:
    with lock(args.out, fetch.KIND):
        fetch.fetch(args.out, args.benchmarks, args.copies)


def _report(args: argparse.Namespace) -> None:
    # A lock would create a missing folder, which the report is to refuse.
    with lock(args.out, runner.KIND) if args.out.exists() else nullcontext():
        _write_report(args)


# Each returns the number of units that failed, or None where there are none.
COMMANDS = {"run": _run, "report": _report, "serving": _serving, "width": _width, "fetch": _fetch}


@exit_on_signals()
def main(argv: list[str] | None = None) -> int:
    """Run a command; 0, 1 when a unit failed, 2 for what the user must fix, 130 for Ctrl-C."""
    try:
        args = parse(argv)
        return FAILED if COMMANDS[args.command](args) else 0
    except USER_ERRORS as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:
        print("stopped: run the same command again to resume.", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    raise SystemExit(main())
