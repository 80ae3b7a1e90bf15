"""Records as JSON, CSV, tables, prose and filled-in forms."""

import json
from random import Random

from exchanges.base import (
    WORDINGS,
    Draft,
    Exchange,
    Family,
    read_line,
    read_text,
    read_value,
    wording,
    worked,
)
from exchanges.words import CITIES, COLOURS, ITEMS, NAMES, PETS

Record = dict[str, str | int]
FIELDS = {"age": range(11, 100), "city": CITIES, "pet": PETS, "colour": COLOURS}


def records(rng: Random, number: int) -> list[Record]:
    """Draw people, each with a name and the same two or three other fields, in any order."""
    keys = rng.sample(list(FIELDS), rng.randint(2, 3))
    return [
        {"name": name} | {key: rng.choice(FIELDS[key]) for key in keys}
        for name in rng.sample(NAMES, number)
    ]


def json_lookup(rng: Random) -> Draft:
    """Ask for a field of one person with several, or of two people with one field each."""
    if rng.random() < 0.6:
        people = records(rng, 1)
    else:
        key = rng.choice(list(FIELDS))
        people = [{"name": name, key: rng.choice(FIELDS[key])} for name in rng.sample(NAMES, 2)]
    person = rng.choice(people)
    key = rng.choice([key for key in person if key != "name"])
    source = json.dumps(people if len(people) > 1 else person)
    name, value = person["name"], json.dumps(person[key])
    question = wording(rng, "json", key=key, name=name, shown=source)
    return worked(
        f"{key} {name} {source}", question, [f'"name": "{name}", "{key}": {value}'], value
    )


def reformat(rng: Random) -> Draft:
    (person,) = records(rng, 1)
    values = ",".join(map(str, person.values()))
    table, objects = f"{','.join(person)}\n{values}", json.dumps([person])
    if rng.random() < 0.5:
        question = wording(rng, "csv to json", table=table)
        return Draft(f"json {table}", (question, objects), objects)
    question = wording(rng, "json to csv", objects=objects)
    return Draft(f"csv {table}", (question, table), table)


def read_records(reply: str, exchange: Exchange) -> str | None:
    """Return JSON in a normal form, and CSV as it stands."""
    if not exchange.answer.startswith("["):
        return read_text(reply, exchange)
    try:
        return json.dumps(json.loads(reply.strip()))
    except ValueError:
        return None


def table(rng: Random) -> Draft:
    """Ask for a cell, an extreme or the sum of a column of three people's single digits."""
    people, item = rng.sample(NAMES, 3), rng.choice(ITEMS)
    values = dict(zip(people, rng.sample(range(1, 10), 3), strict=True))
    kind = rng.choice(("cell", "most", "fewest", "sum"))
    rows = [f"{name} {value}" for name, value in values.items()]
    key = f"{kind} {item}"
    if kind == "cell":
        name = rng.choice(people)
        request = rng.choice((f"How many {item} has {name}?", f"Look up {item} for {name}."))
        steps = [f"{name} {values[name]}"]
        answer, key = str(values[name]), f"{name} {item}"
    elif kind == "sum":
        request = rng.choice((f"How many {item} are there in all?", f"Add up the {item}."))
        first, second, third = values.values()
        partial, answer = first + second, str(first + second + third)
        steps = [", ".join(rows), f"{first}+{second}={partial}", f"{partial}+{third}={answer}"]
    else:
        request = rng.choice((f"Who has the {kind} {item}?", f"Name who has the {kind} {item}."))
        extreme = max if kind == "most" else min
        answer = extreme(values, key=values.__getitem__)
        steps = [", ".join(rows), f"{kind}: {values[answer]}"]
    text = "\n".join([f"name {item}", *rows])
    question = rng.choice((f"{text}\n{request}", f"{request}\n{text}"))
    return worked(f"{key} {values}", question, steps, answer)


def form(rng: Random) -> Draft:
    """Ask to put facts in prose into a form, or a form into a note."""
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


FAMILIES = (
    Family("json", json_lookup, read_value),
    Family("reformat", reformat, read_records),
    Family("table", table, read_line),
    Family("form", form, read_text),
)
