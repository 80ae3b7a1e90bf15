"""The ``hyperdflash`` command."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from sglang_hyperdflash import CPU_PLATFORM
from sglang_hyperdflash.tools.command_line import Parser
from sglang_hyperdflash.tools.errors import HyperDFlashError
from sglang_hyperdflash.tools.process_group import exit_on_signals

# Each is a module under commands/.
COMMANDS = ("check", "demo", "generate", "init", "regenerate", "capture", "train", "learn", "plan")


def build_parser() -> argparse.ArgumentParser:
    """All sub-commands; each module adds its own arguments and names its function."""
    parser = argparse.ArgumentParser(
        prog="hyperdflash", description="HyperDFlash speculative decoding for SGLang"
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=Parser
    )
    for name in COMMANDS:
        importlib.import_module(f"sglang_hyperdflash.commands.{name}").add_parser(commands)
    return parser


@exit_on_signals()
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; user errors print one line on stderr and give exit code 2."""
    args = build_parser().parse_args(argv)
    os.environ.setdefault(CPU_PLATFORM, "1")
    try:
        return int(args.run(args) or 0)
    except (HyperDFlashError, OSError, FloatingPointError) as error:
        print(f"hyperdflash {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"hyperdflash {args.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
