"""``make launches``: launches outside CUDA graphs and bytes moved of every kind of round.

Counted on fake tensors: no GPU is needed.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from tests.launches.rounds import REQUESTS, ROUNDS, counted, measure, write_budgets


def operations(name: str, bs: int) -> str:
    """What one round launches, in order: phase, launches, megabytes, place, operation."""
    launches, moved = Counter(), Counter()
    for launch in counted(name, bs).launches:
        key = launch.phase, launch.place, launch.name
        launches[key] += launch.count
        moved[key] += launch.bytes
    return "\n".join(
        f"{key[0]:<14}{count:>4}{moved[key] / 1e6:>10.3f}  {key[1]:<48} {key[2]}"
        for key, count in launches.items()
    )


def main(argv: list[str] | None = None) -> int:
    """Print the table, or one round."""
    parser = argparse.ArgumentParser(prog="python -m tests.launches", description=__doc__)
    parser.add_argument("--write", action="store_true", help="make these counts the budgets")
    parser.add_argument("--round", choices=ROUNDS, help="list the operations of one round instead")
    parser.add_argument("--requests", type=int, default=64, choices=REQUESTS, help="of --round")
    options = parser.parse_args(argv)
    if options.round:
        print(operations(options.round, options.requests))
        return 0
    costs = measure()
    print(f"{'':<48}{'requests':>10}{'launches':>10}{'MB moved':>12}")
    for name, each in costs.items():
        for bs, (launches, moved) in each.items():
            print(f"{name:<48}{bs:>10}{launches:>10}{moved / 1e6:>12.3f}")
    if options.write:
        write_budgets(costs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
