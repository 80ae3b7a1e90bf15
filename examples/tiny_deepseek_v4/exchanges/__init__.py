"""Exchanges with computed answers: what the tiny DeepSeek-V4 was trained on and is judged by.

    from exchanges import FAMILIES, generate
    for exchange in generate(seed=1234, per_family=8):
        reply = ask_somebody(exchange.prompt)
        right = FAMILIES[exchange.family].is_right(exchange, reply)

Seeds below 1000 give training problems, all others held-out ones. No problem is in both halves.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, zip_longest
from random import Random

from exchanges import arithmetic, lists, orders, programs, quantities, records, texts
from exchanges.base import FIRST_HELD_OUT_SEED, Exchange, Family, Message, is_held_out

__all__ = [
    "FAMILIES",
    "FIRST_HELD_OUT_SEED",
    "KINDS",
    "Exchange",
    "Family",
    "Message",
    "generate",
    "in_turn",
    "is_held_out",
    "is_right",
]

GROUPS = (arithmetic, quantities, lists, records, programs, texts, orders)
FAMILIES: dict[str, Family] = {family.name: family for group in GROUPS for family in group.FAMILIES}
# Three kinds of text, as benchmarks are told apart by.
KINDS: dict[str, tuple[str, ...]] = {
    kind: tuple(family.name for group in groups for family in group.FAMILIES)
    for kind, groups in {
        "math": (arithmetic, quantities, lists),
        "code": (records, programs),
        "chat": (texts, orders),
    }.items()
}
MOST_REPEATS = 200  # problems drawn again in a row before a family counts as used up


def generate(
    seed: int, per_family: int, families: tuple[str, ...] = (), *, or_all: bool = False
) -> Iterator[Exchange]:
    """Yield ``per_family`` exchanges of each family, no problem twice.

    The seed and a family's name alone decide its exchanges.

    Args:
        or_all: a family with fewer problems gives all that it has.

    Raises:
        ValueError: a family is unknown or, without ``or_all``, has too few problems.
    """
    for name in families or tuple(FAMILIES):
        if name not in FAMILIES:
            raise ValueError(f"no family {name!r}; there are {', '.join(FAMILIES)}.")
        rng, seen, repeats = Random(f"{seed}/{name}"), set(), 0
        while len(seen) < per_family:
            exchange = FAMILIES[name].draw(rng, held_out=seed >= FIRST_HELD_OUT_SEED)
            repeats = repeats + 1 if exchange.key in seen else 0
            if repeats == MOST_REPEATS:
                if or_all:
                    break
                raise ValueError(
                    f"family {name!r} has only about {len(seen)} problems in this half; "
                    f"{per_family} were asked for. Ask for fewer."
                )
            if not repeats:
                seen.add(exchange.key)
                yield exchange


def in_turn(
    seed: int, per_family: int, families: tuple[str, ...], *, or_all: bool = False
) -> Iterator[Exchange]:
    """What ``generate`` yields, but the families in turn: the first few are of all of them."""
    drawn = (generate(seed, per_family, (name,), or_all=or_all) for name in families)
    return filter(None, chain.from_iterable(zip_longest(*drawn)))


def is_right(prompt: dict, reply: str) -> bool:
    """Whether a reply to a prompt of a file is right.

    Args:
        prompt: ``kind`` (the family), ``messages``, ``answer`` and, for code, ``header``.

    Raises:
        ValueError: there is no such family.
    """
    family = prompt["kind"]
    if family not in FAMILIES:
        raise ValueError(f"no family {family!r}; there are {', '.join(FAMILIES)}.")
    exchange = Exchange(family, "", (), prompt["answer"], prompt.get("header", ""))
    return FAMILIES[family].is_right(exchange, reply)
