"""Write the prompts of the tiny target's drafters: conversations of four kinds.

    python examples/tiny_deepseek_v4/corpus.py --out build/prompts

A kind is a group of families of :mod:`exchanges`, or prompts scrambled from them. The target
answers scrambled prompts with high-entropy text; a drafter trained without them accepts little on
any other text. ``greedy.jsonl`` and ``sampled.jsonl`` are for training: ``hyperdflash regenerate``
lets the target answer them at temperature 0 and 1. ``held_out_KIND.jsonl`` are problems that
neither target nor drafter learns from.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from random import Random

from exchanges import KINDS as FAMILIES
from exchanges import Message, in_turn
from sglang_hyperdflash.tools.atomic import write_text

SCRAMBLED = "scrambled"
KINDS = (*FAMILIES, SCRAMBLED)
# Training prompts of a kind, relative to the others.
WEIGHTS = dict.fromkeys(FAMILIES, 1) | {SCRAMBLED: 2}
SEEDS = {"train": 100, "held_out": 2000}
# At most: some families have fewer training problems.
PER_FAMILY = {"train": 1600, "held_out": 30}
SCRAMBLED_PROMPTS = {"train": 12_000, "held_out": 160}
PER_KIND, HELD_OUT = 5000, 60
LONGEST = 500  # characters that users say: about 160 tokens

# Of a scrambled prompt: its sentences, the share of its words that are replaced, and the share of
# those that are invented.
SENTENCES = (1, 2, 3, 4, 5, 6, 8, 10, 12)
SHARES = (0.1, 0.4, 0.8)
INVENTED = 0.6
ONSETS = (*"bcdfghjklmnprstvw", "st", "tr", "ch", "sh", "pl")
VOWELS = (*"aeiou", "ea", "ou")
ENDS = ("", *"nrstl", "ck")
SYLLABLES = ["".join(parts) for parts in product(ONSETS, VOWELS, ENDS)]


def load() -> dict[str, dict[str, list[list[Message]]]]:
    """``{kind: {"train": [...], "held_out": [...]}}``; always the same."""
    found = {
        kind: {
            part: conversations(families, seed, PER_FAMILY[part]) for part, seed in SEEDS.items()
        }
        for kind, families in FAMILIES.items()
    }
    every = {part: [c for kind in found.values() for c in kind[part]] for part in SEEDS}
    found[SCRAMBLED] = {
        part: scrambled(every[part], seed, SCRAMBLED_PROMPTS[part]) for part, seed in SEEDS.items()
    }
    return found


def conversations(families: tuple[str, ...], seed: int, per_family: int) -> list[list[Message]]:
    """At most ``per_family`` conversations of each family, the families in turn."""
    return [
        list(exchange.messages) for exchange in in_turn(seed, per_family, families, or_all=True)
    ]


def scrambled(exchanges: Sequence[Sequence[Message]], seed: int, count: int) -> list[list[Message]]:
    """``count`` conversations of one user turn, made of the user's sentences in ``exchanges``."""
    rng = Random(f"{seed}/scrambled")
    turns = [m["content"] for messages in exchanges for m in messages if m["role"] == "user"]
    sentences = [s for turn in turns for s in re.split(r"(?<=[.?!:])\s+|\n", turn) if s.strip()]
    return [[{"role": "user", "content": _turn(rng, sentences)}] for _ in range(count)]


def _turn(rng: Random, sentences: Sequence[str]) -> str:
    share, words = rng.choice(SHARES), []
    for _ in range(rng.choice(SENTENCES)):
        words += [_word(rng, word, share, sentences) for word in rng.choice(sentences).split()]
        words.append(rng.choice(("\n", "", "")))
    return re.sub(r" *\n *", "\n", " ".join(filter(None, words))).strip()


def _word(rng: Random, word: str, share: float, sentences: Sequence[str]) -> str:
    """The word or, with probability ``share``, another one."""
    if rng.random() >= share:
        return word
    if rng.random() >= INVENTED or not re.search("[A-Za-z]", word):
        return rng.choice(rng.choice(sentences).split())
    return re.sub("[A-Za-z]+", lambda found: _invented(rng, found.group()[0].isupper()), word)


def _invented(rng: Random, capital: bool) -> str:
    word = "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((1, 1, 2, 2, 3))))
    return word.capitalize() if capital else word


def chosen(conversations: Sequence[list[Message]], count: int) -> list[list[Message]]:
    """``count`` of those that are short enough, always the same.

    Families come in turn, so they are drawn and not taken at even distances.
    """
    said = ((c, sum(len(m["content"]) for m in c if m["role"] == "user")) for c in conversations)
    short = [conversation for conversation, length in said if length <= LONGEST]
    return Random(count).sample(short, min(count, len(short)))


def write(out: Path, per_kind: int = PER_KIND, held_out: int = HELD_OUT) -> None:
    """Write every file; ``per_kind`` training conversations times a kind's weight."""
    files: dict[str, list[list[Message]]] = {"greedy": [], "sampled": []}
    for kind, parts in load().items():
        train = chosen(parts["train"], per_kind * WEIGHTS[kind])
        files["greedy"] += train[0::2]
        files["sampled"] += train[1::2]
        files[f"held_out_{kind}"] = chosen(parts["held_out"], held_out)
    for name, conversations in files.items():
        lines = (json.dumps({"messages": messages}) + "\n" for messages in conversations)
        write_text(out / f"{name}.jsonl", "".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the prompts")
    parser.add_argument("--per-kind", type=int, default=PER_KIND, help="training prompts of each")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help="prompts of each kind")
    args = parser.parse_args()
    write(args.out, args.per_kind, args.held_out)


if __name__ == "__main__":
    main()
