"""The ``hyperdflash`` command."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from sglang_hyperdflash import CPU_PLATFORM, SGLANG_VERSION, __version__
from sglang_hyperdflash.tools.command_line import Parser
from sglang_hyperdflash.tools.errors import HyperDFlashError
from sglang_hyperdflash.tools.process_group import exit_on_signals, sigint_exits


def build_parser() -> argparse.ArgumentParser:
    """All sub-commands with their options; no command's own module is imported."""
    from sglang_hyperdflash.commands import options

    about = "HyperDFlash speculative decoding for SGLang"
    parser = Parser(prog="hyperdflash", description=about)
    version = f"hyperdflash {__version__}, for sglang {SGLANG_VERSION}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", action=options.Listed
    )
    for name in options.COMMANDS:
        getattr(options, name)(commands)
    return parser


@exit_on_signals()
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; user errors print one line on stderr and give exit code 2."""
    with sigint_exits("hyperdflash: interrupted"):
        args = build_parser().parse_args(argv)
        os.environ.setdefault(CPU_PLATFORM, "1")
        if args.command in ("train", "learn"):  # of DDP, about a choice that is ours
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        command = importlib.import_module(f"sglang_hyperdflash.commands.{args.command}")
    try:
        return int(command.run(args) or 0)
    except (HyperDFlashError, OSError, FloatingPointError) as error:
        print(f"hyperdflash {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"hyperdflash {args.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
