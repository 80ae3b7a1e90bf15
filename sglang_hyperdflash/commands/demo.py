"""``hyperdflash demo``: serve the tiny DeepSeek-V4 with HYPERDFLASH, compared with the baseline.

Two servers on loopback answer the same prompts in turns, through the client of ``eval``. Every
answer is compared token by token (bf16 on a GPU: ``eval.identity`` tells ties from faults). The
checkers of the example's exchanges judge whether it is right.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sglang_hyperdflash.tools import acceptance
from sglang_hyperdflash.tools.atomic import write_text
from sglang_hyperdflash.tools.command_line import COUNT
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.jsonl import read_lines
from sglang_hyperdflash.tools.ownership import NotOurs, lock
from sglang_hyperdflash.tools.provenance import provenance
from sglang_hyperdflash.tools.server_process import Server, comparable_arguments

KIND = "hyperdflash demo"
ROOT = Path(__file__).resolve().parents[2]


def add_parser(commands) -> None:
    """Register ``demo`` and its arguments."""
    parser = commands.add_parser(
        "demo", help="serve the tiny DeepSeek-V4", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--out", type=Path, default=Path("build/demo.json"), help="report")
    parser.add_argument("--rounds", type=COUNT, default=3, help="answers to each prompt")
    parser.add_argument("--max-new-tokens", type=COUNT, default=128, help="tokens of an answer")
    parser.set_defaults(run=run)


def find_example() -> Path:
    """Return the tiny target's folder, which is put on the import path as ``eval`` is.

    Raises:
        HyperDFlashConfigError: this is not a checkout.
    """
    example = ROOT / "examples" / "tiny_deepseek_v4"
    if not (example.is_dir() and (ROOT / "eval").is_dir()):
        raise HyperDFlashConfigError(
            f"the demo needs eval/ and {example}, which the installed package does not have. Clone "
            "the repository and run `make demo` there."
        )
    sys.path[:0] = [str(path) for path in (ROOT, example) if str(path) not in sys.path]
    return example


def check_out(out: Path) -> None:
    """Raise ``NotOurs`` for a file that is not the report of an earlier demo."""
    if out.is_dir() or (out.exists() and b'"outputs_identical"' not in out.read_bytes()):
        raise NotOurs(
            f"--out {out}: expected no file, or the report of an earlier demo; found something "
            "else. Nothing was written. Choose another path."
        )


def run(args: argparse.Namespace) -> int:
    """Compare both servers' answers, print and write the report; return 1 if one is a fault."""
    check_out(args.out)
    example = find_example()
    from eval.client import Sampling, converse
    from eval.identity import data_type, judged
    from eval.methods import resolve

    methods = resolve(["baseline", "hyperdflash2"], {"hyperdflash2_draft": example / "drafter"}, {})
    prompts = [prompt for _, prompt in read_lines(example / "prompts.jsonl")]
    sampling = Sampling(0.0, args.max_new_tokens)
    logs = args.out.parent / "demo-logs"
    entries, histograms = [], []
    with ExitStack() as stack:
        stack.enter_context(lock(logs, KIND))  # a second demo would mix both
        print(f"starting two servers (logs in {logs}) ...", flush=True)
        servers = {}
        for method in methods:
            arguments = (*comparable_arguments(), *method.arguments)
            log, environment = logs / f"{method.name}.log", dict(method.environment)
            server = Server(example / "target", *arguments, log=log, environment=environment)
            servers[method.name] = stack.enter_context(server)
        for server in servers.values():
            converse(server.wait().url, ["Hello"], Sampling(0.0, 16))  # pays for lazy set-up
        dtype = data_type(url := servers["baseline"].url)
        for prompt in prompts:
            turns = [message["content"] for message in prompt["messages"]]
            answers: dict[str, list[Any]] = {name: [] for name in servers}
            for round_index in range(args.rounds):
                for name in list(servers)[:: 1 if round_index % 2 == 0 else -1]:
                    answers[name].append(converse(servers[name].url, turns, sampling))
            verdict = judged(url, dtype, turns, answers, sampling)
            entries.append(compare(prompt, answers, verdict))
            histograms.append(answers["hyperdflash2"][0].histogram)
            print_answer(len(entries), entries[-1])
    result = summarise(entries, histograms, methods[-1].num_drafts, dtype)
    write_text(args.out, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    print_summary(result, args.out)
    return 1 if result["faults"] else 0


def compare(prompt: dict[str, Any], answers: dict[str, list[Any]], verdict: str) -> dict[str, Any]:
    """Return a prompt's entry of the report, from each method's ``eval.client.Answer`` objects."""
    drafted = answers["hyperdflash2"][0]
    seconds = {name: [answer.seconds for answer in rounds] for name, rounds in answers.items()}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "kind": prompt["kind"],
        "prompt": prompt["messages"][-1]["content"],
        "text": drafted.texts[-1],
        "verdict": verdict,
        "tau": acceptance.accept_length(drafted.correct_drafts, drafted.verify_rounds),
        "tokens": sum(map(len, drafted.output_ids)),
        "seconds": seconds,
        "speedup": medians["baseline"] / medians["hyperdflash2"],
        "right": importlib.import_module("exchanges").is_right(prompt, drafted.texts[-1]),
    }


def summarise(
    entries: list[dict[str, Any]], histograms: list[list[int]], num_drafts: int, dtype: str
) -> dict[str, Any]:
    """Return the whole report; tau is over all verification rounds, None without any."""
    verdicts = [entry["verdict"] for entry in entries]
    total = acceptance.add_histograms(histograms)
    speedups = [entry["speedup"] for entry in entries]
    return {
        "outputs_identical": set(verdicts) == {"identical"},
        "dtype": dtype,
        "ties": verdicts.count("tie"),
        "faults": verdicts.count("fault"),
        "answers_right": sum(entry["right"] for entry in entries),
        "answers_judged": len(entries),
        "tau": acceptance.accept_length_of(total),
        "position_acceptance": acceptance.position_acceptance(total, num_drafts),
        "speedup": statistics.median(speedups),
        "speedup_range": [min(speedups), max(speedups)],
        "provenance": provenance(),
        "prompts": entries,
    }


def _shown(number: float | None) -> str:
    return "not measured" if number is None else f"{number:.2f}"


def print_answer(number: int, entry: dict[str, Any]) -> None:
    """Print a prompt, its answer and the numbers of its entry."""
    mark = entry["verdict"].replace("fault", "DIFFERENT FROM THE BASELINE")
    print(f"\n[{number}] {entry['kind']}: {entry['prompt'].strip()[:100]!r}")
    print(f"    {entry['text'].strip()[:240]!r}")
    print(
        f"    tau {_shown(entry['tau'])}, {entry['tokens']} tokens, speedup "
        f"{entry['speedup']:.2f}x, {mark}, {'right' if entry['right'] else 'WRONG'}",
        flush=True,
    )


def print_summary(result: dict[str, Any], out: Path) -> None:
    """Print the report's numbers over all prompts."""
    print("\nacceptance by drafted position")
    for position, share in enumerate(result["position_acceptance"], start=1):
        print(f"  {position} {'#' * round(40 * share):<40} {share:.2f}")
    low, high = result["speedup_range"]
    print(f"\ntau (accept length, bonus token included): {_shown(result['tau'])}")
    print(f"speedup over the baseline, interleaved: {result['speedup']:.2f}x median over prompts")
    print(f"  (slowest {low:.2f}x, fastest {high:.2f}x; whole requests, prefill included)")
    print(f"outputs identical to the baseline's: {result['outputs_identical']}")
    rule = "any difference" if result["dtype"] == "float32" else "past the tie gap of `eval run`"
    print(f"  ({result['dtype']}; faults, {rule}: {result['faults']}; ties: {result['ties']})")
    print(f"right answers: {result['answers_right']} of {result['answers_judged']}")
    print(f"report: {out}")
