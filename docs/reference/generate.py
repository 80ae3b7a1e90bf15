"""Write the pages of docs/reference/ from the code: ``make reference``.

``tests/unit/test_seams.py`` compares the committed pages with what this makes.
"""

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from docs.reference import sglang_uses
from docs.reference.variables import VARIABLES
from eval import demo
from eval.options import parser as eval_parser
from sglang_hyperdflash.cli import build_parser
from sglang_hyperdflash.serving.startup.checks import UNSUPPORTED
from sglang_hyperdflash.training.recipe import Schedule
from tests.unit.serving.parameters import PARAMETERS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
GENERATED = "<!-- Generated from the code by `make reference`; do not edit. -->"
BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most"}
TYPES = {"number": "number", "integer": "whole number", "boolean": "`true` or `false`"}
TYPES |= {"string": "text", "object": "table"}
_DEFAULT = re.compile(r"^default: (.*)$|^(.*) \(default: (.*)\)$", re.S)


def code(text: object) -> str:
    return f"`{text}`"


def cell(value: object) -> str:
    """Return a value as one Markdown table cell."""
    return " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;")


def table(head: tuple[str, ...], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table."""
    lines = (head, ["---"] * len(head), *rows)
    return "".join(f"| {' | '.join(map(cell, line))} |\n" for line in lines)


def page(title: str, *parts: str) -> str:
    return "\n".join([f"{GENERATED}\n# {title}\n", *parts])


def option(action: argparse.Action) -> tuple[str, str, str]:
    """Return one option's row: how it is typed, its default and its meaning."""
    meaning = (action.help or "").replace("%%", "%")
    default = action.default
    if stated := _DEFAULT.match(meaning):
        default, meaning = stated[1] or stated[3], stated[2] or ""
    elif action.required:
        default = "required"
    elif action.nargs == 0:
        default = "off"
    elif default is None:
        default = "none"
    elif isinstance(default, list | tuple):
        default = code(" ".join(map(str, default)))
    else:
        absolute = isinstance(default, Path) and default.is_absolute()
        default = code(default.relative_to(ROOT) if absolute else default)
    if action.choices:
        meaning += f"{'; ' if meaning else ''}one of {', '.join(map(code, action.choices))}"
    name = ", ".join(action.option_strings) or action.dest
    if action.nargs != 0 and action.option_strings:
        name += f" {action.metavar or action.dest.upper()}{' ...' if action.nargs == '+' else ''}"
    return code(name), default, meaning


def command_line() -> str:
    sections, parsers = [], []
    for parser in (build_parser(), eval_parser()):
        (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        parsers += commands.choices.values()
    for command in (*parsers, demo.parser()):
        options = [a for a in command._actions if not isinstance(a, argparse._HelpAction)]
        about = " ".join(command.description.replace("``", "`").split())
        rows = table(("option", "default", "meaning"), map(option, options))
        sections.append(f"## {command.prog}\n\n{about}\n\n{rows}")
    return page("Command line", *sections)


def allowed(field: dict[str, Any]) -> str:
    """Return in words what a field of a JSON schema may hold."""
    if "anyOf" in field:
        return " or ".join(allowed(kind) for kind in field["anyOf"] if kind.get("type") != "null")
    if "enum" in field:
        return " or ".join(code(json.dumps(v)) for v in field["enum"] if v is not None)
    if field["type"] == "array":
        return f"list: {allowed(field['items'])}" if "type" in field["items"] else "tables"
    bounds = [f"{words} {field[name]:g}" for name, words in BOUNDS.items() if name in field]
    return " ".join([TYPES[field["type"]], " and ".join(bounds)]).strip()


def section(title: str, schema: dict[str, Any]) -> str:
    """Return the section on the fields of one JSON schema, for the page of the training file."""
    rows = []
    for name, field in schema["properties"].items():
        default = "required" if name in schema.get("required", ()) else "none"
        if field.get("default") not in (None, {}):
            default = code(json.dumps(field["default"]))
        if "$ref" not in field:  # a reference is a section of its own
            rows.append((code(name), default, allowed(field), field["description"]))
    return f"## {title}\n\n" + table(("field", "default", "value", "meaning"), rows)


def training_file() -> str:
    schema = TypeAdapter(Schedule).json_schema()
    about = (
        "TOML. Relative paths count from the file's folder; an unknown field is an error. A stage "
        "has exactly one of\n`epochs`, `steps` and `minutes`.\n"
    )
    objective, stage = (schema["$defs"][name] for name in ("Objective", "Stage"))
    parts = {"Top level": schema, "[objective]": objective, "[[stage]]": stage}
    return page("Training file", about, *(section(title, part) for title, part in parts.items()))


def environment() -> str:
    rows = [(code(v.name), v.default, v.reader, v.meaning) for v in VARIABLES]
    return page("Environment variables", table(("variable", "default", "read by", "meaning"), rows))


def sampling_parameters() -> str:
    about = (
        "*Exact*: the same output distribution as without speculation; with a seed the same tokens "
        "too, on\n[two conditions](../sampling.md#requests-with-a-seed). *Host*: SGLang's own code "
        "on the accepted tokens.\n"
    )
    rows = [(code(name), how, code(test)) for name, (how, test) in PARAMETERS.items()]
    return page("Sampling parameters", about, table(("parameter", "served", "tested by"), rows))


def refused_arguments() -> str:
    about = (
        "With any drafter and target; [others](../serving.md#refused-arguments) depend on these.\n"
    )
    rows = [(code(f"--{name.replace('_', '-')}"), why) for name, why in UNSUPPORTED.items()]
    return page("Refused arguments", about, table(("argument", "why, and what to do"), rows))


def hooks() -> str:
    about = (
        "For maintainers, when SGLang changes: every place where the package touches it, found in "
        "the code.\n\n"
        "* *Hook*: ours is called *around* or *after* a function of SGLang, or *replaces* it. At "
        "start the function's\n  source is compared with that of the pinned SGLang.\n"
        "* *Override*: a class of ours has a method of SGLang's, too. A test compares their "
        "parameters.\n"
        "* *Field*: an attribute of SGLang's that is private, or that our code sets.\n"
    )
    head = ("SGLang's function", "reason", "kind", "ours")
    rows = ((code(name), why, kind, code(place)) for name, why, kind, place in sglang_uses.hooks())
    parts = [f"## Hooks\n\n{table(head, rows)}"]
    overridden = ((name, sglang_uses.location(cls)) for name, cls, *_ in sglang_uses.overrides())
    rows = (map(code, names) for names in sorted(overridden))
    parts.append("## Overrides\n\n" + table(("SGLang's method", "ours"), rows))
    for title, uses in (("Imports", sglang_uses.imports()), ("Fields", sglang_uses.fields())):
        rows = ((code(name), ", ".join(map(code, sorted(uses[name])))) for name in sorted(uses))
        parts.append(f"## {title}\n\n" + table(("SGLang's name", "files"), rows))
    return page("Uses of SGLang", about, *parts)


MAKERS = (command_line, training_file, environment, sampling_parameters, refused_arguments, hooks)
PAGES = {f"{make.__name__}.md": make for make in MAKERS}


if __name__ == "__main__":
    for name, make in PAGES.items():
        (HERE / name).write_text(make(), encoding="utf-8")
