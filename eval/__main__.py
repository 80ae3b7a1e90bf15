"""``python -m eval run``, ``serving`` and ``report``."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path

from eval.methods import KINDS, EvalError, parse_urls, resolve
from eval.prompts import BENCHMARKS, load
from eval.report import write
from eval.runner import Cell, Method, Plan, run, with_noise_floor
from eval.serving_study import Study
from eval.serving_study import run as run_study
from eval.suites import SUITES

DRAFTS = ("mtp_draft", "dflash_draft", "hyperdflash_draft", "dspark_draft")


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _add_common(add) -> None:
    """Options of ``run`` and ``serving``: which methods on which prompts."""
    add("--suite", choices=SUITES, help="defaults of every option for a known target")
    add("--target", help="target folder or hub id")
    add("--methods", type=_names, help=f"comma-separated, of {', '.join(KINDS)}")
    add("--benchmarks", type=_names, help=f"of {', '.join(BENCHMARKS)}; .jsonl files; hub:o/d/f")
    add("--num-prompts", type=int, help="of each benchmark")
    add("--max-new-tokens", type=int)
    add("--data-dir", type=Path, help="folder of NAME.jsonl benchmark files")
    add("--server-args", type=shlex.split, help="arguments of every server, one text")
    add("--threads", type=int, help="OpenMP threads of each server")
    for name in DRAFTS:
        add("--" + name.replace("_", "-"), help="folder or hub id")
    add("--out", type=Path, required=True)


def parser() -> argparse.ArgumentParser:
    """The command line (DESIGN, section 6)."""
    top = argparse.ArgumentParser(prog="python -m eval", description=__doc__)
    commands = top.add_subparsers(required=True, dest="command")
    one = commands.add_parser("run", help="measure, then report; run again to resume")
    add = one.add_argument
    _add_common(add)
    add("--temperature", type=float, nargs="+")
    add("--thinking", choices=("off", "on"), nargs="+")
    add("--thinking-args", type=json.loads, help="chat template arguments of thinking on, JSON")
    add("--concurrency", type=int, nargs="+")
    add("--rounds", type=int)
    add("--server", action="append", metavar="NAME=URL", help="use a running server")
    add("--one-at-a-time", action="store_true", help="one server up at a time, in turn each round")
    study = commands.add_parser("serving", help="load, latency and round costs, into OUT's report")
    add = study.add_argument
    _add_common(add)
    add("--levels", type=int, nargs="+", help="concurrency levels")
    add("--rates", type=float, nargs="+", help="Poisson arrivals, requests a second")
    add("--prompts-per-level", type=int, default=32)
    two = commands.add_parser("report", help="write the report of a run again")
    two.add_argument("--out", type=Path, required=True)
    return top


DEFAULTS = {
    "methods": ["target", "mtp3", "mtp6", "dflash6", "hyperdflash6"],
    "benchmarks": list(BENCHMARKS),
    "temperature": [0.0],
    "thinking": ["off"],
    "thinking_args": {"thinking": True},
    "concurrency": [1],
    "num_prompts": 80,
    "max_new_tokens": 1024,
    "rounds": 3,
    "server": [],
    "server_args": [],
}


def options_of(args: argparse.Namespace) -> dict:
    """Defaults, then the suite's, then what was given; raises ``EvalError``."""
    given = {k: v for k, v in vars(args).items() if v is not None}
    options = {**DEFAULTS, **(SUITES[args.suite]() if args.suite else {}), **given}
    if not options.get("target"):
        raise EvalError("--target is needed: the folder or hub id of the target.")
    for name in ("num_prompts", "max_new_tokens", "rounds"):
        if options[name] < 1:
            raise EvalError(f"--{name.replace('_', '-')} must be at least 1.")
    return options


def methods_of(options: dict) -> list[Method]:
    """The methods asked for; raises ``EvalError``."""
    drafts = {name: options.get(name) for name in DRAFTS}
    return resolve(options["methods"], drafts, parse_urls(options["server"]))


def study_of(args: argparse.Namespace) -> Study:
    """A checked serving study; raises ``EvalError``."""
    options = options_of(args)
    prompts = load(
        options.get("data_dir") or Path("."), options["benchmarks"], options["num_prompts"]
    )
    return Study(
        target=str(options["target"]),
        methods=tuple(methods_of(options)),
        # Benchmarks in turn, so that any number of requests is of all of them.
        prompts=[turns for group in zip(*prompts.values(), strict=False) for turns in group],
        levels=tuple(options.get("levels") or (1, 4, 16, 64)),
        rates=tuple(options.get("rates") or (1.0, 4.0)),
        prompts_per_level=options["prompts_per_level"],
        max_new_tokens=options["max_new_tokens"],
        server_args=tuple(options["server_args"]),
        out=options["out"],
        threads=options.get("threads"),
    )


def plan_of(args: argparse.Namespace) -> Plan:
    """A checked plan; raises ``EvalError``."""
    options = options_of(args)
    methods = methods_of(options)
    data_dir = options.get("data_dir") or Path(".")
    prompts = load(data_dir, options["benchmarks"], options["num_prompts"])
    cells = tuple(
        Cell(benchmark, temperature, thinking, concurrency)
        for concurrency in options["concurrency"]
        for thinking in options["thinking"]
        for temperature in options["temperature"]
        for benchmark in prompts
    )
    return Plan(
        target=str(options["target"]),
        methods=with_noise_floor(methods),
        prompts=prompts,
        cells=cells,
        rounds=options["rounds"],
        max_new_tokens=options["max_new_tokens"],
        out=options["out"],
        server_args=tuple(options["server_args"]),
        template_args={"on": options["thinking_args"], "off": options.get("plain_args", {})},
        together=not options["one_at_a_time"],
        threads=options.get("threads"),
    )


def main(argv: list[str] | None = None) -> int:
    """Run a command; 0, 1 when a unit failed, 2 for a command that cannot work."""
    args = parser().parse_args(argv)
    started = time.monotonic()

    def progress(number: int, total: int, round_index: int, cell: Cell, method: Method) -> None:
        minutes = (time.monotonic() - started) / 60
        where = f"round {round_index + 1}, {cell.folder}, {method.name}"
        print(f"[{number + 1}/{total}, {minutes:.1f} min] {where}", flush=True)

    try:
        failed = 0
        if args.command == "run":
            failed = run(plan_of(args), progress)
        elif args.command == "serving":
            run_study(study_of(args))
        content = write(args.out)
    except (EvalError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"report: {args.out / 'report.md'} and report.html ({len(content['rows'])} rows)")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
