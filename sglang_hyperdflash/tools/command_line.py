"""An argument parser whose help names every default."""

from __future__ import annotations

import argparse


class _WithDefaults(argparse.HelpFormatter):
    """Adds ``(default: X)`` to the help of every option with a default."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        said = "default" in (action.help or "")
        if said or action.nargs == 0 or action.required or action.default is None:
            return action.help
        if isinstance(action.default, list | tuple):  # as they are typed
            return f"{action.help} (default: {' '.join(map(str, action.default))})"
        return f"{action.help} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """``ArgumentParser`` with defaults in its help."""

    def __init__(self, **options) -> None:
        super().__init__(**{"formatter_class": _WithDefaults, **options})
