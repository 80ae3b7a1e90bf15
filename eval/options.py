"""The command line of ``python -m eval``, its defaults, and the plans that it describes."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from eval.errors import EvalError
from eval.methods import KINDS, Method, parse_urls, resolve
from eval.prompts import BENCHMARKS, load
from eval.runner import Cell, Plan, with_noise_floor
from eval.serving_study import FOLDER, Study
from eval.suites import SUITES

DRAFTS = tuple(dict.fromkeys(kind.draft_option for kind in KINDS.values() if kind.draft_option))
DEFAULTS: dict[str, Any] = {
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
    "data_dir": Path("."),
    "threads": None,
    "start_minutes": 15.0,
    "levels": [1, 4, 16, 64],
    "rates": [1.0, 4.0],
    "prompts_per_level": 32,
}
DESCRIPTION = """Compare HYPERDFLASH with its rivals on one target.

Defaults are those without a --suite; a suite sets its own."""


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _adder(parser: argparse.ArgumentParser):
    """``add_argument`` that shows the default of DEFAULTS; argparse's own stays None, so that a
    suite's value can be told from one that was given."""

    def add(option: str, text: str, *, none: str | None = None, **how: Any) -> None:
        value = DEFAULTS.get(option.removeprefix("--").replace("-", "_"))
        if none is not None:
            shown = none
        elif isinstance(value, dict):
            shown = json.dumps(value)
        elif isinstance(value, list):
            comma = "," if how.get("type") is _names else " "
            shown = comma.join(f"{v:g}" if isinstance(v, float) else str(v) for v in value)
        else:
            shown = str(value)
        shown = (shown or "none").replace("%", "%%")
        parser.add_argument(option, help=f"{text} (default: {shown})", **how)

    return add


def _add_common(parser: argparse.ArgumentParser) -> None:
    """Options of ``run`` and ``serving``: which methods on which prompts."""
    add = _adder(parser)
    add("--suite", "settings of a known comparison", none="none", choices=SUITES)
    add("--target", "target folder or hub id", none="the suite's; needed without one")
    add("--methods", f"comma-separated, of {', '.join(KINDS)}", type=_names)
    names = f"comma-separated, of {', '.join(BENCHMARKS)}; .jsonl files; hub:owner/dataset/file"
    add("--benchmarks", names, type=_names)
    add("--num-prompts", "prompts of each benchmark, drawn from its file", type=int)
    add("--max-new-tokens", "tokens a turn", type=int)
    add("--data-dir", "folder of NAME.jsonl benchmark files", type=Path)
    add("--server-args", "arguments of every server, as one text", type=shlex.split)
    add("--threads", "OpenMP threads of each server", none="the environment's", type=int)
    add("--start-minutes", "how long a server may take to load its model", type=float)
    for name in DRAFTS:
        need = "the target's own layer" if name == "mtp_draft" else "none; its method needs one"
        add("--" + name.replace("_", "-"), "folder or hub id", none=need)


def _add_out(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--out", type=Path, required=True, help=f"{text} (needed; no default)")


def _add_run(commands: Any) -> None:
    parser = commands.add_parser(
        "run", help="measure, then report; run again to resume", description=DESCRIPTION
    )
    _add_common(parser)
    add = _adder(parser)
    add("--temperature", "temperatures", type=float, nargs="+")
    add("--thinking", "thinking modes, off and on", choices=("off", "on"), nargs="+")
    add("--thinking-args", "chat template arguments of thinking on, as JSON", type=json.loads)
    add("--concurrency", "requests in flight", type=int, nargs="+")
    add("--rounds", "interleaved rounds", type=int)
    add("--server", "use a running server; may be repeated", action="append", metavar="NAME=URL")
    text = "keep one server up at a time, in turn each round (one GPU)"
    add("--one-at-a-time", text, none="all at once", action="store_true")
    _add_out(parser, "folder of the run; new, empty, or this run's own")


def _add_serving(commands: Any) -> None:
    parser = commands.add_parser(
        "serving",
        help="load, latency and round costs, into a run's report",
        description=DESCRIPTION,
    )
    _add_common(parser)
    add = _adder(parser)
    add("--levels", "concurrency levels", type=int, nargs="+")
    add("--rates", "Poisson arrivals, requests a second", type=float, nargs="+")
    add("--prompts-per-level", "requests of each load; at least 4 x its level", type=int)
    _add_out(parser, f"folder of a finished `run`; the study lies in its {FOLDER}/")


def _add_fetch(commands: Any) -> None:
    parser = commands.add_parser("fetch", help="write the benchmarks' JSONL from the hub")
    add = _adder(parser)
    add("--benchmarks", "comma-separated", type=_names)
    text = "read NAME/ data sets saved by datasets.save_to_disk in this folder, not the hub"
    add("--copies", text, none="the hub", type=Path)
    _add_out(parser, "folder for NAME.jsonl; files that are there are kept")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m eval", description=DESCRIPTION)
    commands = top.add_subparsers(required=True, dest="command")
    _add_run(commands)
    _add_serving(commands)
    _add_fetch(commands)
    report = commands.add_parser("report", help="write the report of a run again")
    _add_out(report, "folder of a run, or of its results.json alone")
    return top


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Defaults, then the suite's, then what was given; raises ``EvalError``."""
    given = {k: v for k, v in vars(args).items() if v is not None}
    suite = SUITES[args.suite]() if getattr(args, "suite", None) else {}
    options = {**DEFAULTS, **suite, **given}
    if not options.get("target"):
        raise EvalError("--target is needed: the folder or hub id of the target.")
    for name in ("num_prompts", "max_new_tokens", "rounds", "prompts_per_level"):
        if options[name] < 1:
            raise EvalError(
                f"--{name.replace('_', '-')} must be at least 1, found {options[name]}."
            )
    for name in ("concurrency", "levels"):
        if min(options[name]) < 1:
            raise EvalError(f"--{name} must be at least 1, found {min(options[name])}.")
    if options["start_minutes"] <= 0:
        raise EvalError(f"--start-minutes must be above 0, found {options['start_minutes']}.")
    if min(options["temperature"]) < 0 or min(options["rates"]) <= 0:
        raise EvalError("--temperature must be at least 0, and --rates more than 0.")
    return options


def methods_of(options: dict[str, Any]) -> list[Method]:
    """The methods asked for; raises ``EvalError``."""
    drafts = {name: options.get(name) for name in DRAFTS}
    return resolve(options["methods"], drafts, parse_urls(options["server"]))


def study_of(args: argparse.Namespace) -> Study:
    """A checked serving study; raises ``EvalError``."""
    options = options_of(args)
    methods = tuple(methods_of(options))
    prompts = load(options["data_dir"], options["benchmarks"], options["num_prompts"])
    return Study(
        target=str(options["target"]),
        methods=methods,
        # Benchmarks in turn, so that any number of requests is of all of them.
        prompts=[turns for group in zip(*prompts.values(), strict=False) for turns in group],
        levels=tuple(options["levels"]),
        rates=tuple(options["rates"]),
        prompts_per_level=options["prompts_per_level"],
        max_new_tokens=options["max_new_tokens"],
        server_args=tuple(options["server_args"]),
        out=options["out"] / FOLDER,
        threads=options["threads"],
        start_minutes=options["start_minutes"],
    )


def plan_of(args: argparse.Namespace) -> Plan:
    """A checked plan; raises ``EvalError``."""
    options = options_of(args)
    methods = methods_of(options)
    prompts = load(options["data_dir"], options["benchmarks"], options["num_prompts"])
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
        threads=options["threads"],
        start_minutes=options["start_minutes"],
    )
