"""Prompts unlike any exchange, made of exchanges: what a drafter must see to draft on other text.

The target answers them with something like an answer, and is unsure of it, as with any question
that it was not taught. A drafter trained on answers to exchanges alone has never met a doubt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from random import Random

from exchanges import Message

# Sentences of a prompt, and the share of its words that are not where they were.
SENTENCES = (1, 2, 3, 4, 5, 6, 8, 10, 12)
SHARES = (0.1, 0.4, 0.8)
# Of these words, how many are nobody's: the tokenizer spells them.
INVENTED = 0.6
ONSETS = (*"bcdfghjklmnprstvw", "st", "tr", "ch", "sh", "pl")
VOWELS = (*"aeiou", "ea", "ou")
ENDS = ("", *"nrstl", "ck")
SYLLABLES = ["".join(parts) for parts in product(ONSETS, VOWELS, ENDS)]


def conversations(
    exchanges: Sequence[Sequence[Message]], seed: int, count: int
) -> list[list[Message]]:
    """``count`` conversations of one user turn, of the users' sentences in ``exchanges``."""
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
    """The word, or with a chance of ``share`` another in its place."""
    if rng.random() >= share:
        return word
    if rng.random() >= INVENTED or not re.search("[A-Za-z]", word):
        return rng.choice(rng.choice(sentences).split())
    return re.sub("[A-Za-z]+", lambda found: _invented(rng, found.group()[0].isupper()), word)


def _invented(rng: Random, capital: bool) -> str:
    word = "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((1, 1, 2, 2, 3))))
    return word.capitalize() if capital else word
