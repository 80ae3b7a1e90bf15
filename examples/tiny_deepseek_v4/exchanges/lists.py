"""Short lists: sort, filter, count, and put into order by clues."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from exchanges.base import (
    Draft,
    Exchange,
    Family,
    final_line,
    read_line,
    read_number,
    wording,
    worked,
)
from exchanges.words import COLOURS, NAMES, PETS, THINGS

DIGITS, LETTERS = "0123456789", "abcdefghij"


def sort(rng: Random) -> Draft:
    """Single digits or letters, none twice."""
    values = rng.sample(rng.choice((DIGITS, LETTERS)), rng.randint(3, 5))
    up = rng.random() < 0.5
    shown, result = " ".join(values), " ".join(sorted(values, reverse=not up))
    order = rng.choice(("forwards", "in rising order") if up else ("backwards", "in falling order"))
    question = wording(rng, "sort", order=order, shown=shown)
    key = f"{'up' if up else 'down'} {sorted(values)}"
    return Draft(key, (question, worked([], result)), result)


def filter_list(rng: Random) -> Draft:
    """Each digit is tested, the smallest first; then those that pass are listed."""
    values = rng.sample(range(10), rng.randint(3, 5))
    limit = rng.randint(2, 7)
    kind = rng.choice(("above", "below", "even", "odd"))
    keep = {
        "above": lambda n: n > limit,
        "below": lambda n: n < limit,
        "even": lambda n: n % 2 == 0,
        "odd": lambda n: n % 2 == 1,
    }[kind]
    rule = f"{kind} {limit}" if kind in ("above", "below") else kind
    shown = " ".join(map(str, values))
    question = wording(rng, "filter", rule=rule, shown=shown)
    tests = ", ".join(f"{n} {'yes' if keep(n) else 'no'}" for n in sorted(values))
    result = " ".join(str(n) for n in sorted(values) if keep(n)) or "none"
    return Draft(f"{rule} {sorted(values)}", (question, worked([tests], result)), result)


def count(rng: Random) -> Draft:
    """The list is numbered, so that the working does not have to keep count."""
    pool = rng.sample(rng.choice((COLOURS, PETS, THINGS)), 3)
    words = [rng.choice(pool) for _ in range(rng.randint(3, 6))]
    wanted, found, steps = rng.choice(pool), 0, []
    for place, word in enumerate(words, 1):
        found += word == wanted
        steps.append(f"{place} {word} {'yes' if word == wanted else 'no'} {found}")
    shown = ", ".join(f"{place} {word}" for place, word in enumerate(words, 1))
    question = wording(rng, "count", shown=shown, wanted=wanted)
    reply = worked([f"{wanted}: {', '.join(steps)}"], str(found))
    return Draft(f"{wanted} in {shown}", (question, reply), str(found))


def ordering(rng: Random) -> Draft:
    """A chain of comparisons in either direction; the question is for one of its ends."""
    people = rng.sample(NAMES, rng.choice((3, 3, 4)))
    more, less, most, least = rng.choice(
        (
            ("taller", "shorter", "tallest", "shortest"),
            ("older", "younger", "oldest", "youngest"),
            ("faster", "slower", "fastest", "slowest"),
        )
    )
    falling = rng.random() < 0.5
    clues = " ".join(f"{a} is {more if falling else less} than {b}." for a, b in pairwise(people))
    asked_most = rng.random() < 0.5
    asked = most if asked_most else least
    question = wording(rng, "ordering", asked=asked, clues=clues)
    answer = people[0] if asked_most == falling else people[-1]
    chain = (" > " if falling else " < ").join(people)
    key = f"{asked} {chain}"
    return Draft(key, (question, worked([chain], answer)), answer.lower())


def read_items(reply: str, _exchange: Exchange | None = None) -> str | None:
    """The final answer as a list, split at spaces or commas; its order counts."""
    line = final_line(reply)
    return " ".join(line.lower().replace(",", " ").split()) if line else None


def read_set(reply: str, exchange: Exchange | None = None) -> str | None:
    """The final answer as a list of digits whose order does not count."""
    items = read_items(reply, exchange)
    return " ".join(sorted(items.split())) if items else None


FAMILIES = (
    Family("sort", sort, read_items),
    Family("filter", filter_list, read_set),
    Family("count", count, read_number),
    Family("ordering", ordering, read_line),
)
