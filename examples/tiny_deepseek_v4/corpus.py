"""The text of the tiny DeepSeek-V4's drafters: prompts of four kinds, as chat conversations.

A kind is a group of families of :mod:`exchanges`, or prompts scrambled from them. Held-out
conversations are problems that neither the target nor a drafter was trained on.
"""

from __future__ import annotations

from exchanges import KINDS as FAMILIES
from exchanges import Message, in_turn
from scrambled import conversations as scrambled

SCRAMBLED = "scrambled"
KINDS = (*FAMILIES, SCRAMBLED)
# Training prompts of a kind beside the others': a drafter has most to learn where nothing is sure.
WEIGHTS = dict.fromkeys(FAMILIES, 1) | {SCRAMBLED: 2}
TRAINING_SEED, HELD_OUT_SEED = 100, 2000
# At most: some families have fewer training problems.
PER_FAMILY = {"train": 1600, "held_out": 30}
# Some are longer than any prompt may be.
SCRAMBLED_PROMPTS = {"train": 12_000, "held_out": 160}


def load() -> dict[str, dict[str, list[list[Message]]]]:
    """``{kind: {"train": [...], "held_out": [...]}}``, families in turn, always the same."""
    seeds = {"train": TRAINING_SEED, "held_out": HELD_OUT_SEED}
    found = {
        kind: {
            part: conversations(families, seed, PER_FAMILY[part]) for part, seed in seeds.items()
        }
        for kind, families in FAMILIES.items()
    }
    every = {part: [c for kind in found.values() for c in kind[part]] for part in seeds}
    found[SCRAMBLED] = {
        part: scrambled(every[part], seed, SCRAMBLED_PROMPTS[part]) for part, seed in seeds.items()
    }
    return found


def conversations(families: tuple[str, ...], seed: int, per_family: int) -> list[list[Message]]:
    """At most ``per_family`` conversations of each family, the families in turn."""
    return [
        list(exchange.messages) for exchange in in_turn(seed, per_family, families, or_all=True)
    ]
