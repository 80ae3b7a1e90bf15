"""``python -m eval.width_replay``: a simulation of the width policy over published V4 round times.

vLLM's report on adaptive verification plots what a server of DeepSeek-V4-Flash-0731 timed at its
start: a verification by its tokens, and a DSpark draft pass by its requests. A replayed round costs
their sum; acceptance is what this repository's drafters have on its tiny target.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import add
from pathlib import Path
from typing import Any

from eval.comparison import pooled_positions
from eval.tables import Table
from sglang_hyperdflash.serving.settings import NARROW
from sglang_hyperdflash.serving.width.policy import CostTable, WidthPolicy
from sglang_hyperdflash.serving.width.timing import sizes_up_to
from sglang_hyperdflash.tools.atomic import write_json, write_text
from sglang_hyperdflash.tools.provenance import provenance

SOURCE = (
    "https://github.com/vllm-project/vllm-project.github.io/blob/"
    "1843cc42496d0687b8c8841e16b424d150632de5/assets/figures/2026-08-14-dspark-adaptive-verification/fig2-costcurve.svg"
)
# Milliseconds, read from the coordinates of that figure's "median per size" (to 0.2 %): of a
# verification by its tokens, of a draft pass by its requests. A count between two profiled sizes
# runs the larger one's graph; above 1,024 tokens that server has no graph.
VERIFY_MS = {
    **{1: 5.11, 2: 5.16, 4: 5.12, 7: 5.35, 8: 5.35, 14: 5.59, 16: 5.59, 28: 6.26, 32: 6.26},
    **{56: 7.13, 64: 7.90, 112: 9.20, 128: 9.43, 224: 10.98, 256: 11.30, 448: 15.67},
    **{512: 15.03, 896: 19.48, 1024: 20.63, 1792: 103.63},
}
DRAFT_MS = {1: 0.88, 2: 0.92, 4: 1.0, 8: 1.07, 16: 1.32, 32: 1.61, 64: 2.27, 128: 3.14, 256: 5.38}
WIDTHS = (*NARROW, 7)
METHOD, ROUNDS = "hyperdflash2", 2000
OUT_OF_DISTRIBUTION = ("gsm8k", "humaneval", "mt-bench")
# Requests of a load that changes, of so many rounds each.
STEPS, STEP_ROUNDS = (1, 64, 256, 64, 1), 300

# (requests, width) -> seconds of a round.
Seconds = Callable[[int, int], float]


def published(requests: int, width: int) -> float:
    """Seconds of a round; at width 1 nothing is drafted."""
    draft = DRAFT_MS[requests] if width > 1 else 0.0
    return (VERIFY_MS[requests * width] + draft) / 1000


def policy_of(seconds: Seconds, widths: Sequence[int], most: int = 64) -> WidthPolicy:
    """A policy that has timed ``seconds`` as a start does, up to ``most`` requests."""
    policy, costs = WidthPolicy(widths), CostTable(widths)
    for requests in sizes_up_to(most):
        costs.add(requests, [seconds(requests, w) for w in widths] * 2)
    policy.costs = costs
    return policy


@dataclass
class Replay:
    """What happened, round by round."""

    widths: list[int] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def accepted_drafts(acceptance: Sequence[float], width: int, rng: random.Random) -> int:
    """Drafts accepted of one request's round."""
    for k in range(width - 1):
        if rng.random() >= acceptance[k]:
            return k
    return width - 1


def replay(
    seconds: Seconds,
    loads: Iterable[int],
    acceptance: Callable[[int, int], Sequence[float]],
    *,
    policy: WidthPolicy | None = None,
    width: int = 1,
    noise: float = 0.0,
    seed: int = 0,
) -> Replay:
    """Run one round for each entry of ``loads``, its number of requests.

    The policy learns a round later, as overlap schedules it.

    Args:
        acceptance: of (round, request), of each draft after accepted ones. policy: chooses widths;
            None always runs ``width``. noise: relative standard deviation of a round's time.
    """
    rng, found = random.Random(seed), Replay()
    result = None
    for number, requests in enumerate(loads):
        chosen = policy.next(requests, 0) if policy else width
        taken = seconds(requests, chosen) * max(rng.gauss(1, noise), 0.5)
        accepted = [accepted_drafts(acceptance(number, i), chosen, rng) for i in range(requests)]
        if policy:
            if result:
                policy.observe(*result, ())
            result = chosen, accepted
        found.widths.append(chosen)
        found.tokens += requests + sum(accepted)
        found.seconds += taken
    return found


def acceptances(results: Mapping[str, Any]) -> dict[str, list[float]]:
    """Share of the rounds that accept drafts 1 to k, by kind of text: measured, and none at all."""
    rows = [row for row in results["rows"] if row["method"] == METHOD]
    found = {}
    for name, temperature, texts in (
        ("all texts, temperature 0", 0.0, None),
        ("all texts, temperature 1", 1.0, None),
        ("out-of-distribution, temperature 1", 1.0, OUT_OF_DISTRIBUTION),
    ):
        own = [row for row in rows if row["temperature"] == temperature]
        found[name] = pooled_positions([r for r in own if not texts or r["benchmark"] in texts])
    return {**found, "no draft accepted": [0.0] * (WIDTHS[-1] - 1)}


def widths_chosen(survives: Sequence[float], loads: Sequence[int]) -> list[int]:
    """The widths of a replay over the published times."""
    given = [(b / a if a else 0.0) for a, b in pairwise((1.0, *survives))]
    policy = policy_of(published, WIDTHS, max(DRAFT_MS))
    return replay(published, loads, lambda *_: given, policy=policy).widths


def steady(survives: Sequence[float], requests: int) -> dict[str, Any]:
    """Speeds of one load over width 1's. Tokens are expected ones, so nothing is drawn twice."""
    expected = dict(enumerate(accumulate((1.0, *survives), add), 1))
    chosen = widths_chosen(survives, [requests] * ROUNDS)
    tokens = sum(expected[w] for w in chosen)
    adaptive = tokens / sum(published(requests, w) for w in chosen)
    fixed = {w: expected[w] / published(requests, w) for w in WIDTHS}
    return {
        "requests": requests,
        "fixed": {w: round(rate / fixed[1], 3) for w, rate in fixed.items()},
        "adaptive": round(adaptive / fixed[1], 3),
        "over_the_best": round(adaptive / max(fixed.values()), 3),
        "rounds": {w: n / ROUNDS for w, n in sorted(Counter(chosen).items())},
    }


def stepped(survives: Sequence[float]) -> float:
    """Of a load in steps: seconds of the best width in every round, over those that it took."""
    expected = dict(enumerate(accumulate((1.0, *survives), add), 1))
    loads = [requests for requests in STEPS for _ in range(STEP_ROUNDS)]
    needed = taken = 0.0
    for requests, width in zip(loads, widths_chosen(survives, loads), strict=True):
        best = min(published(requests, w) / expected[w] for w in WIDTHS)
        needed += best * expected[width]
        taken += published(requests, width)
    return round(needed / taken, 3)


def run(results: Mapping[str, Any]) -> dict[str, Any]:
    """All loads, by kind of text."""
    return {
        name: {
            "survives": survives,
            "steady": [steady(survives, requests) for requests in DRAFT_MS],
            "stepped": stepped(survives),
        }
        for name, survives in acceptances(results).items()
    }


def report(found: Mapping[str, Any]) -> str:
    """The replay as Markdown."""
    lines = [
        "# The width policy over published round times: a simulation",
        "",
        "Written by `python -m eval.width_replay`. Nothing here was measured on a GPU by this",
        f"project. Round times: [vLLM's profile]({SOURCE}) of DeepSeek-V4-Flash-0731, TP 4 on",
        "B300, read from the figure's coordinates. Acceptance: HyperDFlash-2 on this repository's",
        "tiny target ([tiny](../tiny/report.md)). The policy is the served class.",
        "",
        "Assumed: our draft pass costs what DSpark's does, at every width; width 1 costs the",
        "verification alone, without the drafter's K/V; the host adds nothing; sampled rounds cost",
        "what greedy ones do; drafts are accepted independently. The profile has no graph above",
        "1,024 tokens, so 7 rows of 256 requests take 104 ms.",
        "",
        "Speeds are over width 1 (no drafts); τ is of 7 rows. *Over the best* compares with the",
        "best fixed width of that load. The server times 1, 4, 16, 64 and 256 requests;",
        "the other loads are interpolated by the policy and charged as published.",
        "",
        "Measured throughput over no speculation, for comparison: DSpark with 7 drafts on ROCm",
        "2.54 at 4 requests, 2.17 at 16, 1.64 at 64, 1.38 at 128 and 0.88 at 256",
        "([vLLM #52362](https://github.com/vllm-project/vllm/pull/52362)); SGLang's DSPARK on",
        "eight B200 2.08 at 1 request and 1.28 at 32",
        "([SGLang #29538](https://github.com/sgl-project/sglang/pull/29538)). Neither is replayed:",
        "round times and accept lengths by load were not found with them. The same holds for 7",
        "drafts 10 % below 3 ([recipes #967](https://github.com/vllm-project/recipes/issues/967)).",
        "",
    ]
    for name, kind in found.items():
        rows = tuple(
            (
                str(row["requests"]),
                *(f"{row['fixed'][w]:.2f}" for w in WIDTHS[1:]),
                f"{row['adaptive']:.2f}",
                f"{row['over_the_best']:.3f}",
                ", ".join(f"{w}: {share:.0%}" for w, share in row["rounds"].items()),
            )
            for row in kind["steady"]
        )
        heads = ("requests", *(f"{w} rows" for w in WIDTHS[1:]), "adaptive", "over the best")
        note = f"Load in steps ({', '.join(map(str, STEPS))} requests, {STEP_ROUNDS} rounds each): "
        note += f"{kind['stepped']:.3f} of the best width of every round."
        title = f"{name[0].upper()}{name[1:]}: τ {1 + sum(kind['survives']):.2f}"
        table = Table(title, (*heads, "share of rounds by width"), rows, note)
        lines += table.markdown()
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--results", type=Path, default=Path("eval/results/tiny/results.json"))
    options.add_argument("--out", type=Path, required=True, help="folder of the report")
    return options


def main() -> None:
    """Replay all loads, and write ``results.json`` and ``report.md``."""
    args = parser().parse_args()
    found = run(json.loads(args.results.read_bytes()))
    times = {"source": SOURCE, "verify_ms": VERIFY_MS, "draft_ms": DRAFT_MS}
    content = {"simulation": True, "provenance": provenance(), "times": times, "kinds": found}
    write_json(args.out / "results.json", content, indent=1)
    write_text(args.out / "report.md", report(found))


if __name__ == "__main__":
    main()
