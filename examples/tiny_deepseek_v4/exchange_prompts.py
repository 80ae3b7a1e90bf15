"""Write prompts of the exchanges, to evaluate on and for the demo.

    python examples/tiny_deepseek_v4/exchange_prompts.py held-out --out build/held_out
    python examples/tiny_deepseek_v4/exchange_prompts.py quotes --out build/quotes
    python examples/tiny_deepseek_v4/exchange_prompts.py tutorial --out build/tiny
    python examples/tiny_deepseek_v4/exchange_prompts.py demo --out examples/tiny_deepseek_v4

``held-out`` writes one benchmark file per kind. ``tutorial`` writes prompts to train on and others
to hold out. ``quotes`` writes one whose prompts quote a line of
twelve words to be repeated, and ask for it again. ``demo`` writes twelve prompts with their
answers, and their user turns as a benchmark.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from random import Random

from exchanges import KINDS, Exchange, generate, in_turn
from exchanges.texts import NOUNS
from exchanges.words import CITIES, COLOURS, ITEMS, NAMES, PETS

TRAINING_SEED, HELD_OUT_SEED = 7, 1234  # seeds from 1000 on give held-out problems
BENCHMARK_SEED, DEMO_SEED = 3000, 4000
DEMO_FAMILIES = ("addition", "word_problem", "units", "dates", "code", "trace", "json", "table")
DEMO_FAMILIES += ("edit", "form", "order", "ordering")


def write(path: Path, records: Iterable[dict]) -> None:
    """Write one JSON line per record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    path.write_text("".join(lines), encoding="utf-8")
    print(f"{path}: {len(lines)}")


def turns(exchange: Exchange) -> dict:
    """Return the user's turns as a benchmark file has them."""
    return {"turns": [m["content"] for m in exchange.messages if m["role"] == "user"]}


def held_out(out: Path, per_family: int) -> None:
    """Write the families of a kind in turn, so that the first lines of a file hold all of them."""
    for kind, families in KINDS.items():
        write(out / f"{kind}.jsonl", map(turns, in_turn(BENCHMARK_SEED, per_family, families)))


def quotes(out: Path, count: int) -> None:
    """Write lines of words of two pools in turn: names, and things with their colours."""
    rng, pools = Random(BENCHMARK_SEED), (NAMES + CITIES + PETS, COLOURS + ITEMS + NOUNS)
    lines = [" ".join(rng.sample(pools[i % 2], 12)) for i in range(count)]
    write(out / "quotes.jsonl", ({"turns": [f"Repeat this line:\n{line}"] * 2} for line in lines))


def tutorial(out: Path, per_family: int) -> None:
    """Write ``prompts.jsonl`` to train on, and three held-out problems of each family."""
    for name, seed, count in (
        ("prompts", TRAINING_SEED, per_family),
        ("held_out_prompts", HELD_OUT_SEED, 3),
    ):
        write(out / f"{name}.jsonl", map(turns, generate(seed, count)))


def demo(out: Path, _per_family: int) -> None:
    """Write one exchange of each of twelve families."""
    exchanges = list(generate(DEMO_SEED, 1, DEMO_FAMILIES))
    records = (
        {"kind": e.family, "messages": e.prompt, "answer": e.answer}
        | ({"header": e.header} if e.header else {})
        for e in exchanges
    )
    write(out / "prompts.jsonl", records)
    write(out / "turns.jsonl", map(turns, exchanges))


COMMANDS = {"held-out": (held_out, 4), "quotes": (quotes, 40)}
COMMANDS |= {"tutorial": (tutorial, 100), "demo": (demo, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("--per-family", type=int, help="exchanges of each family in a file")
    args = parser.parse_args()
    run, default = COMMANDS[args.command]
    run(args.out, args.per_family or default)


if __name__ == "__main__":
    main()
