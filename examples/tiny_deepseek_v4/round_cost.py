"""Where a round's time goes, with the dependency head and without.

    python examples/tiny_deepseek_v4/exchange_prompts.py held-out --out build/held_out
    python examples/tiny_deepseek_v4/round_cost.py --out eval/results/round_cost

Servers of the tiny target (no speculation, HyperDFlash, HyperDFlash-2) stand side by side and take
the same prompts by turns, a fixed number of tokens each; the first turn is not counted. Medians of
the rounds in which all requests take part.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from statistics import median
from typing import Any

from drafter_study import SETTINGS, read_prompts
from transformers import AutoTokenizer

from sglang_hyperdflash.serving.round_times import ROUND_TIMES, summarise
from sglang_hyperdflash.serving.width_settings import FULL, WIDTH
from sglang_hyperdflash.tools.atomic import write_json, write_text
from sglang_hyperdflash.tools.provenance import provenance
from sglang_hyperdflash.tools.server_process import (
    Server,
    comparable_arguments,
    hyperdflash_arguments,
)

HERE = Path(__file__).resolve().parent
NONE, PLAIN, HEAD = "no speculation", "HyperDFlash", "HyperDFlash-2"
DRAFTERS = {NONE: None, PLAIN: "hyperdflash", HEAD: "drafter"}
NEW_TOKENS = 96
# Waves of requests in a turn: each gives the rounds before its first answer ends.
WAVES = 3
PARTS = {
    "target": "target's pass",
    "block": "drafter's pass",
    "choice": "choosing drafts: LM head, candidates, dependency head",
    "draft_kv": "draft K/V",
    "rest": "rest: preparing, accepting",
    "scheduler": "between rounds",
}


def parts_of(found: dict[str, float]) -> dict[str, float]:
    """Milliseconds by part, from ``summarise``; the medians need not add up exactly."""
    rest = found["draft"] - found["block"] - found["choice"] - found["draft_kv"]
    return {part: rest if part == "rest" else found[part] for part in PARTS}


def turn(
    server: Server, times: Path, prompts: Sequence[list[int]], sampling: dict[str, Any]
) -> dict[str, float]:
    """Parts of a round with one request for each prompt."""
    times.unlink(missing_ok=True)
    sampling = sampling | {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    with ThreadPoolExecutor(len(prompts)) as pool:
        for _ in range(WAVES):
            list(
                pool.map(lambda p: server.generate(input_ids=p, sampling_params=sampling), prompts)
            )
    found = summarise(times, len(prompts))
    if found is None:
        raise SystemExit(f"{times}: too few rounds of {len(prompts)} requests.")
    return parts_of(found)


def measure(args: argparse.Namespace, prompts: Sequence[list[int]]) -> None:
    """Every load and temperature: the parts of each server's rounds; written after each."""
    found: list[dict[str, Any]] = []
    with ExitStack() as stack:
        servers = {}
        for name, folder in DRAFTERS.items():
            times = args.work / f"{folder or 'none'}.jsonl"
            more = () if folder is None else hyperdflash_arguments(HERE / folder)
            server = Server(
                HERE / "target",
                *(*comparable_arguments(), "--max-running-requests", "32"),
                *more,
                log=times.with_suffix(".log"),
                environment={WIDTH: FULL, ROUND_TIMES: str(times.resolve())},
            )
            servers[name] = (stack.enter_context(server).wait(), times)
        for temperature in args.temperatures:
            for requests in args.requests:
                row = {"temperature": temperature, "requests": requests}
                turns: dict[str, list] = {name: [] for name in servers}
                for repeat in range(args.repeats + 1):
                    for name, (server, times) in servers.items():
                        one = turn(server, times, prompts[:requests], SETTINGS[temperature])
                        turns[name] += [one] if repeat else []
                found.append(row | {"turns": turns})
                print(table(found[-1]), flush=True)
                write(args, found)


def table(row: dict[str, Any]) -> str:
    """Markdown of one load: a line a part, medians of the turns, lowest and highest beside them."""
    lines = [
        f"Temperature {row['temperature']}, {row['requests']} requests:",
        "",
        f"| milliseconds of a round | {' | '.join(row['turns'])} |",
        "|---" * (len(row["turns"]) + 1) + "|",
    ]

    def cell(values: list[float]) -> str:
        return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"

    for part, words in PARTS.items():
        cells = [cell([one[part] for one in turns]) for turns in row["turns"].values()]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    sums = [cell([sum(one.values()) for one in turns]) for turns in row["turns"].values()]
    return "\n".join([*lines, f"| all | {' | '.join(sums)} |", ""])


def write(args: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    """The results and the report so far."""
    write_json(args.out / "results.json", {"provenance": provenance(), "loads": found})
    head = (
        "# A round's time, with the dependency head and without, tiny DeepSeek-V4\n\n"
        f"Milliseconds: medians of {args.repeats} turns, lowest and highest in brackets. fp32, "
        "whole blocks, answers of a fixed length.\n\n"
    )
    write_text(args.out / "report.md", head + "\n".join(table(row) for row in found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("build/round_cost"))
    parser.add_argument("--prompts", type=Path, default=Path("build/held_out"))
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--temperatures", nargs="+", choices=SETTINGS, default=["0", "1"])
    parser.add_argument("--repeats", type=int, default=4, help="turns that count")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    kinds = read_prompts(args.prompts, AutoTokenizer.from_pretrained(HERE / "target"), 20)
    most = max(args.requests)
    prompts = list(islice(chain.from_iterable(zip(*kinds.values(), strict=False)), most))
    if len(prompts) < most:
        raise SystemExit(f"{args.prompts}: {len(prompts)} prompts, {most} are needed.")
    measure(args, prompts)


if __name__ == "__main__":
    main()
