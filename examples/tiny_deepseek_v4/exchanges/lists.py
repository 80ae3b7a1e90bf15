"""Short lists: sort, filter, count, and put into order by clues."""

from itertools import pairwise
from random import Random

from exchanges.base import Draft, Family, read_int, read_items, read_line, read_set, wording, worked
from exchanges.words import COLOURS, NAMES, PETS, THINGS

DIGITS, LETTERS = "0123456789", "abcdefghij"
COMPARISONS = (
    ("taller", "shorter", "tallest", "shortest"),
    ("older", "younger", "oldest", "youngest"),
    ("faster", "slower", "fastest", "slowest"),
)


def sort(rng: Random) -> Draft:
    """Sort single digits or letters, none of which comes twice."""
    values = rng.sample(rng.choice((DIGITS, LETTERS)), rng.randint(3, 5))
    rising = rng.random() < 0.5
    listed, result = " ".join(values), " ".join(sorted(values, reverse=not rising))
    orders = ("forwards", "in rising order") if rising else ("backwards", "in falling order")
    question = wording(rng, "sort", order=rng.choice(orders), shown=listed)
    return worked(f"{'up' if rising else 'down'} {sorted(values)}", question, [], result)


def filter_list(rng: Random) -> Draft:
    """Test each digit, the smallest first, then list those that pass."""
    values = rng.sample(range(10), rng.randint(3, 5))
    limit = rng.randint(2, 7)
    kind = rng.choice(("above", "below", "even", "odd"))
    passes = {
        "above": lambda n: n > limit,
        "below": lambda n: n < limit,
        "even": lambda n: n % 2 == 0,
        "odd": lambda n: n % 2 == 1,
    }[kind]
    rule = f"{kind} {limit}" if kind in ("above", "below") else kind
    question = wording(rng, "filter", rule=rule, shown=" ".join(map(str, values)))
    values.sort()
    tests = ", ".join(f"{n} {'yes' if passes(n) else 'no'}" for n in values)
    result = " ".join(str(n) for n in values if passes(n)) or "none"
    return worked(f"{rule} {values}", question, [tests], result)


def count(rng: Random) -> Draft:
    """Count a word in a list, which is numbered so that the working need not keep count."""
    pool = rng.sample(rng.choice((COLOURS, PETS, THINGS)), 3)
    words = [rng.choice(pool) for _ in range(rng.randint(3, 6))]
    target, total, steps = rng.choice(pool), 0, []
    for position, word in enumerate(words, 1):
        total += word == target
        steps.append(f"{position} {word} {'yes' if word == target else 'no'} {total}")
    listed = ", ".join(f"{position} {word}" for position, word in enumerate(words, 1))
    question = wording(rng, "count", shown=listed, wanted=target)
    working = f"{target}: {', '.join(steps)}"
    return worked(f"{target} in {listed}", question, [working], str(total))


def ordering(rng: Random) -> Draft:
    """Ask for one of the ends of a chain of comparisons in either direction."""
    people = rng.sample(NAMES, rng.choice((3, 3, 4)))
    more, less, most, least = rng.choice(COMPARISONS)
    falling = rng.random() < 0.5
    comparison, sign = (more, " > ") if falling else (less, " < ")
    clues = " ".join(f"{a} is {comparison} than {b}." for a, b in pairwise(people))
    asks_most = rng.random() < 0.5
    superlative = most if asks_most else least
    question = wording(rng, "ordering", asked=superlative, clues=clues)
    answer = people[0] if asks_most == falling else people[-1]
    chain = sign.join(people)
    return worked(f"{superlative} {chain}", question, [chain], answer)


FAMILIES = (
    Family("sort", sort, read_items),
    Family("filter", filter_list, read_set),
    Family("count", count, read_int),
    Family("ordering", ordering, read_line),
)
