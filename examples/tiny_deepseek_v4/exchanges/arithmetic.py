"""Sums with carried digits, sequences and word problems; every step is written out."""

from random import Random

from exchanges.base import Draft, Family, read_int, read_list, read_text, wording, worked
from exchanges.words import ITEMS, NAMES

COLUMNS = ("ones", "tens", "hundreds")


def digit(number: int, column: int) -> int:
    return number // 10**column % 10


def add_steps(a: int, b: int) -> list[str]:
    """Write ``27 + 45`` as ``ones: 7+5=12 carry 1``, ``tens: 2+4+1=7``."""
    steps, carry = [], 0
    columns = len(str(max(a, b)))
    for i in range(columns):
        terms = f"{digit(a, i)}+{digit(b, i)}" + (f"+{carry}" if i else "")
        total = digit(a, i) + digit(b, i) + carry
        carry = total // 10
        carried = f" carry {carry}" if i < columns - 1 else ""
        steps.append(f"{COLUMNS[i]}: {terms}={total}{carried}")
    return steps


def subtract_steps(a: int, b: int) -> list[str]:
    """Write ``72 - 45`` as ``ones: 2-5 borrow 1, 12-5=7``, ``tens: 7-4-1=2``; needs ``a >= b``."""
    steps, borrow = [], 0
    for i in range(len(str(a))):
        top, subtracted = digit(a, i), digit(b, i) + borrow
        terms = f"-{digit(b, i)}" + (f"-{borrow}" if i else "")
        borrow = int(top < subtracted)
        borrowed = f"{top}{terms} borrow 1, " if borrow else ""
        top += 10 * borrow
        steps.append(f"{COLUMNS[i]}: {borrowed}{top}{terms}={top - subtracted}")
    return steps


def two_numbers(rng: Random) -> tuple[int, int]:
    """Draw two numbers of two digits, rarely of three."""
    low, high = (10, 99) if rng.random() < 0.85 else (100, 999)
    return rng.randint(low, high), rng.randint(low, high)


def addition(rng: Random) -> Draft:
    a, b = two_numbers(rng)
    question = wording(rng, "addition", a=a, b=b)
    low, high = sorted((a, b))
    return worked(f"{low}+{high}", question, add_steps(a, b), str(a + b))


def subtraction(rng: Random) -> Draft:
    b, a = sorted(two_numbers(rng))
    question = wording(rng, "subtraction", a=a, b=b)
    return worked(f"{a}-{b}", question, subtract_steps(a, b), str(a - b))


def multiplication(rng: Random) -> Draft:
    factor, number = rng.randint(2, 9), rng.randint(11, 99)
    question = wording(rng, "multiplication", factor=factor, number=number)
    tens, ones = factor * (number // 10), factor * (number % 10)
    carry = ones // 10
    steps = [
        f"ones: {factor}*{number % 10}={ones} carry {carry}",
        f"tens: {factor}*{number // 10}={tens}, {tens}+{carry}={tens + carry}",
    ]
    return worked(f"{factor}*{number}", question, steps, str(factor * number))


def fact(rng: Random) -> tuple[str, int]:
    """Draw a small sum, difference or product, as other families' working has it, and its value."""
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    large = rng.randint(10, 99)
    return rng.choice((
        (f"{a}+{b}", a + b), (f"{a}+{b}", a + b), (f"{a}+{b}+1", a + b + 1),
        (f"{a + b}-{b}", a), (f"{a + b + 1}-{b}-1", a), (f"{a}*{b}", a * b),
        (f"{large}+{b}", large + b), (f"{large}-{b}", large - b),
    ))  # fmt: skip


def facts(rng: Random) -> Draft:
    """Draw several facts at once: all other sums build on the digits' tables."""
    drawn = [fact(rng) for _ in range(rng.randint(4, 7))]
    listed = ", ".join(terms for terms, _ in drawn)
    question = wording(rng, "facts", shown=listed)
    answer = ", ".join(f"{terms}={value}" for terms, value in drawn)
    return Draft(listed, (question, answer), answer)


def sequence(rng: Random) -> Draft:
    step, length = rng.randint(2, 10), rng.randint(3, 4)
    start, rising = rng.randint(1, 60), rng.random() < 0.6
    if not rising:
        start += step * (length + 3)
        step = -step
    numbers = [str(start + step * i) for i in range(length + 3)]
    listed, answer = ", ".join(numbers[:length]), ", ".join(numbers[length:])
    course = "rising" if rising else "falling"
    question = wording(rng, "sequence", course=course, listed=listed)
    return worked(f"{start},{step},{length}", question, [f"rule: {step:+}"], answer)


def word_problem(rng: Random) -> Draft:
    name, friend = rng.sample(NAMES, 2)
    item = rng.choice(ITEMS)
    a, b, c = rng.randint(11, 49), rng.randint(2, 9), rng.randint(2, 9)
    kind = rng.choice(("gain then give", "bags", "price", "together"))
    if kind == "bags":
        a = rng.randint(1, 9)
    elif kind != "gain then give":
        a = 100 if kind == "price" else 0
    steps, answer = {
        "gain then give": ((f"{a}+{b}={a + b}", f"{a + b}-{c}={a + b - c}"), a + b - c),
        "bags": ((f"{b}*{c}={b * c}", f"{b * c}+{a}={b * c + a}"), b * c + a),
        "price": ((f"{b}*{c}={b * c}", f"{a}-{b * c}={a - b * c}"), a - b * c),
        "together": ((f"{b}+{c}={b + c}", f"{b}+{b + c}={2 * b + c}"), 2 * b + c),
    }[kind]
    story = wording(rng, kind, a=a, b=b, c=c, item=item, name=name, other=friend)
    return worked(f"{kind}:{a},{b},{c}", story, steps, str(answer))


FAMILIES = (
    Family("addition", addition, read_int),
    Family("subtraction", subtraction, read_int),
    Family("multiplication", multiplication, read_int),
    Family("facts", facts, read_text),
    Family("sequence", sequence, read_list),
    Family("word_problem", word_problem, read_int),
)
