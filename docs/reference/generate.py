"""Writes the pages of docs/reference/ from the code: ``make reference``.

``tests/unit/test_seams.py`` compares the committed pages with what this makes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from docs.reference.sglang_uses import uses
from eval.options import parser as eval_parser
from sglang_hyperdflash.cli import build_parser
from sglang_hyperdflash.tools.environment import VARIABLES
from sglang_hyperdflash.training.recipe import Schedule
from tests.unit.serving.parameters import PARAMETERS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
GENERATED = "<!-- Generated from the code by `make reference`; do not edit. -->\n"
_DEFAULT = re.compile(r"^default: (.*)$|^(.*) \(default: (.*)\)$", re.S)


def cell(text: object) -> str:
    """A value as one Markdown table cell."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def code(text: object) -> str:
    return f"`{text}`"


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell(value) for value in line)} |\n" for line in lines)


def page(title: str, *parts: str) -> str:
    """A generated page."""
    return "\n".join([GENERATED + f"# {title}\n", *parts])


# --- command line --------------------------------------------------------------------------------


def shown(value: object) -> str:
    """An option's default as a user types it."""
    if isinstance(value, list | tuple):
        return code(" ".join(map(str, value)))
    if isinstance(value, Path) and value.is_absolute():
        value = value.relative_to(ROOT)
    return code(value)


def option(action: argparse.Action) -> tuple[str, str, str]:
    """One option's row: how it is typed, its default, its meaning."""
    text = (action.help or "").replace("%%", "%")
    told = _DEFAULT.match(text)
    if told:
        default = told[1] or told[3]
        text = told[2] or ""
    elif action.required:
        default = "required"
    elif action.nargs == 0:
        default = "off"
    else:
        default = "none" if action.default is None else shown(action.default)
    if action.choices:
        text += f"{'; ' if text else ''}one of {', '.join(map(code, action.choices))}"
    name = ", ".join(action.option_strings) or action.dest
    if action.nargs != 0 and action.option_strings:
        name += f" {action.metavar or action.dest.upper()}"
        name += " ..." if action.nargs == "+" else ""
    return code(name), default, text


def command(parser: argparse.ArgumentParser, help_text: str) -> str:
    """One command's section."""
    rows = [option(a) for a in parser._actions if not isinstance(a, argparse._HelpAction)]
    about = " ".join((parser.description or help_text).replace("``", "`").split())
    return f"## {parser.prog}\n\n{about}\n\n" + table(("option", "default", "meaning"), rows)


def commands(parser: argparse.ArgumentParser) -> list[str]:
    """The sections of a parser's commands."""
    (choice,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    help_texts = {action.dest: action.help for action in choice._choices_actions}
    return [command(sub, help_texts[name]) for name, sub in choice.choices.items()]


def command_line() -> str:
    return page("Command line", *commands(build_parser()), *commands(eval_parser()))


# --- training file -------------------------------------------------------------------------------


def allowed(field: dict[str, Any]) -> str:
    """What a field of a JSON schema may hold, in words."""
    if "anyOf" in field:
        return " or ".join(allowed(one) for one in field["anyOf"] if one.get("type") != "null")
    if "enum" in field:
        values = [value for value in field["enum"] if value is not None]
        return " or ".join(code(json.dumps(value)) for value in values)
    if field["type"] == "array":
        return f"list: {allowed(field['items'])}" if "type" in field["items"] else "tables"
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most"}
    bounds = [f"{word} {field[name]:g}" for name, word in words.items() if name in field]
    names = {"number": "number", "integer": "whole number", "boolean": "`true` or `false`"}
    names |= {"string": "text", "object": "table"}
    return " ".join([names[field["type"]], " and ".join(bounds)]).strip()


def fields(struct: dict[str, Any]) -> str:
    """The table of one section of the training file."""
    rows = []
    for name, field in struct["properties"].items():
        if "$ref" in field:  # a section of its own
            continue
        default = "required" if name in struct.get("required", ()) else "none"
        if field.get("default") not in (None, {}):
            default = code(json.dumps(field["default"]))
        rows.append((code(name), default, allowed(field), field["description"]))
    return table(("field", "default", "value", "meaning"), rows)


def training_file() -> str:
    file = TypeAdapter(Schedule).json_schema()
    sections = {"Top level": file}
    sections |= {"[objective]": file["$defs"]["Objective"], "[[stage]]": file["$defs"]["Stage"]}
    about = (
        "TOML. Relative paths count from the file's folder; an unknown field is an error. A stage "
        "has exactly one of\n`epochs`, `steps` and `minutes`.\n"
    )
    parts = [f"## {title}\n\n" + fields(section) for title, section in sections.items()]
    return page("Training file", about, *parts)


# --- the other pages -----------------------------------------------------------------------------


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


def hooks() -> str:
    about = (
        "For maintainers, when SGLang changes: every place where the package touches it, found in "
        "the code "
        "(`docs/reference/sglang_uses.py`).\n\n"
        "* *hook*: a function of SGLang that is called *around*, *after* or that ours *replaces*. "
        "At start its source\n  is compared with that of the pinned SGLang.\n"
        "* *override*: a method of SGLang's that a class of ours has, too. A test compares "
        "their parameters.\n"
        "* *call*: an imported name. *field*: an attribute that is private, or that is set.\n"
    )
    head = ("kind", "SGLang's name", "parameters", "ours", "reason")
    rows = [(use.cpu, use.kind, code(use.name), use.parameters and code(use.parameters),
             code(use.ours), use.reason) for use in uses()]  # fmt: skip
    parts = [
        f"## {title}\n\n" + table(head, (row[1:] for row in rows if row[0] == cpu))
        for title, cpu in (("On every platform", False), ("On the CPU platform", True))
    ]
    return page("Uses of SGLang", about, *parts)


PAGES = {
    "command_line.md": command_line,
    "training_file.md": training_file,
    "environment.md": environment,
    "sampling_parameters.md": sampling_parameters,
    "hooks.md": hooks,
}


def main() -> None:
    """Write every page, into the folder that is named or here."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for name, make in PAGES.items():
        (out / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
