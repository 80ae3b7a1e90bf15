"""Units and dates: a rule is stated, then applied."""

from random import Random

from exchanges.base import Draft, Family, read_line, wording, worked
from exchanges.words import DAYS, MONTHS

# (larger unit, smaller unit, how many of the smaller make one of the larger)
# fmt: off
DECIMAL_UNITS = (("km", "m", 1000), ("kg", "g", 1000), ("m", "cm", 100),
                 ("cm", "mm", 10), ("l", "ml", 1000), ("dollars", "cents", 100))
COUNTED_UNITS = (("hours", "minutes", 60), ("minutes", "seconds", 60), ("weeks", "days", 7),
                 ("feet", "inches", 12), ("days", "hours", 24), ("years", "months", 12))
# fmt: on


def units(rng: Random) -> Draft:
    if rng.random() < 0.6:
        large, small, factor = rng.choice(DECIMAL_UNITS)
        amount = rng.randint(2, 99)
    else:
        large, small, factor = rng.choice(COUNTED_UNITS)
        amount = rng.randint(2, 9)
    small_amount = amount * factor
    if rng.random() < 0.5:
        (number, unit), (result, result_unit) = (amount, large), (small_amount, small)
        step = f"{amount}*{factor}={small_amount}"
    else:
        (number, unit), (result, result_unit) = (small_amount, small), (amount, large)
        step = f"{small_amount}/{factor}={amount}"
    question = wording(rng, "units", number=number, unit=unit, wanted=result_unit)
    steps = [f"1 {large} = {factor} {small}", step]
    return worked(f"{number} {unit} {result_unit}", question, steps, f"{result} {result_unit}")


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
    return worked(f"{kind} {digits}", question, [step], answer)


def weekday(rng: Random, kind: str) -> Draft:
    start, count = rng.randrange(7), rng.randint(2, 7)
    sign = 1 if kind == "after" else -1
    today = DAYS[start]
    question = wording(rng, f"weekday {kind}", count=count, today=today)
    days = [DAYS[(start + sign * i) % 7] for i in range(1, count + 1)]
    counted = ", ".join(f"{i} {day}" for i, day in enumerate(days, 1))
    return worked(f"{kind} {today} {count}", question, [counted], days[-1])


FAMILIES = (Family("units", units, read_line), Family("dates", dates, read_line))
