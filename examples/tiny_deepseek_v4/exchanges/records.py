"""Records as JSON, CSV, tables, prose and filled-in forms."""

from __future__ import annotations

import json
from random import Random

from exchanges.base import (
    WORDINGS,
    Draft,
    Exchange,
    Family,
    final_line,
    read_line,
    read_text,
    wording,
    worked,
)
from exchanges.words import CITIES, COLOURS, ITEMS, NAMES, PETS

Record = dict[str, str | int]


FIELDS = {"age": range(11, 100), "city": CITIES, "pet": PETS, "colour": COLOURS}


def records(rng: Random, number: int) -> list[Record]:
    """People: a name and the same two or three other fields each, in any order."""
    keys = rng.sample(list(FIELDS), rng.randint(2, 3))
    return [
        {"name": name} | {key: rng.choice(FIELDS[key]) for key in keys}
        for name in rng.sample(NAMES, number)
    ]


def json_lookup(rng: Random) -> Draft:
    """One person with several fields, or two people with one field each."""
    if rng.random() < 0.6:
        people = records(rng, 1)
    else:
        key = rng.choice(list(FIELDS))
        names = rng.sample(NAMES, 2)
        people = [{"name": name, key: rng.choice(FIELDS[key])} for name in names]
    person = rng.choice(people)
    key = rng.choice([key for key in person if key != "name"])
    shown = json.dumps(people if len(people) > 1 else person)
    name, value = person["name"], json.dumps(person[key])
    question = wording(rng, "json", key=key, name=name, shown=shown)
    reply = worked([f'"name": "{name}", "{key}": {value}'], value)
    return Draft(f"{key} {name} {shown}", (question, reply), str(person[key]).lower())


def csv_lines(people: list[Record]) -> str:
    return "\n".join([",".join(people[0]), *(",".join(map(str, p.values())) for p in people)])


def reformat(rng: Random) -> Draft:
    people = records(rng, 1)
    table, objects = csv_lines(people), json.dumps(people)
    if rng.random() < 0.5:
        question = wording(rng, "csv to json", table=table)
        return Draft(f"json {table}", (question, objects), objects)
    question = wording(rng, "json to csv", objects=objects)
    return Draft(f"csv {table}", (question, table), table)


def read_records(reply: str, exchange: Exchange) -> str | None:
    """Normalised JSON; CSV as it stands."""
    if not exchange.answer.startswith("["):
        return read_text(reply)
    try:
        return json.dumps(json.loads(reply.strip()))
    except ValueError:
        return None


def table(rng: Random) -> Draft:
    """Three people and a column of single digits: a cell, an extreme or a sum."""
    people, item = rng.sample(NAMES, 3), rng.choice(ITEMS)
    values = dict(zip(people, rng.sample(range(1, 10), 3), strict=True))
    kind = rng.choice(("cell", "most", "fewest", "sum"))
    shown = "\n".join([f"name {item}", *(f"{name} {value}" for name, value in values.items())])
    listed = ", ".join(f"{name} {value}" for name, value in values.items())
    key = f"{kind} {item}"
    if kind == "cell":
        name = rng.choice(people)
        ask = rng.choice((f"How many {item} has {name}?", f"Look up {item} for {name}."))
        steps = [f"{name} {values[name]}"]
        answer, key = str(values[name]), f"{name} {item}"
    elif kind == "sum":
        ask = rng.choice((f"How many {item} are there in all?", f"Add up the {item}."))
        first, second, third = values.values()
        answer = str(first + second + third)
        steps = [listed, f"{first}+{second}={first + second}"]
        steps.append(f"{first + second}+{third}={answer}")
    else:
        ask = rng.choice((f"Who has the {kind} {item}?", f"Name who has the {kind} {item}."))
        best = max if kind == "most" else min
        answer = best(values, key=values.__getitem__)
        steps = [listed, f"{kind}: {values[answer]}"]
    question = rng.choice((f"{shown}\n{ask}", f"{ask}\n{shown}"))
    return Draft(f"{key} {values}", (question, worked(steps, answer)), answer.lower())


def form(rng: Random) -> Draft:
    """Facts in prose to put into a form, or a form to put into a note."""
    name, city, pet = rng.choice(NAMES), rng.choice(CITIES), rng.choice(PETS)
    age = rng.randint(11, 99)
    filled = f"Name: {name}\nAge: {age}\nCity: {city}\nPet: {pet}"
    values = {"name": name, "age": age, "city": city, "pet": pet}
    key = f"{name} {age} {city} {pet}"
    if rng.random() < 0.5:
        prose = wording(rng, "prose", **values)
        return Draft(f"form {key}", (wording(rng, "prose to form", prose=prose), filled), filled)
    note = WORDINGS["prose"][0].format(**values)
    return Draft(f"note {key}", (wording(rng, "form to note", filled=filled), note), note)


def read_value(reply: str, _exchange: Exchange) -> str | None:
    """The final answer without quotes."""
    line = final_line(reply)
    return line.strip('"').lower() if line else None


FAMILIES = (
    Family("json", json_lookup, read_value),
    Family("reformat", reformat, read_records),
    Family("table", table, read_line),
    Family("form", form, read_text),
)
