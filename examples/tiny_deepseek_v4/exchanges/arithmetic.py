"""Sums with carried digits, sequences and word problems; every step is written out."""

from __future__ import annotations

from random import Random

from exchanges.base import Draft, Family, read_list, read_number, read_text, wording, worked
from exchanges.words import ITEMS, NAMES

COLUMNS = ("ones", "tens", "hundreds")


def digit(number: int, column: int) -> int:
    return number // 10**column % 10


def add_steps(a: int, b: int) -> list[str]:
    """``27 + 45`` as ``ones: 7+5=12 carry 1``, ``tens: 2+4+1=7``."""
    steps, carry = [], 0
    columns = len(str(max(a, b)))
    for i in range(columns):
        terms = f"{digit(a, i)}+{digit(b, i)}" + (f"+{carry}" if i else "")
        total = digit(a, i) + digit(b, i) + carry
        carry = total // 10
        last = i == columns - 1
        steps.append(f"{COLUMNS[i]}: {terms}={total}" + ("" if last else f" carry {carry}"))
    return steps


def subtract_steps(a: int, b: int) -> list[str]:
    """``72 - 45`` as ``ones: 2-5 borrow 1, 12-5=7``, ``tens: 7-4-1=2``; needs ``a >= b``."""
    steps, borrow = [], 0
    for i in range(len(str(a))):
        top, taken = digit(a, i), digit(b, i) + borrow
        terms = f"-{digit(b, i)}" + (f"-{borrow}" if i else "")
        borrow = int(top < taken)
        lent = f"{top}{terms} borrow 1, " if borrow else ""
        top += 10 * borrow
        steps.append(f"{COLUMNS[i]}: {lent}{top}{terms}={top - taken}")
    return steps


def two_numbers(rng: Random) -> tuple[int, int]:
    """Two numbers of two digits, rarely of three."""
    low, high = (10, 99) if rng.random() < 0.85 else (100, 999)
    return rng.randint(low, high), rng.randint(low, high)


def addition(rng: Random) -> Draft:
    a, b = two_numbers(rng)
    question = wording(rng, "addition", a=a, b=b)
    low, high = sorted((a, b))
    return Draft(f"{low}+{high}", (question, worked(add_steps(a, b), str(a + b))), str(a + b))


def subtraction(rng: Random) -> Draft:
    b, a = sorted(two_numbers(rng))
    question = wording(rng, "subtraction", a=a, b=b)
    return Draft(f"{a}-{b}", (question, worked(subtract_steps(a, b), str(a - b))), str(a - b))


def multiplication(rng: Random) -> Draft:
    factor, number = rng.randint(2, 9), rng.randint(11, 99)
    question = wording(rng, "multiplication", factor=factor, number=number)
    tens, ones = number // 10, number % 10
    low = factor * ones
    carry = low // 10
    steps = [
        f"ones: {factor}*{ones}={low} carry {carry}",
        f"tens: {factor}*{tens}={factor * tens}, {factor * tens}+{carry}={factor * tens + carry}",
    ]
    result = str(factor * number)
    return Draft(f"{factor}*{number}", (question, worked(steps, result)), result)


def fact(rng: Random) -> str:
    """One small sum, difference or product, such as the working of other families is made of."""
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    large = rng.randint(10, 99)
    return rng.choice(
        (
            f"{a}+{b}",
            f"{a}+{b}",
            f"{a}+{b}+1",
            f"{a + b}-{b}",
            f"{a + b + 1}-{b}-1",
            f"{a}*{b}",
            f"{large}+{b}",
            f"{large}-{b}",
        )
    )


def value(terms: str) -> int:
    """The value of a fact whose signs are all of one kind."""
    if "*" in terms:
        a, b = map(int, terms.split("*"))
        return a * b
    return sum(map(int, terms.replace("-", "+-").split("+")))


def facts(rng: Random) -> Draft:
    """Several at once: all other sums build on the digits' tables."""
    asked = [fact(rng) for _ in range(rng.randint(4, 7))]
    shown = ", ".join(asked)
    question = wording(rng, "facts", shown=shown)
    answer = ", ".join(f"{terms}={value(terms)}" for terms in asked)
    return Draft(shown, (question, answer), answer)


def sequence(rng: Random) -> Draft:
    step, length = rng.randint(2, 10), rng.randint(3, 4)
    start, up = rng.randint(1, 60), rng.random() < 0.6
    signed = step if up else -step
    if not up:
        start += step * (length + 3)
    shown = [start + signed * i for i in range(length)]
    following = [shown[-1] + signed * (i + 1) for i in range(3)]
    listed, course = ", ".join(map(str, shown)), "rising" if up else "falling"
    question = wording(rng, "sequence", course=course, listed=listed)
    steps = [f"rule: {'+' if up else '-'}{step}"]
    answer = ", ".join(map(str, following))
    return Draft(f"{start},{signed},{length}", (question, worked(steps, answer)), answer)


def word_problem(rng: Random) -> Draft:
    name, other = rng.sample(NAMES, 2)
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
    story = wording(rng, kind, a=a, b=b, c=c, item=item, name=name, other=other)
    return Draft(f"{kind}:{a},{b},{c}", (story, worked(steps, str(answer))), str(answer))


FAMILIES = (
    Family("addition", addition, read_number),
    Family("subtraction", subtraction, read_number),
    Family("multiplication", multiplication, read_number),
    Family("facts", facts, read_text),
    Family("sequence", sequence, read_list),
    Family("word_problem", word_problem, read_number),
)
