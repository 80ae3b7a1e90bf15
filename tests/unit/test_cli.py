"""The command line as a user reads it."""

from __future__ import annotations

import argparse

import pytest

from eval import width_plan, width_study
from sglang_hyperdflash.cli import COMMANDS, build_parser

MODULES = {"eval.width_plan": width_plan.parser, "eval.width_study": width_study.parser}


def parser_of(name: str) -> argparse.ArgumentParser:
    if name in MODULES:
        return MODULES[name]()
    groups = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return groups[0].choices[name]


@pytest.mark.parametrize("command", [*COMMANDS, *MODULES])
def test_help_says_what_every_option_is_and_its_default(command):
    parser = parser_of(command)
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
