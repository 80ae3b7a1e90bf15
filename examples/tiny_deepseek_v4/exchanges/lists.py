"""Short lists: sort, filter, count, and put into order by clues."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from exchanges.base import Draft, Family, read_line, read_list, worked
from exchanges.words import COLOURS, NAMES, PETS, THINGS


def joined(values) -> str:
    return ", ".join(map(str, values))


def sort(rng: Random) -> Draft:
    numbers = rng.sample(range(1, 100), rng.randint(3, 5))
    up = rng.random() < 0.5
    shown, result = joined(numbers), joined(sorted(numbers, reverse=not up))
    order = rng.choice(
        ("from smallest to largest", "in rising order")
        if up
        else ("from largest to smallest", "in falling order")
    )
    question = rng.choice(
        (
            f"Sort {order}: {shown}",
            f"Put these numbers {order}: {shown}",
            f"Here are some numbers: {shown}. List them {order}.",
            f"Arrange {shown} {order}.",
        )
    )
    key = f"{'up' if up else 'down'} {sorted(numbers)}"
    return Draft(key, (question, worked([], result)), result)


def filter_list(rng: Random) -> Draft:
    numbers = rng.sample(range(1, 100), rng.randint(3, 6))
    limit = rng.randrange(10, 91, 10)
    kind = rng.choice(("above", "below", "even", "odd"))
    keep = {
        "above": lambda n: n > limit,
        "below": lambda n: n < limit,
        "even": lambda n: n % 2 == 0,
        "odd": lambda n: n % 2 == 1,
    }[kind]
    wanted = {
        "above": rng.choice((f"greater than {limit}", f"above {limit}")),
        "below": rng.choice((f"less than {limit}", f"below {limit}")),
        "even": "that are even",
        "odd": "that are odd",
    }[kind]
    shown = joined(numbers)
    question = rng.choice(
        (
            f"Keep the numbers {wanted}: {shown}",
            f"Which of these are numbers {wanted}? {shown}",
            f"From {shown} pick all numbers {wanted}.",
            f"Filter the list {shown}: leave only numbers {wanted}.",
        )
    )
    steps = joined(f"{n} {'yes' if keep(n) else 'no'}" for n in numbers)
    result = joined(n for n in numbers if keep(n)) or "none"
    rule = f"{kind} {limit}" if kind in ("above", "below") else kind
    return Draft(f"{rule} {numbers}", (question, worked([steps], result)), result)


def count(rng: Random) -> Draft:
    pool = rng.sample(rng.choice((COLOURS, PETS, THINGS)), 3)
    words = [rng.choice(pool) for _ in range(rng.randint(4, 8))]
    shown = joined(words)
    seen: dict[str, int] = {}
    steps = []
    for word in words:
        seen[word] = seen.get(word, 0) + 1
        steps.append(f"{word} {seen[word]}")
    if rng.random() < 0.5:
        target = rng.choice(list(seen))
        question = rng.choice(
            (
                f"How many times is {target} in this list? {shown}",
                f"Count {target} in: {shown}",
                f"Look at {shown}. How often does {target} appear?",
            )
        )
        result, key = f"{target} {seen[target]}", f"{target} {shown}"
    else:
        question = rng.choice(
            (
                f"Count each word: {shown}",
                f"Group and count: {shown}",
                f"How often does each word appear? {shown}",
            )
        )
        result, key = joined(f"{word} {number}" for word, number in seen.items()), f"each {shown}"
    return Draft(key, (question, worked([joined(steps)], result)), result)


def ordering(rng: Random) -> Draft:
    people = rng.sample(NAMES, rng.choice((3, 3, 4)))
    more, most, least = rng.choice(
        (
            ("taller", "tallest", "shortest"),
            ("older", "oldest", "youngest"),
            ("faster", "fastest", "slowest"),
        )
    )
    clues = [f"{a} is {more} than {b}." for a, b in pairwise(people)]
    rng.shuffle(clues)
    asked_most = rng.random() < 0.5
    asked = most if asked_most else least
    question = rng.choice(
        (
            f"{' '.join(clues)} Who is the {asked}?",
            f"Who is the {asked}? {' '.join(clues)}",
            f"{' '.join(clues)} Name the {asked} one.",
        )
    )
    answer = people[0] if asked_most else people[-1]
    key = f"{more} {asked} {' '.join(people)} {' '.join(clues)}"
    return Draft(key, (question, worked([" > ".join(people)], answer)), answer.lower())


FAMILIES = (
    Family("sort", sort, read_list),
    Family("filter", filter_list, read_list),
    Family("count", count, read_list),
    Family("ordering", ordering, read_line),
)
