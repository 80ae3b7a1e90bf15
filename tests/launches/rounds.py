"""The rounds that are counted, what each may launch, and how a count compares with its budget.

A round is what runs outside CUDA graphs between the drafter's pass and the commit: drafting, the
final logits, verification, learning, the new lengths. What comes before and after has rows of its
own, :data:`PARTS`. A budget is a count rounded up to three digits.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.launches.counter import Counter, FakeCuda, Launch
from tests.launches.server import CANDIDATES, NO_TOP_K, PHASES, ROUND, VOCABULARY, FakeServer

BUDGETS = Path(__file__).with_name("budgets.toml")
REQUESTS = (1, 8, 64, 256)
# An H200's memory bandwidth, and what a launch costs the host.
BANDWIDTH, LAUNCH_SECONDS = 4.8e12, 5e-6
# Below this share of its budget a count has fallen: the budget is stale.
STALE = 0.9

GREEDY: dict[str, Any] = {}
SAMPLED = {"top_k": NO_TOP_K}
SEEDED = SAMPLED | {"sampling_seed": 3}
TOP_K, TOP_P, MIN_P = {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}
PENALTIES = {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1}
MIN_TOKENS, BIAS = {"min_new_tokens": 200}, {"bias": True}
CHANGES = PENALTIES | MIN_TOKENS | BIAS
MIXED = (GREEDY, SAMPLED, SEEDED)


@dataclass(frozen=True)
class Round:
    """Requests of a batch in turn, options of :class:`FakeServer`; most launches, or None."""

    requests: tuple[dict[str, Any], ...]
    goal: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


NO_HEAD, WINDOW, NO_GRAPH = {"head": False}, {"window": True}, {"graph": False}
ROUNDS = {
    "greedy": Round((GREEDY,), 10, NO_HEAD),
    "greedy, head": Round((GREEDY,), 10),
    "greedy, head, penalties": Round((PENALTIES,), 20),
    "greedy, head, width 1": Round((GREEDY,), 10, {"width": 1}),
    "greedy, head, 2 ranks": Round((GREEDY,), None, {"ranks": 2}),
    "greedy, head, 2 ranks, sharded logits": Round((GREEDY,), None, {"ranks": 2, "sharded": True}),
    "sampled": Round((SAMPLED,), 15, NO_HEAD),
    "sampled, head": Round((SAMPLED,), 15),
    "sampled, head, top-k": Round((SAMPLED | TOP_K,), 25),
    "sampled, head, top-p, min-p": Round((SAMPLED | TOP_P | MIN_P,), 25),
    "sampled, head, top-k, top-p, min-p": Round((SAMPLED | TOP_K | TOP_P | MIN_P,)),
    "sampled, head, penalties": Round((SAMPLED | PENALTIES,), 25),
    "sampled, head, min tokens": Round((SAMPLED | MIN_TOKENS,), 25),
    "sampled, head, bias": Round((SAMPLED | BIAS,), 25),
    "sampled, head, penalties, min tokens, bias": Round((SAMPLED | CHANGES,), 25),
    "sampled, head, width 1": Round((SAMPLED,), 15, {"width": 1}),
    "sampled, head, window": Round((SAMPLED,), 15, WINDOW),
    "sampled, head, no graph": Round((SAMPLED,), None, NO_GRAPH),
    "sampled, head, 2 ranks": Round((SAMPLED,), None, {"ranks": 2}),
    "sampled, head, recorded": Round((SAMPLED,), 15, {"recorded": True}),
    "seeded, head": Round((SEEDED,), 15),
    "seeded, head, top-k": Round((SEEDED | TOP_K,), 25),
    "seeded, head, penalties, min tokens, bias": Round((SEEDED | CHANGES,), 25),
    "mixed, head": Round(MIXED, 15),
    "mixed, head, everything": Round(
        (PENALTIES, SAMPLED | TOP_P | MIN_P, SEEDED | TOP_K | MIN_TOKENS, BIAS)
    ),
}
# What is around a round: its phase, and the round in which it is counted.
PARTS = {
    "a new batch": ("new batch", "sampled, head"),
    "a new batch, penalties": ("new batch", "sampled, head, penalties"),
    "the block": ("block", "sampled, head"),
    "the draft's input": ("draft input", "sampled, head"),
    "candidates in the draft's graph": ("draft graph", "greedy, head"),
    "a window's table": ("window", "sampled, head, window"),
    "draft K/V": ("draft K/V", "sampled, head"),
    "draft K/V, window": ("draft K/V", "sampled, head, window"),
    "recording one request in 20": ("recording", "sampled, head, recorded"),
    "counting for penalties": ("counting", "sampled, head, penalties"),
    "a prefill's token": ("prefill", "sampled, head"),
    "a prefill's token, everything": ("prefill", "mixed, head, everything"),
}


@dataclass(frozen=True)
class Cost:
    """Launches, bytes read and written, and bytes that lived at once."""

    launches: int
    bytes: int
    peak: int

    @property
    def microseconds(self) -> float:
        """The least that it takes: of the device's memory, or of the host's launches."""
        return 1e6 * max(self.bytes / BANDWIDTH, self.launches * LAUNCH_SECONDS)

    @property
    def budget(self) -> Cost:
        """This, with bytes rounded up to three digits."""
        return Cost(self.launches, _up(self.bytes), _up(self.peak))

    def against(self, budget: Cost) -> list[str]:
        """What is above a budget, or far below it."""
        found = []
        for name in ("launches", "bytes", "peak"):
            own, most = getattr(self, name), getattr(budget, name)
            if own > most:
                found.append(f"{own} {name}, above the budget of {most}")
            elif own < (most if name == "launches" else STALE * most):
                found.append(f"{own} {name}: the budget of {most} is stale")
        return found


def _up(value: int) -> int:
    digit = 10 ** max(len(str(value)) - 3, 0)
    return math.ceil(value / digit) * digit


@dataclass(frozen=True)
class Counted:
    """What one round launched, and what lived."""

    found: tuple[Launch, ...]
    peaks: dict[str, int]

    def cost(self, *phases: str) -> Cost:
        own = [launch for launch in self.found if launch.phase in phases]
        return Cost(
            sum(launch.launches for launch in own),
            sum(launch.moved for launch in own),
            max(self.peaks.get(phase, 0) for phase in phases),
        )


def run(name: str, bs: int, **options: Any) -> Counted:
    """One round of ``bs`` requests, its results checked.

    Args:
        options: of :class:`FakeServer`, besides the round's own.
    """
    kind = ROUNDS[name]
    with FakeCuda() as cuda:
        server = FakeServer(cuda, bs, *kind.requests, **kind.options | options)
        counter, result = server.round()
        check(server, counter, result)
    return Counted(tuple(counter.found), dict(counter.peaks))


@cache
def counted(name: str, bs: int) -> Counted:
    """:func:`run`, once for all that ask."""
    return run(name, bs)


def check(server: FakeServer, counter: Counter, result: Any) -> None:
    """The shapes and dtypes that the functions of a round promise."""
    assert {launch.phase for launch in counter.found} <= set(PHASES)
    bs, width, draft_input = server.bs, server.width, result.next_draft_input
    block, proposal = server.block, server.block.proposal
    expected = [
        (result.next_token_ids, (bs * width,), torch.int64),
        (result.accept_lens, (bs,), torch.int32),
        (result.new_seq_lens, (bs,), torch.int64),
        (draft_input.bonus_tokens, (bs,), torch.int64),
        (draft_input.new_seq_lens, (bs,), torch.int64),
        (block.tokens, (bs, width), torch.int64),
        (block.positions, (bs, width), torch.int64),
        (block.slots, (bs * width,), torch.int64),
        (server.logits, (bs * width, VOCABULARY), torch.float32),
    ]
    if proposal is not None:
        each = (bs, width - 1)
        expected += [
            (proposal.tokens, each, torch.int64),
            (proposal.ids, (*each, CANDIDATES), torch.int64),
            (proposal.q, (*each, CANDIDATES), torch.float32),
            (proposal.scores, (*each, CANDIDATES), torch.float32),
        ]
        assert proposal.choice.dtype == torch.int64
        assert proposal.choice.shape[:2] == each
    for tensor, shape, dtype in expected:
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        assert tensor.device.type == "cuda" and tensor.is_contiguous()


def measure() -> dict[str, dict[int, Cost]]:
    """All rounds and parts, for every number of requests."""
    found = {name: {bs: counted(name, bs).cost(*ROUND) for bs in REQUESTS} for name in ROUNDS}
    for part, (phase, name) in PARTS.items():
        found[part] = {bs: counted(name, bs).cost(phase) for bs in REQUESTS}
    return found


def read_budgets() -> dict[str, dict[int, Cost]]:
    """Of rounds and parts by name and number of requests."""
    tables = tomllib.loads(BUDGETS.read_text())
    return {
        name: {int(bs): Cost(**values) for bs, values in table.items()}
        for name, table in tables.items()
    }


def write_budgets(found: dict[str, dict[int, Cost]]) -> None:
    """Every count becomes its budget."""
    lines = [
        "# What a round may cost by number of requests; counted, rounded up. Written by",
        "# ``python -m tests.launches --write``; ``bytes`` are read and written, ``peak`` live.",
    ]
    for name, costs in found.items():
        lines += ["", f'["{name}"]']
        for bs, cost in costs.items():
            own = cost.budget
            sizes = f"bytes = {own.bytes:_}, peak = {own.peak:_}"
            lines.append(f"{bs} = {{ launches = {own.launches}, {sizes} }}")
    BUDGETS.write_text("\n".join(lines) + "\n")
