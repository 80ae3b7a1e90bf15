"""Tokens a second that widths give from concurrency 1 to 1,024: the plan past one machine.

    python -m eval.width_plan                       # DeepSeek-V4-Flash on H200s, a roofline
    python -m eval.width_plan --study results.json  # the round times of a width study, checked

A roofline, not a measurement: bytes over bandwidth or operations over speed, whichever is longer,
with an efficiency, and a floor for launches. It says where the widths cross, not what a node gives.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.width_report import FULL, TARGET, rate
from eval.width_simulator import Seconds, replay
from sglang_hyperdflash.serving.width_policy import WidthPolicy
from sglang_hyperdflash.tools.command_line import Parser

LEVELS = tuple(2**n for n in range(11))
WIDTHS = (1, 2, 4, 7)
ROUNDS = 1500
# Rounds that a simulated server has run before it is measured.
WARM = 300


@dataclass(frozen=True)
class Model:
    """DeepSeek-V4-Flash, and a drafter of five layers for it; weights in bytes.

    expert: one expert's three matrices at 4 bits and their scales. dense: attention, shared expert
    and gate of one layer at 8 bits. head: the LM head at 16 bits. context_bytes: K/V and index that
    one query row reads in a layer.
    """

    layers: int = 43
    experts: int = 256
    chosen: int = 6
    hidden: int = 4096
    expert: float = 3 * 4096 * 2048 * 0.53
    dense: float = 110e6
    head: float = 129280 * 4096 * 2
    context_bytes: float = (512 + 128) * 584 + 1024 * 132
    draft_layers: int = 5
    draft_layer: float = (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 8192) * 2
    draft_context: float = 2 * 8 * 128 * 2
    reducer: float = 40 * 1024


@dataclass(frozen=True)
class Machine:
    """A node: bytes and operations a second of all GPUs, what of them is reached, and floors."""

    gpus: int = 8
    bandwidth: float = 4.3e12
    operations: float = 990e12
    reached: float = 0.6
    # Launches and all-reduces of one layer of a captured graph, and the host's part of a round.
    layer_floor: float = 22e-6
    round_floor: float = 0.6e-3


def touched(experts: int, chosen: int, rows: int) -> float:
    """Experts that ``rows`` tokens use, each its own choice."""
    return experts * (1 - (1 - chosen / experts) ** rows)


def roofline(context: int, model: Model = Model(), machine: Machine = Machine()) -> Seconds:
    """Seconds of a round by requests and width, with ``context`` tokens a request."""
    speed = machine.gpus * machine.bandwidth * machine.reached
    work = machine.gpus * machine.operations * machine.reached

    def target(rows: int) -> float:
        read = model.dense + touched(model.experts, model.chosen, rows) * model.expert
        read += rows * min(model.context_bytes, context * 584)
        used = model.dense + model.chosen * 3 * model.hidden * 2048
        layer = max(read / speed, 2 * rows * used / work, machine.layer_floor)
        return model.layers * layer + max(model.head / speed, rows * model.head / work)

    def draft(requests: int, width: int) -> float:
        rows = requests * width
        read = model.draft_layer + requests * context * model.draft_context
        layer = max(read / speed, rows * model.draft_layer / work, machine.layer_floor)
        head = max(model.head / speed, rows * model.head / work)
        return model.draft_layers * layer + head

    def seconds(requests: int, width: int) -> float:
        found = machine.round_floor + target(requests * width)
        found += requests * width * model.reducer / speed
        return found + (draft(requests, width) if width > 1 else 0.0)

    return seconds


def measured(rows: Sequence[dict], temperature: float, acceptance: Sequence[float]) -> Seconds:
    """Seconds of rounds of width 1 and 7 from a study's tokens a second, linear in between."""
    tokens = expected_tokens(acceptance, 7)
    levels = sorted({r["concurrency"] for r in rows if r["temperature"] == temperature})

    def at(requests: int, method: str, each: float) -> float:
        known = [level for level in levels if level <= requests] or levels[:1]
        low = known[-1]
        high = next((level for level in levels if level >= requests), levels[-1])
        ends = [each * c / (rate(rows, temperature, c, method) or 1) for c in (low, high)]
        share = (requests - low) / (high - low) if high > low else 0.0
        return ends[0] + share * (ends[1] - ends[0])

    def seconds(requests: int, width: int) -> float:
        one, full = at(requests, TARGET, 1.0), at(requests, FULL, tokens)
        return one + (full - one) * (width - 1) / 6

    return seconds


def expected_tokens(acceptance: Sequence[float], width: int) -> float:
    """Tokens of a round whose draft k is accepted with ``acceptance[k - 1]``."""
    total = survives = 1.0
    for a in acceptance[: width - 1]:
        survives *= a
        total += survives
    return total


def plan(
    seconds: Seconds, acceptance: Sequence[float], levels: Sequence[int], widths: Sequence[int]
) -> list[dict]:
    """Tokens a second without drafts, with the whole block, and adaptive; one row a level."""

    def always(number: int, request: int) -> Sequence[float]:
        return acceptance

    rows = []
    for level in levels:
        policy, rounds = WidthPolicy(widths), max(ROUNDS // level, 200)
        replay(seconds, [level] * WARM, always, policy=policy)
        found = replay(seconds, [level] * rounds, always, policy=policy)
        fixed = {
            w: level * expected_tokens(acceptance, w) / seconds(level, w) for w in (1, widths[-1])
        }
        usual = max(set(found.widths), key=found.widths.count)
        row = {"concurrency": level, "none": fixed[1], "fixed": fixed[widths[-1]]}
        rows.append({**row, "adaptive": found.tokens_per_s, "width": usual})
    return rows


def as_table(rows: Sequence[dict]) -> str:
    """Markdown."""
    lines = ["| c | none | fixed 7 | adaptive | over the better | usual width |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        ratio = row["adaptive"] / max(row["none"], row["fixed"])
        numbers = " | ".join(f"{row[name]:.0f}" for name in ("none", "fixed", "adaptive"))
        lines.append(f"| {row['concurrency']} | {numbers} | {ratio:.3f} | {row['width']} |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = Parser(prog="python -m eval.width_plan", description=__doc__.splitlines()[0])
    text = "results.json of eval.width_study (default: a roofline of DeepSeek-V4-Flash)"
    found.add_argument("--study", type=Path, help=text)
    found.add_argument("--context", type=int, default=4096, help="tokens of a request")
    text = "acceptance of each draft where those before it were accepted"
    found.add_argument("--acceptance", type=float, nargs="+", default=[0.8] * 6, help=text)
    found.add_argument(
        "--widths", type=int, nargs="+", default=list(WIDTHS), help="widths there may be"
    )
    return found


def main(argv: list[str] | None = None) -> None:
    """Print the table of a roofline, or of a study's own times beside what it measured."""
    args = parser().parse_args(argv)
    if args.study is None:
        print(as_table(plan(roofline(args.context), args.acceptance, LEVELS, args.widths)))
        return
    study = json.loads(args.study.read_text())["rows"]
    for temperature in sorted({row["temperature"] for row in study}):
        seconds = measured(study, temperature, args.acceptance)
        levels = sorted({r["concurrency"] for r in study if r["temperature"] == temperature})
        rows = plan(seconds, args.acceptance, levels, args.widths)
        print(f"temperature {temperature:g}\n{as_table(rows)}")
        print("measured adaptive: " + _checked(study, temperature, levels, rows))


def _checked(study, temperature: float, levels: Sequence[int], rows: Sequence[dict]) -> str:
    """Simulated over measured, by level."""
    parts = []
    for level, row in zip(levels, rows, strict=True):
        found = rate(study, temperature, level, "adaptive")
        parts.append(f"c {level}: {row['adaptive'] / found:.3f}" if found else f"c {level}: -")
    return ", ".join(parts)


if __name__ == "__main__":
    main()
