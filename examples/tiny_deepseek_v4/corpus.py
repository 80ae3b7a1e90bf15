"""Write the prompts of the tiny target's drafters: conversations of four kinds.

    python examples/tiny_deepseek_v4/corpus.py --out build/prompts

A kind is a group of families of :mod:`exchanges`, or prompts scrambled from them. The target
answers scrambled prompts with high-entropy text; a drafter trained without them accepts little on
any other text. ``greedy.jsonl`` and ``sampled.jsonl`` are for training: ``hyperdflash regenerate``
lets the target answer them at temperature 0 and 1. ``held_out_KIND.jsonl`` are problems that
neither target nor drafter learns from.
"""

import argparse
import json
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from random import Random

from exchanges import KINDS, in_turn
from exchanges.base import Message
from sglang_hyperdflash.tools.atomic import write_text

SCRAMBLED = "scrambled"
# Training prompts of a kind, relative to the others.
WEIGHTS = dict.fromkeys(KINDS, 1) | {SCRAMBLED: 2}
SEEDS = {"train": 100, "held_out": 2000}
# At most: some families have fewer training problems.
PER_FAMILY = {"train": 1600, "held_out": 30}
SCRAMBLED_PROMPTS = {"train": 12_000, "held_out": 160}
PER_KIND, HELD_OUT = 5000, 60
LONGEST = 500  # characters of all user turns: about 160 tokens

# Numbers of sentences of a scrambled prompt, shares of its words that are replaced, and the share
# of the replacements that are invented words.
SENTENCES = (1, 2, 3, 4, 5, 6, 8, 10, 12)
SHARES = (0.1, 0.4, 0.8)
INVENTED = 0.6
ONSETS = (*"bcdfghjklmnprstvw", "st", "tr", "ch", "sh", "pl")
VOWELS = (*"aeiou", "ea", "ou")
ENDS = ("", *"nrstl", "ck")
SYLLABLES = ["".join(parts) for parts in product(ONSETS, VOWELS, ENDS)]


def user_turns(messages: Sequence[Message]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "user"]


def load() -> dict[str, dict[str, list[list[Message]]]]:
    """Return ``{kind: {"train": [...], "held_out": [...]}}``; the conversations never change."""
    conversations = {kind: {} for kind in WEIGHTS}
    for part, seed in SEEDS.items():
        for kind, families in KINDS.items():
            exchanges = in_turn(seed, PER_FAMILY[part], families, or_all=True)
            conversations[kind][part] = [list(exchange.messages) for exchange in exchanges]
        sources = [messages for kind in KINDS for messages in conversations[kind][part]]
        conversations[SCRAMBLED][part] = scrambled(sources, seed, SCRAMBLED_PROMPTS[part])
    return conversations


def scrambled(exchanges: Sequence[Sequence[Message]], seed: int, count: int) -> list[list[Message]]:
    """Return ``count`` conversations of one user turn, made of the sentences in ``exchanges``."""
    rng = Random(f"{seed}/scrambled")
    turns = [turn for messages in exchanges for turn in user_turns(messages)]
    sentences = [s for turn in turns for s in re.split(r"(?<=[.?!:])\s+|\n", turn) if s.strip()]
    return [[{"role": "user", "content": _turn(rng, sentences)}] for _ in range(count)]


def _turn(rng: Random, sentences: Sequence[str]) -> str:
    share, words = rng.choice(SHARES), []
    for _ in range(rng.choice(SENTENCES)):
        words += [_word(rng, word, share, sentences) for word in rng.choice(sentences).split()]
        words.append(rng.choice(("\n", "", "")))
    return re.sub(r" *\n *", "\n", " ".join(filter(None, words))).strip()


def _word(rng: Random, word: str, share: float, sentences: Sequence[str]) -> str:
    """Return the word or, with probability ``share``, another word."""
    if rng.random() >= share:
        return word
    if rng.random() >= INVENTED or not re.search("[A-Za-z]", word):
        return rng.choice(rng.choice(sentences).split())

    def invented(match: re.Match[str]) -> str:
        new = "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((1, 1, 2, 2, 3))))
        return new.capitalize() if match[0][0].isupper() else new

    return re.sub("[A-Za-z]+", invented, word)


def chosen(conversations: Sequence[list[Message]], count: int) -> list[list[Message]]:
    """Return ``count`` conversations that are short enough, always the same ones.

    Families come in turn, so conversations are drawn, not taken at even distances.
    """
    short = [c for c in conversations if sum(map(len, user_turns(c))) <= LONGEST]
    return Random(count).sample(short, min(count, len(short)))


def write(out: Path, per_kind: int = PER_KIND, held_out: int = HELD_OUT) -> None:
    """Write every file, with ``per_kind`` training conversations times a kind's weight."""
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
