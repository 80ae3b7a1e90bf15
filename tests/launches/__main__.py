"""``make launches``: launches outside CUDA graphs and bytes moved of every kind of round.

Counted on fake tensors: no GPU is needed.
"""

import argparse
import json

from tests.launches.rounds import REQUESTS, ROWS, TABLE, counted


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.launches", description=__doc__)
    parser.add_argument("--write", action="store_true", help="make these counts the budgets")
    write = parser.parse_args().write
    budgets = "# Launches and bytes of a round by number of requests; bytes are rounded up.\n"
    budgets += "# Written by ``python -m tests.launches --write``.\n"
    print(f"{'':<48}{'requests':>10}{'launches':>10}{'MB moved':>12}")
    for row, (phases, name) in ROWS.items():
        cells = []
        for bs in REQUESTS:
            launches, moved = counted(name, bs).cost(*phases)
            print(f"{row:<48}{bs:>10}{launches:>10}{moved / 1e6:>12.3f}")
            digit = 10 ** max(len(str(moved)) - 3, 0)
            cells.append(f"{bs} = [{launches}, {-(-moved // digit) * digit:_}]")
        budgets += f"{json.dumps(row)} = {{ {', '.join(cells)} }}\n"
    if write:
        TABLE.write_text(budgets)


if __name__ == "__main__":
    main()
