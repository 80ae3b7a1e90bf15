"""Short Python: say what a program prints, and write or complete a function."""

from __future__ import annotations

import ast
from random import Random
from textwrap import indent

from exchanges.base import WORDINGS, Draft, Exchange, Family, read_number, wording, worked

VARIABLES = ("a", "b", "c", "n", "x", "y")
FUNCTIONS = ("solve", "apply", "check", "work", "compute", "convert", "change", "test")
ARGUMENTS = ("x", "n", "value", "number")
SEQUENCES = ("items", "values", "numbers", "data")


def program(rng: Random) -> tuple[list[str], list[str], int]:
    """Lines of a program, its trace and what it prints; no value leaves 0 to 99."""
    kind = rng.choice(("assign", "loop", "call"))
    if kind == "loop":
        numbers = [rng.randint(1, 9) for _ in range(rng.randint(2, 4))]
        total, item = rng.sample(VARIABLES, 2)
        value, trace = 0, []
        for number in numbers:
            trace.append(f"{total} = {value}+{number} = {value + number}")
            value += number
        lines = [
            f"{total} = 0",
            f"for {item} in {numbers}:",
            f"    {total} = {total} + {item}",
            f"print({total})",
        ]
        return lines, trace, value
    first, second = rng.sample(VARIABLES, 2)
    start, added, factor = rng.randint(1, 9), rng.randint(1, 9), rng.randint(2, 5)
    if kind == "call":
        name = rng.choice(FUNCTIONS)
        symbol = rng.choice("+*")
        result = start + added if symbol == "+" else start * added
        lines = [
            f"def {name}({first}, {second}):",
            f"    return {first} {symbol} {second}",
            f"print({name}({start}, {added}))",
        ]
        trace = [f"{first} = {start}, {second} = {added}", f"{start}{symbol}{added} = {result}"]
        return lines, trace, result
    lines, trace = [f"{first} = {start}"], [f"{first} = {start}"]
    middle = start + added
    lines.append(f"{second} = {first} + {added}")
    trace.append(f"{second} = {start}+{added} = {middle}")
    if rng.random() < 0.5:
        result = start * factor
        lines.append(f"{first} = {first} * {factor}")
        trace.append(f"{first} = {start}*{factor} = {result}")
        shown, value = rng.choice(((first, result), (second, middle)))
    else:
        shown, value = first, middle + start
        lines.append(f"{first} = {second} + {first}")
        trace.append(f"{first} = {middle}+{start} = {value}")
    lines.append(f"print({shown})")
    return lines, trace, value


def trace(rng: Random) -> Draft:
    lines, steps, value = program(rng)
    source = "\n".join(lines)
    question = wording(rng, "trace", source=source)
    return Draft(source, (question, worked(steps, str(value))), str(value))


def function(rng: Random) -> tuple[str, str, str, str]:
    """What a function does in words, its argument, its body, and a key without names."""
    number, other = rng.randint(2, 99), rng.randint(2, 9)
    x, items = rng.choice(ARGUMENTS), rng.choice(SEQUENCES)
    kind = rng.randrange(len(WORDINGS["functions"]))
    texts = WORDINGS["functions"][kind]
    purpose, body = (t.format(x=x, items=items, number=number, other=other) for t in texts)
    argument = items if "{items}" in texts[0] else x
    key = f"{kind} {number}" + (f" {other}" if "{other}" in texts[0] else "")
    return purpose, argument, body, key


def write(rng: Random) -> Draft:
    purpose, argument, body, key = function(rng)
    name = rng.choice(FUNCTIONS)
    header = f"def {name}({argument}):"
    indented = indent(body, "    ")
    full = f"{header}\n{indented}"
    answer = normal_form(full)
    if rng.random() < 0.4:
        start = f'{header}\n    """A function that {purpose}."""'
        question = wording(rng, "complete a function", start=start)
        return Draft(key, (question, indented), answer, header)
    question = wording(rng, "write a function", argument=argument, name=name, purpose=purpose)
    return Draft(key, (question, full), answer, header)


def normal_form(source: str) -> str | None:
    """The syntax tree of a source as text; layout does not count. ``None``: no Python."""
    try:
        return ast.dump(ast.parse(source))
    except (SyntaxError, ValueError):
        return None


def read_function(reply: str, exchange: Exchange) -> str | None:
    """The function of a reply, which may start at its header or continue after it."""
    source = reply.replace("```python", "").replace("```", "").rstrip()
    if not source.lstrip().startswith("def ") and exchange.header:
        source = f"{exchange.header}\n{source}"
    return normal_form(source.strip("\n"))


FAMILIES = (Family("trace", trace, read_number), Family("code", write, read_function))
