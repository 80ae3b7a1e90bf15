"""What recording costs: throughput of a server with it and of one without.

    python examples/tiny_deepseek_v4/recording_cost.py --out build/recording_cost

Rounds are interleaved; the first one warms the caches up and does not count. The server without
recording is asked twice in each round: the difference of these is noise. Run again to resume.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from eval.methods import BASELINE, NOISE, Method
from eval.runner import Cell, Plan, Servers, run_units, with_noise_floor
from eval.width import over, pooled, rows_of
from exchanges import FAMILIES
from sglang_hyperdflash.serving.record.settings import RECORD
from sglang_hyperdflash.tools.atomic import write_json
from sglang_hyperdflash.tools.ownership import claim
from sglang_hyperdflash.tools.provenance import provenance
from sglang_hyperdflash.tools.server_process import comparable_arguments, hyperdflash_arguments

HERE = Path(__file__).resolve().parent
KIND = "recording_cost"
# Shares of the requests; the second shows what 20 times as much costs.
SHARES = (0.05, 1.0)


def plan_of(args: argparse.Namespace) -> Plan:
    """Exchanges of every family, each request with its own text, by level of concurrency."""
    drafting = hyperdflash_arguments(HERE / "drafter")
    methods = [Method(BASELINE, drafting, 6)]
    for share in SHARES:
        name = f"recorded {share:.0%}"
        variables = ((RECORD, str((args.out / name).resolve())), (f"{RECORD}_SHARE", str(share)))
        methods.append(Method(name, drafting, 6, environment=variables))
    rng, kinds = Random(0), list(FAMILIES.values())
    prompts = {}
    for level in args.levels:
        drawn = (rng.choice(kinds).draw(rng, held_out=True) for _ in range(args.requests * level))
        prompts[f"load{level}"] = [[exchange.messages[0]["content"]] for exchange in drawn]
    return Plan(
        target=str(HERE / "target"),
        methods=with_noise_floor(methods),
        prompts=prompts,
        cells=tuple(Cell(f"load{level}", 0.0, "off", level) for level in args.levels),
        rounds=args.rounds,
        max_new_tokens=128,
        out=args.out,
        # Every round computes its prompts again: what the prefix cache holds is not recorded.
        server_args=(*comparable_arguments(), "--disable-radix-cache"),
    )


def compared(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Tokens per second over those without recording, by method and level."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(row["method"] for row in rows if row["method"] != BASELINE):
        ratios: list[float] = []
        for row in (row for row in rows if row["method"] == name):
            level = row["concurrency"]
            base = next(r for r in rows if (r["method"], r["concurrency"]) == (BASELINE, level))
            found.setdefault(name, {})[f"c={level}"] = over(row, base)
            ratios += [
                a / b for a, b in zip(row["tokens_per_s"], base["tokens_per_s"], strict=True)
            ]
        found[name] |= {"median": median(ratios), "mean (95 %)": pooled(ratios)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the study; new or its own")
    add(
        "--rounds", type=int, default=31, help="interleaved rounds, of which the first is a warm-up"
    )
    add("--levels", type=int, nargs="+", default=[4, 16], help="requests in flight")
    add("--requests", type=int, default=6, help="requests of a round for each one in flight")
    plan = plan_of(parser.parse_args())
    with claim(plan.out, KIND, plan.settings()):
        with Servers(plan) as servers:
            failed = run_units(plan, servers)
        rows = rows_of(plan)
        ratios = compared(rows)
        result = {"provenance": provenance(), "ratios": ratios, "rows": rows}
        write_json(plan.out / "result.json", result, indent=1)
    for name, ratio in ratios.items():
        print(f"{'noise' if name == NOISE else name}: {ratio}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
