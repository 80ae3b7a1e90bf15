"""An argument parser whose help names every default, and the types of numeric options."""

import argparse
import re
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, NoReturn

# What argparse says of a wrong choice, and of a wrong option.
_WRONG = re.compile(r"choice: '(.*?)' \(choose from (.*)\)|unrecognized .*?(--[^\s=]+)")


class _WithDefaults(argparse.HelpFormatter):
    """Adds ``(default: X)`` to the help of every option with a default."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        named = "default" in (action.help or "")
        if named or action.nargs == 0 or action.required or action.default is None:
            return action.help
        if isinstance(action.default, list | tuple):  # as a user types them
            return f"{action.help} (default: {' '.join(map(str, action.default))})"
        return f"{action.help} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """``ArgumentParser`` with defaults in its help and errors of one line."""

    def __init__(self, **options) -> None:
        super().__init__(**{"formatter_class": _WithDefaults, **options})

    def parse_known_args(self, args=None, namespace=None):
        """Refuse unknown options here: a parser of commands does not know a command's options."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        advice = f"{self._meant(message)}{self.prog} --help lists the options."
        self.exit(2, f"{self.prog}: {message}. {advice}\n")

    def _meant(self, message: str) -> str:
        """Return a question with the choice or option closest to the wrong one, or nothing."""
        wrong = _WRONG.search(message)
        if wrong is None:
            return ""
        choice, choices, option = wrong.groups()
        known = choices.replace("'", "").split(", ") if choices else self._option_string_actions
        close = get_close_matches(choice or option, known, 1)
        return f"Did you mean {close[0]}? " if close else ""


def number(kind: type, expected: str, holds: Callable[[Any], bool]) -> Callable[[str], Any]:
    """Return the type of an option: a number for which ``holds`` is true, as ``expected`` says."""

    def convert(text: str) -> Any:
        value = kind(text)
        if not holds(value):
            raise argparse.ArgumentTypeError(f"must be {expected}, found {text}")
        return value

    convert.__name__ = kind.__name__  # argparse names the type of a text that is no number
    return convert


COUNT = number(int, "at least 1", lambda n: n >= 1)
SHARE = number(float, "above 0 and at most 1", lambda x: 0 < x <= 1)
