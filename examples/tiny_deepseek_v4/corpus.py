"""The text of the tiny DeepSeek-V4's drafters: exchanges of three kinds, as chat conversations.

A kind is a group of families of :mod:`exchanges`. Held-out conversations are problems that neither
the target nor a drafter was trained on.
"""

from __future__ import annotations

from exchanges import KINDS as FAMILIES
from exchanges import Message, in_turn

KINDS = tuple(FAMILIES)
TRAINING_SEED, HELD_OUT_SEED = 100, 2000
# At most: some families have fewer training problems.
PER_FAMILY = {"train": 1600, "held_out": 30}


def load() -> dict[str, dict[str, list[list[Message]]]]:
    """``{kind: {"train": [...], "held_out": [...]}}``, families in turn, always the same."""
    return {
        kind: {
            "train": conversations(families, TRAINING_SEED, PER_FAMILY["train"]),
            "held_out": conversations(families, HELD_OUT_SEED, PER_FAMILY["held_out"]),
        }
        for kind, families in FAMILIES.items()
    }


def conversations(families: tuple[str, ...], seed: int, per_family: int) -> list[list[Message]]:
    """At most ``per_family`` conversations of each family, the families in turn."""
    return [
        list(exchange.messages) for exchange in in_turn(seed, per_family, families, or_all=True)
    ]
