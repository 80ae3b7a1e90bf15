"""Short Python: say what a program prints, and write or complete a function."""

import ast
from random import Random
from textwrap import indent

from exchanges.base import WORDINGS, Draft, Exchange, Family, read_int, wording, worked

VARIABLES = ("a", "b", "c", "n", "x", "y")
FUNCTIONS = ("solve", "apply", "check", "work", "compute", "convert", "change", "test")
ARGUMENTS = ("x", "n", "value", "number")
SEQUENCES = ("items", "values", "numbers", "data")


def program(rng: Random) -> tuple[list[str], list[str], int]:
    """Draw the lines of a program, its trace and what it prints; no value leaves 0 to 99."""
    kind = rng.choice(("assign", "loop", "call"))
    if kind == "loop":
        numbers = [rng.randint(1, 9) for _ in range(rng.randint(2, 4))]
        total, item = rng.sample(VARIABLES, 2)
        value, steps = 0, []
        for number in numbers:
            steps.append(f"{total} = {value}+{number} = {value + number}")
            value += number
        lines = [f"{total} = 0", f"for {item} in {numbers}:", f"    {total} = {total} + {item}"]
        return [*lines, f"print({total})"], steps, value
    first, second = rng.sample(VARIABLES, 2)
    start, addend, factor = rng.randint(1, 9), rng.randint(1, 9), rng.randint(2, 5)
    if kind == "call":
        name, symbol = rng.choice(FUNCTIONS), rng.choice("+*")
        value = start + addend if symbol == "+" else start * addend
        function = [f"def {name}({first}, {second}):", f"    return {first} {symbol} {second}"]
        steps = [f"{first} = {start}, {second} = {addend}", f"{start}{symbol}{addend} = {value}"]
        return [*function, f"print({name}({start}, {addend}))"], steps, value
    total = start + addend
    lines = [f"{first} = {start}", f"{second} = {first} + {addend}"]
    steps = [f"{first} = {start}", f"{second} = {start}+{addend} = {total}"]
    if rng.random() < 0.5:
        product = start * factor
        lines.append(f"{first} = {first} * {factor}")
        steps.append(f"{first} = {start}*{factor} = {product}")
        printed, value = rng.choice(((first, product), (second, total)))
    else:
        printed, value = first, total + start
        lines.append(f"{first} = {second} + {first}")
        steps.append(f"{first} = {total}+{start} = {value}")
    return [*lines, f"print({printed})"], steps, value


def trace(rng: Random) -> Draft:
    lines, steps, value = program(rng)
    source = "\n".join(lines)
    return worked(source, wording(rng, "trace", source=source), steps, str(value))


def write(rng: Random) -> Draft:
    """Ask for a function; the key leaves out the names in it."""
    number, operand = rng.randint(2, 99), rng.randint(2, 9)
    x, items = rng.choice(ARGUMENTS), rng.choice(SEQUENCES)
    kind = rng.randrange(len(WORDINGS["functions"]))
    texts = WORDINGS["functions"][kind]
    purpose, body = (t.format(x=x, items=items, number=number, other=operand) for t in texts)
    key = f"{kind} {number}" + (f" {operand}" if "{other}" in texts[0] else "")
    name, argument = rng.choice(FUNCTIONS), items if "{items}" in texts[0] else x
    header, body = f"def {name}({argument}):", indent(body, "    ")
    answer = normal_form(f"{header}\n{body}")
    if rng.random() < 0.4:
        start = f'{header}\n    """A function that {purpose}."""'
        question = wording(rng, "complete a function", start=start)
        return Draft(key, (question, body), answer, header)
    question = wording(rng, "write a function", argument=argument, name=name, purpose=purpose)
    return Draft(key, (question, f"{header}\n{body}"), answer, header)


def normal_form(source: str) -> str | None:
    """Return the syntax tree of a source as text, without its layout; None if it is no Python."""
    try:
        return ast.dump(ast.parse(source))
    except (SyntaxError, ValueError):
        return None


def read_function(reply: str, exchange: Exchange) -> str | None:
    """Return the function of a reply, which may start at its header or continue after it."""
    source = reply.replace("```python", "").replace("```", "").rstrip()
    if not source.lstrip().startswith("def ") and exchange.header:
        source = f"{exchange.header}\n{source}"
    return normal_form(source.strip("\n"))


FAMILIES = (Family("trace", trace, read_int), Family("code", write, read_function))
