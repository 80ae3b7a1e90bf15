"""``python -m eval.demo``: compare answers and speed with the baseline's, on the tiny DeepSeek-V4.

Two servers on loopback answer the same prompts in turns: the baseline, twice for the noise, and
HYPERDFLASH, also with random weights as a control. A server loads a drafter in milliseconds. Every
answer is compared token by token (bf16 on a GPU: ``eval.identity`` tells ties from faults).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from eval import demo_page as page
from eval.demo_page import BASELINE, CONTROL, DRAFTED, NOISE, OTHER
from eval.errors import INTERRUPTED, UNUSABLE, USER_ERRORS
from eval.histograms import accept_length_of, add_histograms
from sglang_hyperdflash import CPU_PLATFORM
from sglang_hyperdflash.tools.atomic import write_json
from sglang_hyperdflash.tools.command_line import COUNT, Parser
from sglang_hyperdflash.tools.jsonl import read_lines
from sglang_hyperdflash.tools.ownership import NotOurs, lock
from sglang_hyperdflash.tools.process_group import exit_on_signals, sigint_exits
from sglang_hyperdflash.tools.server_process import Server, comparable_arguments

Answers = dict[str, list[Any]]  # ``eval.client.Answer`` objects of every round, by name
Asked = dict[str, tuple[str, Path | None]]  # address and drafter of those who answer, by name
KIND = "python -m eval.demo"
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "tiny_deepseek_v4"
# Neither target nor drafter was trained on such text.
OTHER_TEXT = (
    "A farmer fills 12 boxes with 8 apples each. At the market he sells 45 of the apples. He gives "
    "the rest to his 3 neighbours in equal parts. How many apples does each neighbour receive?"
)


def parser() -> Parser:
    """The command line, which needs neither torch nor SGLang."""
    text = "Compare HYPERDFLASH with the baseline on the tiny DeepSeek-V4, which a clone includes."
    command = Parser(prog=KIND, description=text)
    add = command.add_argument
    add("--out", type=Path, default=Path("build/demo.json"), help="report")
    text = "your own prompt instead of the example's; may be repeated"
    add("--prompt", action="append", metavar="TEXT", help=text)
    add("--rounds", type=COUNT, default=3, help="answers to each prompt")
    add("--max-new-tokens", type=COUNT, default=128, help="tokens of an answer")
    return command


def check_out(out: Path) -> None:
    """Raise ``NotOurs`` for a file that is not the report of an earlier demo."""
    if out.is_dir() or (out.exists() and b'"outputs_identical"' not in out.read_bytes()):
        raise NotOurs(
            f"--out {out}: expected no file, or the report of an earlier demo; found something "
            "else. Nothing was written. Choose another path."
        )


def run(args: argparse.Namespace) -> int:
    """Compare all answers, print and write the report; return 1 if a difference is a fault."""
    check_out(args.out)
    logs = args.out.parent / "demo-logs"
    lines = [] if args.prompt else read_lines(EXAMPLE / "prompts.jsonl")
    prompts, kind = [prompt for _, prompt in lines], "yours" if args.prompt else OTHER
    answer = {} if args.prompt else {"answer": "17"}  # to OTHER_TEXT
    for text in args.prompt or [OTHER_TEXT]:
        prompts.append({"kind": kind, "messages": [{"role": "user", "content": text}], **answer})
    entries: list[dict[str, Any]] = []
    with ExitStack() as stack:
        stack.enter_context(lock(logs, KIND))  # a second demo would mix both
        page.print_head(args.out, logs, own=not args.prompt)
        # After the head: these import torch, which takes seconds.
        with sigint_exits(f"{KIND}: interrupted"):
            import sglang_hyperdflash.training.local_target  # noqa: F401  for ``rounds_of``
            from eval.client import Sampling
            from eval.identity import data_type, judged
            from sglang_hyperdflash.tools.provenance import provenance

        load = {"load_average": os.getloadavg()[0], "cores": len(os.sched_getaffinity(0))}
        print(page.MACHINE.format_map(facts := provenance() | load))
        if facts["load_average"] > facts["cores"]:
            print(page.BUSY.format_map(facts))
        servers = start_servers(stack, logs)
        url, sampling = servers[BASELINE][0], Sampling(0.0, args.max_new_tokens)
        facts["dtype"] = dtype = data_type(url)
        print(page.COLUMNS)
        for prompt in prompts:
            turns = [turn["content"] for turn in prompt["messages"] if turn["role"] == "user"]
            answers = ask(servers, turns, sampling, args.rounds)
            pairs = {name: {BASELINE: answers[BASELINE], name: answers[name]} for name in answers}
            verdicts = {n: judged(url, dtype, turns, pair, sampling) for n, pair in pairs.items()}
            entries.append({"turns": turns} | entry_of(prompt, answers, verdicts))
            page.print_entry(len(entries), entries[-1])
        rounds = rounds_of(entries[0], url)
    result = summarise(entries) | {"rounds": rounds, "provenance": facts}
    write_json(args.out, result | {"prompts": entries}, indent=1)
    page.print_rounds(entries[0]["turns"][0], rounds)
    page.print_summary(result, entries)
    page.print_tail(args.out, logs)
    return 1 if result["faults"] else 0


def start_servers(stack: ExitStack, logs: Path) -> Asked:
    """Start two servers, and return the four that are compared."""
    import torch

    from eval.client import Sampling, converse
    from eval.methods import resolve
    from sglang_hyperdflash.training.drafter import Drafter

    servers, started, trained = {}, time.monotonic(), EXAMPLE / "drafter"
    print("starting two servers ...", flush=True)
    for method in resolve([BASELINE, DRAFTED], {"hyperdflash2_draft": trained}, {}):
        # With a prefix cache a repeated prompt would cost less than the first time.
        arguments = (*comparable_arguments(), "--disable-radix-cache", *method.arguments)
        log, environment = logs / f"{method.name}.log", dict(method.environment)
        server = Server(EXAMPLE / "target", *arguments, log=log, environment=environment)
        servers[method.name] = stack.enter_context(server)
    torch.manual_seed(0)
    untrained = Drafter(json.loads((trained / "config.json").read_text()))
    untrained.save(random := (logs / CONTROL).resolve())
    for server in servers.values():
        converse(server.wait().url, ["Hello"], Sampling(0.0, 16))  # pays for lazy set-up
    print(f"both servers are ready after {time.monotonic() - started:.0f} s\n", flush=True)
    baseline, ours = (servers[BASELINE].url, None), servers[DRAFTED].url
    return {BASELINE: baseline, NOISE: baseline, DRAFTED: (ours, trained), CONTROL: (ours, random)}


def ask(servers: Asked, turns: list[str], sampling: Any, rounds: int) -> Answers:
    """Return all answers to a prompt; every second round asks in the reverse order.

    Raises ``RequestException`` if a server refuses a request or the drafter.
    """
    from eval.client import converse, post
    from sglang_hyperdflash.draft.published import DRAFTER_FORMAT

    answers: Answers = {name: [] for name in servers}
    for i in range(rounds):
        for name, (url, drafter) in list(servers.items())[:: -1 if i % 2 else 1]:
            if drafter is not None:
                body = {"model_path": str(drafter), "load_format": DRAFTER_FORMAT, "token_step": i}
                post(f"{url}/update_weights_from_disk", body).raise_for_status()
            answers[name].append(converse(url, turns, sampling))
    return answers


def entry_of(prompt: dict[str, Any], answers: Answers, verdicts: dict[str, str]) -> dict[str, Any]:
    """Return a prompt's part of the report: every answer whole, and each server's numbers."""
    servers, is_right = {}, importlib.import_module("exchanges").is_right
    for name, each in answers.items():
        servers[name] = {
            "verdict": verdicts[name],
            "tau": accept_length_of(each[0].histogram) or 1.0,  # without drafts
            "tokens": sum(map(len, each[0].output_ids)),
            "seconds": (seconds := median(answer.seconds for answer in each)),
            "speedup": median(answer.seconds for answer in answers[BASELINE]) / seconds,
            "answers": list(map(vars, each)),
        }
    kind, text = prompt["kind"], answers[DRAFTED][0].texts[-1]
    family = {"kind": "word_problem"} if kind == OTHER else {}
    right = is_right(prompt | family, text) if "answer" in prompt else None
    return {"kind": kind, "expected": prompt.get("answer"), "right": right, "servers": servers}


def rounds_of(entry: dict[str, Any], url: str) -> list[dict[str, str]]:
    """Return accepted drafts, bonus token and rejected drafts of an answer's rounds, as texts.

    The prefill is first. SGLang reports no rejected draft, so all are recomputed; empty if that
    differs from what the server counted (in bf16 on a GPU).
    """
    import torch

    from eval.algorithm import propose_block
    from eval.client import Sampling, chat, messages_before
    from sglang_hyperdflash.targets.files import load_tokenizer
    from sglang_hyperdflash.training.drafter import Drafter
    from sglang_hyperdflash.training.local_target import LocalTarget

    messages, served = messages_before(entry["turns"], [], 0), entry["servers"][DRAFTED]["answers"]
    reply = chat(url, messages, Sampling(0.0, 1), return_prompt_token_ids=True)
    tokens, rest = reply["choices"][0]["prompt_token_ids"], served[0]["output_ids"][0]
    torch.set_num_threads(1)  # in a model this small, more threads wait for each other
    target, drafter = LocalTarget(EXAMPLE / "target"), Drafter.load(EXAMPLE / "drafter").eval()
    drafts, rounds = list[int](), []
    while rest:
        most = min(len(drafts), len(rest))
        kept = sum(drafts[:i] == rest[:i] for i in range(1, most + 1))
        parts = {"accepted": rest[:kept], "bonus": rest[kept : kept + 1]}
        rounds.append(parts | {"rejected": drafts[kept:] if parts["bonus"] else []})
        tokens, rest = tokens + rest[: kept + 1], rest[kept + 1 :]
        drafts = propose_block(target, drafter, tokens) if rest else []
    # Of the last round the server also counts correct drafts after the answer's end.
    counted = Counter(dict(enumerate(served[0]["histogram"])))
    whole = Counter(len(each["accepted"]) for each in rounds[1:-1])
    if len(rounds) - 1 != counted.total() or not whole <= counted:
        return []
    decode = load_tokenizer(str(EXAMPLE / "target")).decode
    return [{name: decode(ids) for name, ids in each.items()} for each in rounds]


def summarise(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers over all prompts; tau and speed are without the text of another kind."""
    servers, verdicts = {}, Counter(s["verdict"] for e in entries for s in e["servers"].values())
    for name in entries[0]["servers"]:
        counted = [entry["servers"][name] for entry in entries if entry["kind"] != OTHER]
        speedups = [server["speedup"] for server in counted]
        tokens, seconds = (sum(s[key] for s in counted) for key in ("tokens", "seconds"))
        histogram = add_histograms(server["answers"][0]["histogram"] for server in counted)
        servers[name] = {
            "tau": accept_length_of(histogram) or 1.0,
            "tokens_per_second": tokens / seconds,
            "speedup": [min(speedups), median(speedups), max(speedups)],
            "verdicts": Counter(entry["servers"][name]["verdict"] for entry in entries),
        }
    differences = {"faults": verdicts["fault"], "ties": verdicts["tie"]}
    return {"outputs_identical": not any(differences.values()), **differences, "servers": servers}


@exit_on_signals()
def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 1 when a difference is a fault, 2 for what the user must fix, 130 for Ctrl-C."""
    args = parser().parse_args(argv)
    os.environ.setdefault(CPU_PLATFORM, "1")
    sys.path.append(str(EXAMPLE))  # of ``exchanges``, which checks the answers
    try:
        return run(args)
    except USER_ERRORS as error:
        print(f"{KIND}: {error}", file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:
        print(f"{KIND}: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    raise SystemExit(main())
