"""Units and dates: a rule is stated, then applied."""

from __future__ import annotations

from random import Random

from exchanges.base import Draft, Family, read_line, wording, worked
from exchanges.words import DAYS, MONTHS

# (larger unit, smaller unit, how many of the smaller make one of the larger)
DECIMAL_UNITS = (
    ("km", "m", 1000),
    ("kg", "g", 1000),
    ("m", "cm", 100),
    ("cm", "mm", 10),
    ("l", "ml", 1000),
    ("dollars", "cents", 100),
)
COUNTED_UNITS = (
    ("hours", "minutes", 60),
    ("minutes", "seconds", 60),
    ("weeks", "days", 7),
    ("feet", "inches", 12),
    ("days", "hours", 24),
    ("years", "months", 12),
)


def units(rng: Random) -> Draft:
    if rng.random() < 0.6:
        large, small, factor = rng.choice(DECIMAL_UNITS)
        amount = rng.randint(2, 99)
    else:
        large, small, factor = rng.choice(COUNTED_UNITS)
        amount = rng.randint(2, 9)
    rule = f"1 {large} = {factor} {small}"
    if rng.random() < 0.5:
        given, wanted, step = (amount, large), (amount * factor, small), f"{amount}*{factor}"
    else:
        given, wanted = (amount * factor, small), (amount, large)
        step = f"{amount * factor}/{factor}"
    question = wording(rng, "units", number=given[0], unit=given[1], wanted=wanted[1])
    answer = f"{wanted[0]} {wanted[1]}"
    reply = worked([rule, f"{step}={wanted[0]}"], answer)
    return Draft(f"{given[0]} {given[1]} {wanted[1]}", (question, reply), answer)


def dates(rng: Random) -> Draft:
    kind = rng.choice(("words", "words", "digits", "digits", "after", "before"))
    if kind in ("after", "before"):
        return weekday(rng, kind)
    year, month, day = rng.randint(2010, 2039), rng.randint(1, 12), rng.randint(10, 28)
    digits, words = f"{year}-{month:02d}-{day:02d}", f"{day} {MONTHS[month - 1]} {year}"
    if kind == "words":
        question = wording(rng, "date in words", digits=digits)
        step, answer = f"month {month:02d} is {MONTHS[month - 1]}", words
    else:
        question = wording(rng, "date in digits", words=words)
        step, answer = f"{MONTHS[month - 1]} is month {month:02d}", digits
    return Draft(f"{kind} {digits}", (question, worked([step], answer)), answer.lower())


def weekday(rng: Random, kind: str) -> Draft:
    start, count = rng.randrange(7), rng.randint(2, 7)
    sign = 1 if kind == "after" else -1
    today = DAYS[start]
    question = wording(rng, f"weekday {kind}", count=count, today=today)
    passed = [DAYS[(start + sign * i) % 7] for i in range(1, count + 1)]
    counted = ", ".join(f"{i} {day}" for i, day in enumerate(passed, 1))
    reply = worked([counted], passed[-1])
    return Draft(f"{kind} {today} {count}", (question, reply), passed[-1].lower())


FAMILIES = (Family("units", units, read_line), Family("dates", dates, read_line))
