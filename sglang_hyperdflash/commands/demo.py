"""``hyperdflash demo``: serve the tiny DeepSeek-V4 with HYPERDFLASH beside target-only.

Two real servers on loopback answer the same prompts through the OpenAI client, in interleaved
rounds; every answer is compared token by token. A prompt that states its ``answer`` is judged by
the checkers of the example's exchanges, and marked right or wrong.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass as section

from sglang_hyperdflash.draft.config import load_config
from sglang_hyperdflash.serving.width_settings import WIDTH
from sglang_hyperdflash.tools.acceptance import (
    accept_length,
    accept_length_of,
    add_histograms,
    position_acceptance,
)
from sglang_hyperdflash.tools.atomic import write_text
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.fields import OPEN, checked
from sglang_hyperdflash.tools.jsonl import read_lines
from sglang_hyperdflash.tools.ownership import NotOurs, keep_apart, lock
from sglang_hyperdflash.tools.provenance import provenance
from sglang_hyperdflash.tools.server_process import (
    Server,
    comparable_arguments,
    hyperdflash_arguments,
)

# Of a checkout; an installed package does not carry it.
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny_deepseek_v4"
METHODS = ("target", "hyperdflash")
KIND = "hyperdflash demo"


@dataclass
class Answer:
    """What one server said to one prompt in one round."""

    text: str
    token_ids: list[int]
    seconds: float
    correct_drafts: int
    verify_rounds: int
    histogram: list[int]


@dataclass
class PromptReport:
    """One prompt's entry of ``build/demo.json``."""

    kind: str
    prompt: str
    streamed: bool
    text: str
    identical: bool
    tau: float | None  # None: the answer had no verification round
    tokens: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    speedup: float = 0.0
    right: bool | None = None


def add_parser(commands) -> None:
    """Register ``demo`` and its arguments."""
    parser = commands.add_parser(
        "demo", help="serve the tiny DeepSeek-V4", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--target", type=Path, default=EXAMPLE / "target", help="target folder")
    parser.add_argument("--draft", type=Path, default=EXAMPLE / "drafter", help="drafter folder")
    parser.add_argument(
        "--prompts",
        type=Path,
        default=EXAMPLE / "prompts.jsonl",
        help="JSONL of kind, messages; answer, for kinds of the example's exchanges",
    )
    parser.add_argument("--out", type=Path, default=Path("build/demo.json"), help="report")
    parser.add_argument("--rounds", type=int, default=3, help="answers to each prompt")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of an answer")
    parser.add_argument(
        "--without-text", action="store_true", help="leave prompts and answers out of the report"
    )
    parser.set_defaults(run=run)


def ask(client, messages: list[dict], max_new_tokens: int, *, stream: bool) -> Answer:
    """One chat completion at temperature 0 through the OpenAI client.

    Raises:
        HyperDFlashConfigError: the server refuses the request.
    """
    import openai

    extra = {"return_spec_tokens_details": True, "return_output_ids_in_sglext": True}
    options = {
        "model": "default",
        "messages": messages,
        "temperature": 0,
        "max_tokens": max_new_tokens,
        "extra_body": extra,
    }
    started = time.perf_counter()
    try:
        text, extension = _complete(client, options, stream=stream)
    except openai.BadRequestError as error:
        raise HyperDFlashConfigError(
            f"the server refuses the prompt {messages[-1]['content'][:60]!r} with --max-new-tokens "
            f"{max_new_tokens}: {_first_line(error)} Give fewer tokens, or shorter prompts."
        ) from error
    seconds = time.perf_counter() - started
    details = extension.get("spec_tokens_details") or {}
    return Answer(
        text=text,
        token_ids=extension["output_ids"][0],
        seconds=seconds,
        correct_drafts=int(details.get("spec_num_correct_drafts", 0)),
        verify_rounds=int(details.get("spec_verify_ct", 0)),
        histogram=list(details.get("spec_correct_drafts_histogram", [])),
    )


def _complete(client, options: dict, *, stream: bool) -> tuple[str, dict]:
    """An answer's text, and SGLang's own fields of it."""
    if not stream:
        reply = client.chat.completions.create(**options)
        text = reply.choices[0].message.content or ""
        return text, (reply.model_extra or {}).get("sglext") or {}
    text, extension = "", {}
    for chunk in client.chat.completions.create(stream=True, **options):
        for choice in chunk.choices:
            text += choice.delta.content or ""
        extension |= (chunk.model_extra or {}).get("sglext") or {}
    return text, extension


def _first_line(error) -> str:
    """What an ``openai`` error says, without the JSON around it."""
    body = error.body if isinstance(error.body, dict) else {}
    return str(body.get("message") or error.message).splitlines()[0]


@section(config=OPEN)
class _Message:
    role: str
    content: str


@section(config=OPEN)
class _Prompt:
    """A line of ``--prompts``."""

    kind: str
    messages: Annotated[list[_Message], Field(min_length=1)]


def read_prompts(path: Path) -> list[dict]:
    """Read and check ``{"kind", "messages"}`` lines.

    Raises:
        FileNotFoundError: no such file. HyperDFlashConfigError: no line, or one of another form.
    """
    if not path.is_file():
        raise FileNotFoundError(f"--prompts {path} does not exist.")
    prompts = []
    for number, record in read_lines(path):
        where = f"{path}:{number}"
        checked(record, _Prompt, lambda keys, at=where: ": ".join([at, *map(str, keys)]))
        prompts.append(record)
    if not prompts:
        raise HyperDFlashConfigError(
            f"--prompts {path} is empty; expected lines of kind, messages."
        )
    return prompts


def check_out(args: argparse.Namespace) -> None:
    """Refuse to write over what is no report of an earlier demo.

    Raises:
        NotOurs: ``--out`` is something else, or lies in what the demo reads.
    """
    read = {"the target": args.target, "the drafter": args.draft, "the prompts": args.prompts}
    keep_apart("--out", args.out, read)
    if not args.out.exists():
        return
    try:
        earlier = json.loads(args.out.read_bytes())
    except (OSError, ValueError):
        earlier = None
    if not isinstance(earlier, dict) or not {"outputs_identical", "round_cost"} <= earlier.keys():
        raise NotOurs(
            f"--out {args.out}: expected no file, or the report of an earlier demo; found "
            "something else. Nothing was written. Choose another path."
        )


def is_right(prompt: dict, text: str) -> bool | None:
    """Whether an answer is right, by the checker of the prompt's kind.

    ``None`` when the prompt states no ``answer``, or the exchanges are not here (no checkout).
    """
    if "answer" not in prompt or not (EXAMPLE / "exchanges").is_dir():
        return None
    if str(EXAMPLE) not in sys.path:
        sys.path.append(str(EXAMPLE))
    return importlib.import_module("exchanges").is_right(prompt, text)


def check_example(args: argparse.Namespace) -> None:
    """Raise ``HyperDFlashConfigError`` when the tiny target is asked for and is not here."""
    for option in ("target", "draft", "prompts"):
        place = getattr(args, option)
        if not place.exists() and EXAMPLE in place.parents:
            raise HyperDFlashConfigError(
                f"--{option}: the tiny DeepSeek-V4 is not part of the installed package (expected "
                f"{place}). Run the demo in a checkout of the repository, or pass --target, "
                "--draft and --prompts."
            )


def run(args: argparse.Namespace) -> int:
    """Serve, ask, compare, print and write the report; 1 when an output differs."""
    import openai

    if args.rounds < 1 or args.max_new_tokens < 1:
        raise HyperDFlashConfigError("--rounds and --max-new-tokens must be at least 1.")
    check_example(args)
    config = load_config(args.draft)
    prompts = read_prompts(args.prompts)
    check_out(args)
    logs = args.out.parent / "demo-logs"
    with ExitStack() as stack:
        stack.enter_context(lock(logs, KIND))  # a second demo beside would mix both
        print(f"starting two servers of {args.target} (logs in {logs}) ...", flush=True)
        servers = {
            method: stack.enter_context(
                Server(
                    args.target,
                    *comparable_arguments(),
                    *(hyperdflash_arguments(args.draft) if method == "hyperdflash" else ()),
                    log=logs / f"{method}.log",
                    # What the drafter does, every round alike.
                    environment={WIDTH: "full"},
                )
            )
            for method in METHODS
        }
        clients = {
            method: openai.OpenAI(base_url=f"{server.wait().url}/v1", api_key="none")
            for method, server in servers.items()
        }
        # One unmeasured answer a server: the first request pays for lazy set-up.
        for client in clients.values():
            ask(client, prompts[0]["messages"], 16, stream=False)
        reports, histograms = [], []
        for i, prompt in enumerate(prompts):
            report, histogram = compare(clients, prompt, args, stream=i == 0)
            print_answer(i, report)
            reports.append(report)
            histograms.append(histogram)
    result = summarise(reports, histograms, config.num_drafts)
    if args.without_text:
        for entry in result["prompts"]:
            del entry["prompt"], entry["text"]
    write_text(args.out, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    print_summary(result, args.out)
    return 0 if result["outputs_identical"] else 1


def compare(
    clients: dict, prompt: dict, args: argparse.Namespace, *, stream: bool
) -> tuple[PromptReport, list[int]]:
    """Ask both servers ``--rounds`` times, alternating who goes first."""
    answers: dict[str, list[Answer]] = {method: [] for method in METHODS}
    for round_index in range(args.rounds):
        order = METHODS if round_index % 2 == 0 else METHODS[::-1]
        for method in order:
            answers[method].append(
                ask(clients[method], prompt["messages"], args.max_new_tokens, stream=stream)
            )
    everything = [answer.token_ids for given in answers.values() for answer in given]
    drafted = answers["hyperdflash"][0]
    seconds = {method: [a.seconds for a in given] for method, given in answers.items()}
    report = PromptReport(
        kind=prompt["kind"],
        prompt=prompt["messages"][-1]["content"],
        streamed=stream,
        text=drafted.text,
        identical=all(ids == everything[0] for ids in everything),
        tau=accept_length(drafted.correct_drafts, drafted.verify_rounds),
        tokens=len(drafted.token_ids),
        seconds=seconds,
        speedup=statistics.median(seconds["target"]) / statistics.median(seconds["hyperdflash"]),
        right=is_right(prompt, drafted.text),
    )
    return report, drafted.histogram


def summarise(reports: list[PromptReport], histograms: list[list[int]], num_drafts: int) -> dict:
    """The whole of ``demo.json``; tau over all rounds, speedup as the median over prompts.

    ``tau`` and ``round_cost`` are None where no answer had a verification round.
    """
    total = add_histograms(histograms)
    tau = accept_length_of(total)
    speedups = sorted(report.speedup for report in reports)
    judged = [report.right for report in reports if report.right is not None]
    return {
        "outputs_identical": all(report.identical for report in reports),
        "answers_right": sum(judged),
        "answers_judged": len(judged),
        "tau": tau,
        "position_acceptance": position_acceptance(total, num_drafts),
        "speedup": statistics.median(speedups),
        "speedup_range": [speedups[0], speedups[-1]],
        "round_cost": None if tau is None else tau / statistics.median(speedups),
        "provenance": provenance(),
        "prompts": [asdict(report) for report in reports],
    }


def _shown(number: float | None) -> str:
    return "not measured" if number is None else f"{number:.2f}"


def print_answer(index: int, report: PromptReport) -> None:
    mark = "identical" if report.identical else "DIFFERENT FROM TARGET-ONLY"
    streamed = ", streamed" if report.streamed else ""
    verdict = {True: ", RIGHT", False: ", WRONG", None: ""}[report.right]
    print(f"\n[{index + 1}] {report.kind}{streamed}: {report.prompt.strip()[:100]!r}")
    print(f"    {report.text.strip()[:240]!r}")
    print(
        f"    tau {_shown(report.tau)}, {report.tokens} tokens, speedup {report.speedup:.2f}x, "
        f"{mark}{verdict}",
        flush=True,
    )


def print_summary(result: dict, out: Path) -> None:
    print("\nacceptance by drafted position")
    for k, share in enumerate(result["position_acceptance"], start=1):
        print(f"  {k} {'#' * round(40 * share):<40} {share:.2f}")
    low, high = result["speedup_range"]
    print(f"\ntau (accept length, bonus included): {_shown(result['tau'])}")
    print(f"speedup over target-only, interleaved: {result['speedup']:.2f}x median over prompts")
    print(f"  (slowest {low:.2f}x, fastest {high:.2f}x; whole requests, prefill included)")
    steps = "" if result["round_cost"] is None else " target-only steps"
    print(f"round cost: {_shown(result['round_cost'])}{steps}")
    print(f"outputs identical to target-only: {result['outputs_identical']}")
    if result.get("answers_judged"):  # reports of prompts without answers lack it
        print(f"right answers: {result['answers_right']} of {result['answers_judged']}")
    print(f"report: {out}")
