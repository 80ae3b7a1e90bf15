"""The command line of ``python -m eval``, its defaults, and the plans that it describes."""

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from itertools import chain, product, zip_longest
from pathlib import Path
from typing import Any

from eval import width
from eval.errors import EvalError
from eval.methods import KINDS, Method, parse_urls, resolve
from eval.prompts import BENCHMARKS, load
from eval.runner import Cell, Plan, with_noise_floor
from eval.serving import FOLDER, Study
from sglang_hyperdflash.tools.command_line import Parser
from sglang_hyperdflash.tools.server_process import add_key_option, comparable_arguments

DRAFTS = tuple(dict.fromkeys(kind.draft_option for kind in KINDS.values() if kind.draft_option))
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "tiny_deepseek_v4"
# Every way to draft six tokens on the tiny DeepSeek-V4. The prompts are three benchmarks and what
# examples/tiny_deepseek_v4/exchange_prompts.py writes.
TINY = {
    "target": str(EXAMPLE / "target"),
    "methods": "baseline,mtp6,dflash6,dspark-style,dflash2-style,hyperdflash6,hyperdflash2",
    "mtp_draft": str(EXAMPLE / "mtp"),
    "dflash_draft": str(EXAMPLE / "dflash"),
    "dspark_style_draft": str(EXAMPLE / "dspark_style"),
    "dflash2_style_draft": str(EXAMPLE / "dflash2_style"),
    "hyperdflash_draft": str(EXAMPLE / "hyperdflash"),
    "hyperdflash2_draft": str(EXAMPLE / "drafter"),
    "benchmarks": "gsm8k,humaneval,mt-bench,"
    + ",".join(f"build/held_out/{kind}.jsonl" for kind in ("math", "code", "chat")),
    "temperature": [0.0, 1.0],
    "num_prompts": 20,
    "max_new_tokens": 64,
    "threads": 1,
    "server_args": shlex.join(("--mem-fraction-static", "0.1", *comparable_arguments(8192))),
}
SUITES: Mapping[str, Mapping[str, Any]] = {"tiny": TINY}
OUT = {"type": Path, "required": True}
COUNTS = ("num_prompts", "max_new_tokens", "rounds", "prompts_per_level", "concurrency", "levels")
SMALLEST = dict.fromkeys(COUNTS, 1) | {"temperature": 0, "start_minutes": 0.01, "rates": 0.001}


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _add_servers(parser: argparse.ArgumentParser, server_args: str = "") -> None:
    """Options of every command that starts servers."""
    add = parser.add_argument
    text = f"comma-separated, of {', '.join(BENCHMARKS)}; .jsonl files; hub:owner/dataset/file"
    add("--target", help="target folder or hub id (default: the suite's; needed without one)")
    add("--benchmarks", type=_names, default=",".join(BENCHMARKS), help=text)
    add("--num-prompts", type=int, default=80, help="prompts drawn from each benchmark")
    add("--max-new-tokens", type=int, default=1024, help="tokens a turn")
    add("--data-dir", type=Path, default=Path("."), help="folder of NAME.jsonl benchmark files")
    text = f"arguments of every server, as one text{'' if server_args else ' (default: none)'}"
    add("--server-args", type=shlex.split, default=server_args, help=text)
    add("--threads", type=int, help="OpenMP threads of a server (default: the environment's)")
    add_key_option(parser)
    add("--start-minutes", type=float, default=15.0, help="how long a server may take to start")


def _add_methods(parser: argparse.ArgumentParser) -> None:
    """Options of ``run`` and ``serving``: which methods with which drafts."""
    add = parser.add_argument
    add("--suite", choices=SUITES, help="other defaults, of a known comparison (default: none)")
    text = f"comma-separated, of {', '.join(KINDS)}"
    add("--methods", type=_names, default="baseline,mtp3,mtp6,dflash6,hyperdflash6", help=text)
    required = {kind.draft_option for kind in KINDS.values() if kind.draft_required}
    for name in DRAFTS:
        default = "none; its method needs one" if name in required else "the one in the target"
        add(f"--{name.replace('_', '-')}", help=f"folder or hub id (default: {default})")


def _add_run(parser: argparse.ArgumentParser) -> None:
    _add_servers(parser)
    _add_methods(parser)
    add = parser.add_argument
    add("--temperature", type=float, nargs="+", default=[0.0], help="temperatures")
    add("--thinking", choices=("off", "on"), nargs="+", default=["off"], help="thinking modes")
    text = "chat template arguments of thinking on, as JSON"
    add("--thinking-args", type=json.loads, default='{"thinking": true}', help=text)
    add("--concurrency", type=int, nargs="+", default=[1], help="requests in flight")
    add("--rounds", type=int, default=3, help="interleaved rounds")
    text = "use a running server; may be repeated (default: start one for each method)"
    add("--server", action="append", default=[], metavar="NAME=URL", help=text)
    text = "keep one server up at a time, in turn each round: one GPU (default: all at once)"
    add("--one-at-a-time", action="store_true", help=text)
    add("--out", **OUT, help="folder of the run; new, empty, or this run's own")


def _add_serving(parser: argparse.ArgumentParser) -> None:
    _add_servers(parser)
    _add_methods(parser)
    add = parser.add_argument
    add("--levels", type=int, nargs="+", default=[1, 4, 16, 64], help="requests in flight")
    add("--rates", type=float, nargs="+", default=[1.0, 4.0], help="Poisson requests a second")
    text = "requests of each load; at least 4 x its level"
    add("--prompts-per-level", type=int, default=32, help=text)
    text = f"folder of a finished `run`; the study is written to its {FOLDER}/"
    add("--out", **OUT, help=text)


def _add_width(parser: argparse.ArgumentParser) -> None:
    arguments = (*comparable_arguments(32768), "--max-running-requests", "64")
    _add_servers(parser, shlex.join(arguments))
    add = parser.add_argument
    add("--draft", required=True, help="the drafter's folder")
    add("--untrained", help="a drafter of random weights (default: none is measured)")
    add("--levels", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="concurrency")
    add("--temperature", type=float, nargs="+", default=[0.0, 1.0], help="temperatures")
    add("--rounds", type=int, default=5, help="interleaved rounds, of which the first is a warm-up")
    add("--out", **OUT, help="folder of the study; new, empty, or this study's own")
    parser.set_defaults(num_prompts=12, max_new_tokens=64)


def _add_fetch(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--benchmarks", type=_names, default=",".join(BENCHMARKS), help="comma-separated")
    text = "read NAME/ data sets of datasets.save_to_disk in this folder (default: the hub)"
    add("--copies", type=Path, help=text)
    add("--out", **OUT, help="folder for NAME.jsonl; existing files are kept")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", **OUT, help="folder of a run, or of its results.json alone")


def parser(suite: Mapping[str, Any] | None = None) -> argparse.ArgumentParser:
    """The command line; ``suite``: other defaults of ``run`` and ``serving``."""
    top = Parser(prog="python -m eval", description="Compare HYPERDFLASH with other methods.")
    commands = top.add_subparsers(required=True, dest="command", metavar="COMMAND")
    for name, add_options, text in (
        ("run", _add_run, "measure, then report; run again to resume"),
        ("serving", _add_serving, "throughput and latency under load, into a run's report"),
        ("width", _add_width, "throughput of an adaptive verify width by concurrency"),
        ("fetch", _add_fetch, "write the benchmarks' JSONL from the hub"),
        ("report", _add_report, "rewrite the report of a run"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        add_options(command)
        if name in ("run", "serving"):
            command.set_defaults(**suite or {})
    return top


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; those that were not given are the suite's, or the defaults.

    Raises ``EvalError`` for a number below the smallest that is allowed, or without a target.
    """
    args = parser().parse_args(argv)
    if suite := getattr(args, "suite", None):
        args = parser(SUITES[suite]).parse_args(argv)
    if "target" in args and not args.target:
        raise EvalError("--target is needed: the folder or hub id of the target.")
    for name, bound in SMALLEST.items():
        value = getattr(args, name, bound)
        number = min(value) if isinstance(value, list) else value
        if number < bound:
            raise EvalError(f"--{name.replace('_', '-')} must be at least {bound}, found {number}.")
    return args


def _methods_of(args: argparse.Namespace) -> list[Method]:
    drafts = {name: getattr(args, name) for name in DRAFTS}
    return resolve(args.methods, drafts, parse_urls(getattr(args, "server", [])))


def _plan(args: argparse.Namespace, methods: Sequence[Method], **fields: Any) -> Plan:
    """A plan with the options of every command that starts servers."""
    fields |= {"target": str(args.target), "methods": tuple(methods)}
    fields |= {"max_new_tokens": args.max_new_tokens, "server_args": tuple(args.server_args)}
    return Plan(threads=args.threads, start_minutes=args.start_minutes, **fields)


def plan_of(args: argparse.Namespace) -> Plan:
    """The plan of a run; raises ``EvalError``."""
    methods = with_noise_floor(_methods_of(args))
    prompts = load(args.data_dir, args.benchmarks, args.num_prompts)
    settings = product(args.concurrency, args.thinking, args.temperature)
    cells = tuple(
        Cell(benchmark, temperature, thinking, concurrency)
        for concurrency, thinking, temperature in settings
        for benchmark in prompts
    )
    fields = {"prompts": prompts, "cells": cells, "rounds": args.rounds, "out": args.out}
    template_args = {"on": args.thinking_args, "off": {}}
    together = not args.one_at_a_time
    return _plan(args, methods, template_args=template_args, together=together, **fields)


def _first_turns(args: argparse.Namespace) -> tuple[str, ...]:
    """First turns, the benchmarks in turn, so that any number of requests is of all of them."""
    prompts = load(args.data_dir, args.benchmarks, args.num_prompts).values()
    return tuple(turns[0] for turns in chain.from_iterable(zip_longest(*prompts)) if turns)


def study_of(args: argparse.Namespace) -> Study:
    """A serving study; raises ``EvalError``."""
    methods, prompts = _methods_of(args), _first_turns(args)
    fields = {"prompts": {"all": [[turn] for turn in prompts]}, "cells": (), "rounds": 1}
    plan = _plan(args, methods, out=args.out / FOLDER, together=False, **fields)
    return Study(plan, prompts, tuple(args.levels), tuple(args.rates), args.prompts_per_level)


def width_plan_of(args: argparse.Namespace) -> Plan:
    """The plan of a width study; raises ``EvalError``."""
    prompts, cells = width.loads_of(_first_turns(args), args.levels, args.temperature)
    methods = with_noise_floor(width.methods_of(args.draft, args.untrained))
    return _plan(args, methods, prompts=prompts, cells=cells, rounds=args.rounds, out=args.out)
