"""``hyperdflash``: the command line of everything that is not a server flag."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def build_parser() -> argparse.ArgumentParser:
    """All sub-commands; each module adds its own arguments and names its function."""
    from sglang_hyperdflash import batch, demo, kv_plan
    from sglang_hyperdflash.training import capture, initialise, regenerate, schedule

    parser = argparse.ArgumentParser(
        prog="hyperdflash", description="HyperDFlash speculative decoding for SGLang"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo.add_parser(commands)
    batch.add_parser(commands)
    initialise.add_parser(commands)
    regenerate.add_parser(commands)
    capture.add_parser(commands)
    schedule.add_parser(commands)
    kv_plan.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; user errors print one line on stderr and give exit code 2."""
    from sglang_hyperdflash.config import HyperDFlashConfigError
    from sglang_hyperdflash.serving import ServerFailed

    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args) or 0)
    except (HyperDFlashConfigError, OSError, FloatingPointError, ServerFailed) as error:
        print(f"hyperdflash {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"hyperdflash {args.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
