"""``make launches``: what rounds cost on CUDA, counted on fake tensors; no GPU is needed.

Prints launches outside CUDA graphs, bytes moved, peak memory, and the least time that they take:
bytes at 4.8 TB/s or 5 us a launch, whichever is more. ``--round`` lists a round's operations.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tests.launches.rounds import REQUESTS, ROUNDS, Cost, counted, measure, write_budgets

UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def size(value: int) -> str:
    """``12.3 MB``."""
    for unit, name in UNITS:
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value} B"


def table(found: dict[str, dict[int, Cost]]) -> str:
    """A line for every round or part, and number of requests."""
    longest = max(map(len, found))
    lines = [
        f"{'':<{longest}}{'requests':>10}{'launches':>10}{'goal':>6}{'moved':>10}{'peak':>10}"
        f"{'at least':>11}"
    ]
    for name, costs in found.items():
        goal = ROUNDS[name].goal if name in ROUNDS else None
        for bs, cost in costs.items():
            lines.append(
                f"{name:<{longest}}{bs:>10}{cost.launches:>10}{goal or '':>6}"
                f"{size(cost.bytes):>10}{size(cost.peak):>10}{cost.microseconds:>8.0f} us"
            )
            name = ""
    return "\n".join(lines)


def operations(name: str, bs: int) -> str:
    """What one round launches, in order, and how often at each place."""
    counts: Counter = Counter()
    for launch in counted(name, bs).found:
        key = launch.phase, launch.place, launch.name
        counts[key] += 1j * launch.moved + launch.launches
    return "\n".join(
        f"{phase:<14}{value.real:>4.0f} {size(int(value.imag)):>8}  {place:<48} {operation}"
        for (phase, place, operation), value in counts.items()
    )


def main(argv: list[str] | None = None) -> int:
    """0; the table on stdout."""
    parser = argparse.ArgumentParser(prog="python -m tests.launches", description=__doc__)
    parser.add_argument("--write", action="store_true", help="make these counts the budgets")
    parser.add_argument("--json", type=Path, help="write the counts to a file as well")
    parser.add_argument("--round", choices=ROUNDS, help="list the operations of one round instead")
    parser.add_argument("--requests", type=int, default=64, choices=REQUESTS, help="of --round")
    options = parser.parse_args(argv)
    if options.round:
        print(operations(options.round, options.requests))
        return 0
    found = measure()
    print(table(found))
    if options.json:
        plain = {n: {bs: asdict(c) for bs, c in costs.items()} for n, costs in found.items()}
        options.json.write_text(json.dumps(plain, indent=1))
    if options.write:
        write_budgets(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
