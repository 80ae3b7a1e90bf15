"""Exchanges with computed answers: what the tiny DeepSeek-V4 was trained on and is judged by.

    from exchanges import FAMILIES, generate
    for exchange in generate(seed=1234, per_family=8):
        reply = ask_somebody(exchange.prompt)
        right = FAMILIES[exchange.family].is_right(exchange, reply)

Seeds below 1000 give training problems, all others held-out ones. No problem is in both halves.
"""

from collections.abc import Iterator
from itertools import chain, zip_longest
from random import Random

from exchanges import arithmetic, lists, orders, programs, quantities, records, texts
from exchanges.base import FIRST_HELD_OUT_SEED, Exchange, Family

# The three kinds of text that benchmarks distinguish.
_FAMILIES_OF_KIND = {
    "math": (*arithmetic.FAMILIES, *quantities.FAMILIES, *lists.FAMILIES),
    "code": (*records.FAMILIES, *programs.FAMILIES),
    "chat": (*texts.FAMILIES, *orders.FAMILIES),
}
KINDS = {kind: tuple(f.name for f in families) for kind, families in _FAMILIES_OF_KIND.items()}
FAMILIES = {family.name: family for families in _FAMILIES_OF_KIND.values() for family in families}
MOST_REPEATS = 200  # problems drawn again in a row before a family counts as used up


def _family(name: str) -> Family:
    if name not in FAMILIES:
        raise ValueError(f"no family {name!r}; there are {', '.join(FAMILIES)}.")
    return FAMILIES[name]


def generate(
    seed: int, per_family: int, families: tuple[str, ...] = (), *, or_all: bool = False
) -> Iterator[Exchange]:
    """Yield ``per_family`` exchanges of each family, no problem twice.

    The seed and a family's name alone decide its exchanges.

    Args:
        families: names of families; all families if it is empty.
        or_all: a family with fewer problems gives all that it has.

    Raises:
        ValueError: a family is unknown or, without ``or_all``, has too few problems.
    """
    for name in families or FAMILIES:
        family, rng, keys, repeats = _family(name), Random(f"{seed}/{name}"), set(), 0
        while len(keys) < per_family:
            exchange = family.draw(rng, held_out=seed >= FIRST_HELD_OUT_SEED)
            if exchange.key not in keys:
                keys.add(exchange.key)
                yield exchange
                repeats = 0
                continue
            repeats += 1
            if repeats == MOST_REPEATS:
                if or_all:
                    break
                raise ValueError(
                    f"family {name!r} has only about {len(keys)} problems in this half; "
                    f"{per_family} were asked for. Ask for fewer."
                )


def in_turn(
    seed: int, per_family: int, families: tuple[str, ...], *, or_all: bool = False
) -> Iterator[Exchange]:
    """Yield what ``generate`` yields, one exchange of each family after another."""
    streams = (generate(seed, per_family, (name,), or_all=or_all) for name in families)
    return filter(None, chain.from_iterable(zip_longest(*streams)))


def is_right(prompt: dict, reply: str) -> bool:
    """Return whether a reply to a prompt of a file is right.

    Raises ``ValueError`` for an unknown family.

    Args:
        prompt: ``kind`` (the family), ``messages``, ``answer`` and, for code, ``header``.
    """
    family = _family(prompt["kind"])
    exchange = Exchange(family.name, "", (), prompt["answer"], prompt.get("header", ""))
    return family.is_right(exchange, reply)
