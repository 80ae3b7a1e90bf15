"""The command line as a user reads it."""

from __future__ import annotations

import argparse

import pytest

from sglang_hyperdflash.cli import COMMANDS, build_parser


def subparser(name: str) -> argparse.ArgumentParser:
    groups = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return groups[0].choices[name]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_every_option_is_and_its_default(command):
    parser = subparser(command)
    text = "".join(parser.format_help().split())
    for action in parser._actions:
        name = action.option_strings[-1]
        assert action.help, f"{name} has no help"
        if action.required or action.nargs == 0:
            continue
        if action.default is None or "default" in action.help:
            assert "default" in action.help, f"{name} does not say what happens without it"
        else:
            assert f"(default:{action.default})".replace(" ", "") in text, name
