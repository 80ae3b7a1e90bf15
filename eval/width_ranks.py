"""``python -m eval.width_ranks``: a simulation of the width that many ranks share, at V4's times.

Round times are published ones (``eval/results/v4_width/report.md`` has their source); acceptance is
that of HyperDFlash-2 on the tiny target. Each rank of attention data parallelism has a number of
requests that wanders by itself; a round takes as long as the rank with most requests needs.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from eval.aggregate import pooled_positions, select
from sglang_hyperdflash.serving.width.policy import CostTable
from sglang_hyperdflash.serving.width.ranks import RanksPolicy
from sglang_hyperdflash.tools.atomic import write_json
from sglang_hyperdflash.tools.provenance import provenance

RESULTS = Path(__file__).parent / "results"
# Milliseconds of a verification by its tokens, of a draft pass by its requests.
VERIFY_MS = {
    **{1: 5.11, 2: 5.16, 4: 5.12, 7: 5.35, 8: 5.35, 14: 5.59, 16: 5.59, 28: 6.26, 32: 6.26},
    **{56: 7.13, 64: 7.90, 112: 9.20, 128: 9.43, 224: 10.98, 256: 11.30, 448: 15.67},
    **{512: 15.03, 896: 19.48, 1024: 20.63, 1792: 103.63},
}
DRAFT_MS = {1: 0.88, 2: 0.92, 4: 1.0, 8: 1.07, 16: 1.32, 32: 1.61, 64: 2.27, 128: 3.14, 256: 5.38}
WIDTHS, ROUNDS = (1, 2, 4, 7), 1500
IN_DISTRIBUTION = ("chat", "code", "math")
RANKS, LOADS = (8, 64), (1, 4, 16, 64, 128)


def seconds(requests: int, width: int) -> float:
    """A round's; a count between two profiled ones runs the larger one's graph."""
    verify = VERIFY_MS[min(size for size in VERIFY_MS if size >= min(requests * width, 1792))]
    draft = DRAFT_MS[min(size for size in DRAFT_MS if size >= min(requests, 256))]
    return (verify + draft * (width > 1)) / 1000


def loads(ranks: int, mean: int, rng: random.Random) -> list[list[int]]:
    """Requests of every rank in every round: each comes and goes with a chance of 2%."""
    now, rounds = [mean] * ranks, []
    for _ in range(ROUNDS):
        for rank, count in enumerate(now):
            left = sum(rng.random() < 0.02 for _ in range(count))
            come = sum(rng.random() < 0.02 for _ in range(mean))
            now[rank] = min(count - left + come, 256)
        rounds.append(list(now))
    return rounds


def connected(ranks: int, costs: CostTable) -> list[RanksPolicy]:
    """The policies of so many ranks, which exchange their numbers within this process."""
    sent: list[list[torch.Tensor]] = [[] for _ in range(ranks)]

    def sender(own: list[torch.Tensor]) -> Any:
        def send(numbers: torch.Tensor) -> Any:
            number = len(own)
            own.append(numbers)
            return lambda: torch.stack([each[number] for each in sent])

        return send

    policies = [RanksPolicy(costs.widths, sender(own)) for own in sent]
    for policy in policies:
        policy.costs = costs
    return policies


def run(rounds: list[list[int]], accepted: list[float], rng: random.Random) -> list[int]:
    """Widths that all ranks choose; an error if two differ."""
    costs, chosen = CostTable(WIDTHS), []
    for requests in (1, 4, 16, 64, 256):
        costs.add(requests, [seconds(requests, w) for w in WIDTHS] * 2)
    policies = connected(len(rounds[0]), costs)
    for counts in rounds:
        (width,) = {policy.next(n) for policy, n in zip(policies, counts, strict=True)}
        chosen.append(width)
        for policy, n in zip(policies, counts, strict=True):
            drafts = rng.choices(range(width), _stops(accepted, width), k=n)
            policy.observe(width, drafts)
    return chosen


def _stops(survives: list[float], width: int) -> list[float]:
    """The probability of accepting exactly 0 to width - 1 drafts."""
    reached = [1.0, *survives[: width - 1], 0.0]
    return [a - b for a, b in pairwise(reached)]


def main() -> None:
    tiny = json.loads((RESULTS / "tiny" / "results.json").read_text())
    rows, cells = select(tiny["rows"], {"temperature": 1}, "hyperdflash2"), []
    kinds = [
        pooled_positions([row for row in rows if (row["benchmark"] in IN_DISTRIBUTION) == known])
        for known in (True, False)
    ]
    survives = [sum(pair) / 2 for pair in zip(*kinds, strict=True)]
    tokens = dict(enumerate(accumulate([1.0, *survives]), 1))
    for ranks in RANKS:
        for mean in LOADS:
            rng = random.Random(mean)
            rounds = loads(ranks, mean, rng)
            widths = run(rounds, survives, rng)

            def rate(chosen: list[int], rounds: list[list[int]] = rounds) -> float:
                work = sum(sum(n) * tokens[w] for n, w in zip(rounds, chosen, strict=True))
                return work / sum(seconds(max(n), w) for n, w in zip(rounds, chosen, strict=True))

            plain = rate([1] * ROUNDS)
            cell = {"ranks": ranks, "requests": mean, "adaptive": rate(widths) / plain}
            cell |= {f"{w} rows": rate([w] * ROUNDS) / plain for w in WIDTHS[1:]}
            cell["widths"] = dict(sorted(Counter(widths).items()))
            cells.append(cell)
            print(cell, flush=True)
    about = {"tau_of_7_rows": tokens[7], "provenance": provenance()}
    write_json(RESULTS / "v4_width" / "ranks.json", about | {"cells": cells}, indent=1)


if __name__ == "__main__":
    main()
