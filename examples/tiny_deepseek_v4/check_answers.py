"""Ask problems of a seed, judge the greedy answers, and measure nats per sampled token.

    python examples/tiny_deepseek_v4/check_answers.py --seed 1234 --per-family 20 --out answers.json
    python examples/tiny_deepseek_v4/check_answers.py ... --server http://127.0.0.1:30000

Without ``--server`` SGLang serves the target. The report holds ``accuracy`` (share of
greedy answers that the families' checkers accept), ``nats_per_token`` (minus the mean log
probability of the tokens of answers sampled at temperature 1) and both for each family. Seeds 0
to 999 give problems that the target was trained on; the command says so.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count, repeat
from pathlib import Path

from exchanges import FAMILIES, FIRST_HELD_OUT_SEED, Exchange, generate

HERE = Path(__file__).resolve().parent
MAX_TOKENS = 160
CONCURRENCY = 8
SERVER_ARGUMENTS = ("--dtype", "float32", "--mem-fraction-static", "0.5")
SERVER_ARGUMENTS += ("--max-total-tokens", "8192", "--sleep-on-idle", "--log-level", "warning")


# The text of an answer, and the natural-log probability of each of its tokens when it was sampled.
Reply = tuple[str, Sequence[float]]
# (exchange, temperature, seed of its sampling) -> reply
Ask = Callable[[Exchange, float, int], Reply]


def openai_ask(url: str) -> Ask:
    """Ask an OpenAI server; ``url`` is its root, with or without ``/v1``."""
    import openai

    root = url.rstrip("/").removesuffix("/v1")
    client = openai.OpenAI(base_url=f"{root}/v1", api_key="none")

    def ask(exchange: Exchange, temperature: float, seed: int) -> Reply:
        completion = client.chat.completions.create(
            model="default",
            messages=exchange.prompt,
            temperature=temperature,
            max_tokens=MAX_TOKENS,
            logprobs=temperature > 0,
            seed=seed,
        )
        choice = completion.choices[0]
        tokens = (choice.logprobs.content or []) if choice.logprobs else []
        return choice.message.content or "", [token.logprob for token in tokens]

    return ask


def summary(rows: Sequence[tuple[bool, Sequence[float]]]) -> dict[str, float | int]:
    """Accuracy and nats per token.

    Args:
        rows: of each exchange, whether the greedy answer is right, and the sampled one's log
            probabilities.
    """
    logprobs = [value for _, values in rows for value in values]
    if not logprobs:
        raise ValueError("the server gave no log probabilities of sampled tokens (logprobs=true).")
    return {
        "accuracy": sum(right for right, _ in rows) / len(rows),
        "nats_per_token": -sum(logprobs) / len(logprobs),
        "answers": len(rows),
        "sampled_tokens": len(logprobs),
    }


def measure(ask: Ask, exchanges: Sequence[Exchange], seed: int) -> dict:
    """Ask every exchange greedily and at temperature 1; return the report."""
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        greedy = list(pool.map(ask, exchanges, repeat(0.0), repeat(seed)))
        sampled = list(pool.map(ask, exchanges, repeat(1.0), count(seed * 10_000)))
    families: dict[str, list[tuple[bool, Sequence[float]]]] = {}
    for exchange, (text, _), (_, logprobs) in zip(exchanges, greedy, sampled, strict=True):
        right = FAMILIES[exchange.family].is_right(exchange, text)
        families.setdefault(exchange.family, []).append((right, logprobs))
    return {
        "seed": seed,
        "held_out": seed >= FIRST_HELD_OUT_SEED,
        **summary([row for rows in families.values() for row in rows]),
        "families": {name: summary(rows) for name, rows in families.items()},
    }


def table(report: dict) -> str:
    """The report as a Markdown table."""
    lines = ["| family | right | nats per token |", "|---|---|---|"]
    for name, entry in [*report["families"].items(), ("all", report)]:
        lines.append(f"| {name} | {entry['accuracy']:.0%} | {entry['nats_per_token']:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--per-family", type=int, required=True, metavar="N")
    parser.add_argument("--out", type=Path, required=True, metavar="F")
    parser.add_argument(
        "--server", metavar="URL", help="an OpenAI server to ask instead of our own"
    )
    parser.add_argument("--target", type=Path, default=HERE / "target", help="what our own serves")
    args = parser.parse_args()
    exchanges = list(generate(args.seed, args.per_family))
    if args.seed < FIRST_HELD_OUT_SEED:
        print(f"seed {args.seed}: problems of the training half, not held out", flush=True)
    with ExitStack() as stack:
        url = args.server
        if url is None:
            from sglang_hyperdflash.tools.server_process import Server

            log = args.out.parent / "check-answers-server.log"
            url = stack.enter_context(Server(args.target, *SERVER_ARGUMENTS, log=log)).wait().url
        report = measure(openai_ask(url), exchanges, args.seed)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    print(table(report))


if __name__ == "__main__":
    main()
