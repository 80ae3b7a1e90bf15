"""``make launches``: launches outside CUDA graphs and bytes moved of every kind of round.

Counted on fake tensors: no GPU is needed.
"""

from __future__ import annotations

import argparse

from tests.launches.rounds import REQUESTS, ROWS, counted, write_budgets


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.launches", description=__doc__)
    parser.add_argument("--write", action="store_true", help="make these counts the budgets")
    write, costs = parser.parse_args().write, {}
    print(f"{'':<48}{'requests':>10}{'launches':>10}{'MB moved':>12}")
    for row, (phases, name) in ROWS.items():
        costs[row] = {bs: counted(name, bs).cost(*phases) for bs in REQUESTS}
        for bs, (launches, moved) in costs[row].items():
            print(f"{row:<48}{bs:>10}{launches:>10}{moved / 1e6:>12.3f}")
    if write:
        write_budgets(costs)


if __name__ == "__main__":
    main()
