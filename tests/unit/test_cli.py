"""The command line as a user reads it."""

from __future__ import annotations

import argparse

import pytest

from eval.options import parser as eval_parser
from sglang_hyperdflash.cli import COMMANDS, build_parser


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (found,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return found.choices


PARSERS = commands_of(build_parser())
PARSERS |= {f"eval {name}": parser for name, parser in commands_of(eval_parser()).items()}


def test_every_command_is_there():
    assert set(COMMANDS) | {"eval run", "eval report", "eval serving"} < set(PARSERS)


@pytest.mark.parametrize("command", PARSERS)
def test_help_says_what_every_option_is_and_its_default(command):
    parser = PARSERS[command]
    text = "".join(parser.format_help().split())
    for action in parser._actions:
        name = action.option_strings[-1]
        assert action.help, f"{name} has no help"
        if action.required or action.nargs == 0:
            continue
        if action.default is None or "default" in action.help:
            assert "default" in action.help, f"{name} does not say what happens without it"
        else:
            several = isinstance(action.default, list)
            shown = "".join(map(str, action.default)) if several else str(action.default)
            assert f"(default:{shown})".replace(" ", "") in text, name
