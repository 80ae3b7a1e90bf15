"""``hyperdflash plan --training``: what a training file costs, from its drafter's dimensions.

Operations and bytes are counted; a GPU's rate, the share of it that is reached, and a server's
speed of decoding are assumptions that options replace.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_hyperdflash.draft.config import load_config
from sglang_hyperdflash.targets.files import drafter_folder
from sglang_hyperdflash.tools.command_line import COUNT, SHARE, number
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.objective import Objective
from sglang_hyperdflash.training.recipe import Stage, read_schedule

# Operations of a flash backward pass to its forward's, 2.5, and that forward.
ATTENTION_PASSES = 3.5
TOKEN_BYTES = SCALE_BYTES = 4


@dataclass(frozen=True)
class Conversation:
    """Tokens of a sample, the last ``answer`` of them the target's."""

    tokens: int = 1000
    answer: int = 800


@dataclass(frozen=True)
class Assumptions:
    """What this package cannot count.

    tflops: bf16 peak of a GPU; utilization: the share reached. active: the target's parameters that
    a token uses. decode_rate: answer tokens a second that a server regenerates per GPU.
    """

    tflops: float
    utilization: float
    active: float
    decode_rate: float

    def hours(self, operations: float) -> float:
        """GPU hours of so many operations."""
        return operations / (self.tflops * 1e12 * self.utilization) / 3600


@dataclass(frozen=True)
class Cost:
    """Of one stage: GPU hours of each command, and bytes of captured states."""

    regenerate: float
    capture: float
    train: float
    bytes: int

    @property
    def hours(self) -> float:
        """GPU hours of all commands."""
        return self.regenerate + self.capture + self.train


def products(raw: dict[str, Any], tokens: int, blocks: int, drafts: int, taught: int, own: int):
    """Operations of the matrix products of a step, forward and backward, over its samples.

    Args:
        raw: the drafter's config.json. tokens: of context; blocks: drawn.
        drafts: supervised draft rows; taught: those that the target teaches; own: the rows whose
            dependency head is evaluated over the vocabulary.
    """
    d, layers, rows = raw["hidden_size"], raw["num_hidden_layers"], blocks * raw["block_size"]
    q = raw["num_attention_heads"] * raw["head_dim"]
    kv = 2 * raw["num_key_value_heads"] * raw["head_dim"]
    mlp = 3 * raw["intermediate_size"]
    layer = 2 * d * (tokens * kv + rows * (2 * q + kv + mlp))
    network = 3 * layers * layer  # the backward pass has two products for each of the forward's
    # Logits are computed again in the backward pass; the LM head is frozen, and so is the teacher.
    head = 2 * d * raw["vocab_size"] * (3 * drafts + 2 * taught)
    # Gates: the frozen target's, and the reducer's, which are computed again, too.
    gates = 2 * raw["hyperdflash_config"]["hc_mult"] ** 2 * d * (taught + 3 * tokens)
    dependency = raw["hyperdflash_config"].get("dependency")
    rank = 0 if dependency is None else dependency["rank"]
    return network + head + gates + 4 * 2 * rank * own * (d + raw["vocab_size"])


def visible_keys(conversation: Conversation, block: int, window: int | None) -> float:
    """Keys that a block row sees, the mean over all anchors of the answer."""
    first, last = conversation.tokens - conversation.answer, conversation.tokens - 1
    seen = sum(min(anchor, window or anchor) for anchor in range(first, last))
    return seen / (last - first) + block


def attention(raw: dict[str, Any], conversation: Conversation, blocks: int) -> float:
    """Operations of block attention over the visible keys, forward and backward."""
    window, block = raw["hyperdflash_config"].get("window"), raw["block_size"]
    width = raw["num_attention_heads"] * raw["head_dim"]
    pairs = blocks * block * visible_keys(conversation, block, window)
    return ATTENTION_PASSES * 4 * width * pairs * raw["num_hidden_layers"]


def sample_operations(
    raw: dict[str, Any], objective: Objective, anchors: int, conversation: Conversation
) -> float:
    """Operations of one sample in a training step.

    Args:
        objective: resolved. Every draft of a block counts as supervised: an answer's end cuts few.
    """
    blocks, drafts = min(anchors, conversation.answer - 1), raw["block_size"] - 1
    taught = drafts if objective.taught is None else min(objective.taught, drafts)
    rows = blocks * drafts
    own = 0 if objective.loss == "selector" else rows
    counted = products(raw, conversation.tokens, blocks, rows, blocks * taught, own)
    return counted + attention(raw, conversation, blocks)


def captured_bytes(raw: dict[str, Any], tokens: int, *, fp8: bool = False) -> int:
    """Bytes of the states of so many tokens: the residual of every path, and the token.

    Args:
        fp8: as `capture --states-dtype fp8` stores it, with a scale for each path; else in bf16.
    """
    paths, d = raw["hyperdflash_config"]["hc_mult"], raw["hidden_size"]
    return tokens * (paths * (d + SCALE_BYTES if fp8 else 2 * d) + TOKEN_BYTES)


def stage_cost(
    raw: dict[str, Any],
    stage: Stage,
    objective: Objective,
    conversations: int,
    conversation: Conversation,
    assumed: Assumptions,
    *,
    fp8: bool = False,
) -> Cost:
    """What a stage costs: answers regenerated, their states captured, the drafter trained.

    Args:
        fp8: whether the states are stored in fp8.

    Raises:
        HyperDFlashConfigError: the stage's length is given in minutes.
    """
    if stage.minutes is not None:
        raise HyperDFlashConfigError(
            "plan --training counts stages of epochs or steps; found minutes, which are the cost."
        )
    steps = stage.resolve(conversations, objective).steps
    one = sample_operations(raw, objective, stage.anchors, conversation)
    tokens = conversations * conversation.tokens
    return Cost(
        regenerate=conversations * conversation.answer / assumed.decode_rate / 3600,
        capture=assumed.hours(2 * assumed.active * tokens),
        train=assumed.hours(steps * stage.batch * one),
        bytes=captured_bytes(raw, tokens, fp8=fp8),
    )


def report(costs: Sequence[Cost], gpus: Sequence[int], assumed: Assumptions) -> str:
    """The stages as one table, the days of all, and what was assumed."""
    lines = [f"{'stage':>5}{'regenerate':>12}{'capture':>10}{'train':>9}{'GPU hours':>11}{'TB':>8}"]
    for stage, cost in enumerate(costs, 1):
        lines.append(
            f"{stage:>5}{cost.regenerate:>12,.1f}{cost.capture:>10,.1f}{cost.train:>9,.1f}"
            f"{cost.hours:>11,.1f}{cost.bytes / 1e12:>8,.2f}"
        )
    hours = sum(cost.hours for cost in costs)
    days = "; ".join(f"{n} GPUs {hours / n / 24:.1f}" for n in gpus)
    lines.append(f"days: {days}")
    lines.append(
        f"assumed: {assumed.utilization:.0%} of {assumed.tflops:g} TFLOP/s per GPU, "
        f"{assumed.active / 1e9:g}e9 active parameters, {assumed.decode_rate:g} answer tokens/s "
        "regenerated per GPU, no waiting for data"
    )
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """Print the cost of a training file, or its JSON."""
    schedule = read_schedule(args.training)
    draft = drafter_folder(args.draft)
    config = load_config(draft)
    raw = json.loads((draft / "config.json").read_bytes())
    objective = schedule.objective.resolved(config)
    counts = args.conversations * (len(schedule.stage) if len(args.conversations) == 1 else 1)
    if len(counts) != len(schedule.stage):
        raise HyperDFlashConfigError(
            f"--conversations: expected one number, or one for each of the {len(schedule.stage)} "
            f"stages of {args.training}; found {len(counts)}."
        )
    if not 2 <= args.answer_tokens <= args.tokens:
        raise HyperDFlashConfigError(
            f"--answer-tokens: expected 2 to --tokens {args.tokens}, found {args.answer_tokens}."
        )
    assumed = Assumptions(
        args.gpu_tflops, args.utilization, args.active_parameters, args.decode_rate
    )
    conversation, fp8 = Conversation(args.tokens, args.answer_tokens), args.states_dtype == "fp8"
    costs = [
        stage_cost(raw, stage, objective, count, conversation, assumed, fp8=fp8)
        for stage, count in zip(schedule.stage, counts, strict=True)
    ]
    if args.json:
        print(json.dumps([asdict(cost) for cost in costs], indent=1))
    else:
        print(report(costs, args.gpus, assumed))
    return 0


def add_arguments(parser) -> None:
    """Register the options of ``plan --training``."""
    positive = number(float, "above 0", lambda x: 0 < x < math.inf)
    add = parser.add_argument_group("cost of a training").add_argument
    add(
        "--training",
        type=Path,
        metavar="FILE",
        help="training file whose cost is printed (default: K/V memory)",
    )
    add(
        "--conversations",
        type=COUNT,
        nargs="+",
        default=[300_000],
        help="conversations of all stages, or of each",
    )
    add("--tokens", type=COUNT, default=1000, help="tokens of a conversation")
    add("--answer-tokens", type=COUNT, default=800, help="its regenerated tokens")
    add(
        "--states-dtype",
        choices=("auto", "fp8"),
        default="auto",
        help="of the stored states, as in `hyperdflash capture`; auto is counted as bf16",
    )
    add("--gpus", type=COUNT, nargs="+", default=[8, 16, 64], help="GPUs whose days are printed")
    add("--gpu-tflops", type=positive, default=989.0, help="bf16 peak of a GPU")
    add("--utilization", type=SHARE, default=0.4, help="share of the peak that is reached")
    add(
        "--active-parameters",
        type=positive,
        default=13e9,
        help="parameters of the target that a token uses",
    )
    add("--decode-rate", type=positive, default=1000.0, help="answer tokens/s per serving GPU")
