"""``hyperdflash plan --training``: what a training file costs, from its drafter's dimensions.

Operations and bytes are counted. The peak of a GPU, the share of it that is reached, and a server's
decoding speed are assumptions, which are options.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from sglang_hyperdflash.draft.config import load_config
from sglang_hyperdflash.targets.files import drafter_folder
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.objective import Objective
from sglang_hyperdflash.training.recipe import Stage, read_schedule

# Operations of attention, forward and backward, relative to the forward pass: a flash backward pass
# has 2.5 times as many.
ATTENTION_PASSES = 3.5
TOKEN_BYTES = SCALE_BYTES = 4


def products(
    raw: dict[str, Any], tokens: int, blocks: int, drafts: int, taught: int, scored: int
) -> int:
    """Return the operations of a step's matrix products, forward and backward.

    Args:
        raw: the drafter's ``config.json``.
        tokens: context tokens of all samples of the step, as the other counts are.
        blocks: drawn blocks.
        drafts: supervised draft rows.
        taught: draft rows that the target teaches.
        scored: draft rows whose dependency head is evaluated over the vocabulary.
    """
    d, layers, rows = raw["hidden_size"], raw["num_hidden_layers"], blocks * raw["block_size"]
    q = raw["num_attention_heads"] * raw["head_dim"]
    kv = 2 * raw["num_key_value_heads"] * raw["head_dim"]
    mlp = 3 * raw["intermediate_size"]
    layer = 2 * d * (tokens * kv + rows * (2 * q + kv + mlp))
    network = 3 * layers * layer  # the backward pass has two products for each of the forward's
    # Logits are computed again in the backward pass; the LM head and the teacher are frozen.
    head = 2 * d * raw["vocab_size"] * (3 * drafts + 2 * taught)
    # The gates of the frozen target and of the reducer are computed again as well.
    gates = 2 * raw["hyperdflash_config"]["hc_mult"] ** 2 * d * (taught + 3 * tokens)
    dependency = raw["hyperdflash_config"].get("dependency")
    rank = 0 if dependency is None else dependency["rank"]
    return network + head + gates + 4 * 2 * rank * scored * (d + raw["vocab_size"])


def visible_keys(tokens: int, answer: int, block: int, window: int | None) -> float:
    """Return the mean number of keys that a block row sees, over all anchors of the answer.

    Args:
        tokens: of the conversation; its last ``answer`` tokens are the target's.
    """
    first, last = tokens - answer, tokens - 1
    context_keys = sum(min(anchor, window or anchor) for anchor in range(first, last))
    return context_keys / (last - first) + block


def sample_operations(
    raw: dict[str, Any], objective: Objective, anchors: int, tokens: int, answer: int
) -> float:
    """Return the operations of one sample in a training step: matrix products and attention.

    Every draft of a block counts as supervised, since the end of an answer cuts few blocks.

    Args:
        objective: resolved.
    """
    block, drafts = raw["block_size"], raw["block_size"] - 1
    blocks = min(anchors, answer - 1)
    taught = drafts if objective.taught is None else min(objective.taught, drafts)
    scored = 0 if objective.loss == "selector" else drafts
    counts = blocks * drafts, blocks * taught, blocks * scored
    window = raw["hyperdflash_config"].get("window")
    pairs = blocks * block * visible_keys(tokens, answer, block, window)
    width = raw["num_attention_heads"] * raw["head_dim"]
    attention = ATTENTION_PASSES * 4 * width * pairs * raw["num_hidden_layers"]
    return products(raw, tokens, blocks, *counts) + attention


def gpu_hours(args: argparse.Namespace, operations: float) -> float:
    """Return the GPU hours of operations, with the assumed peak and utilization."""
    return operations / (args.gpu_tflops * 1e12 * args.utilization) / 3600


def stage_cost(
    args: argparse.Namespace,
    raw: dict[str, Any],
    stage: Stage,
    objective: Objective,
    conversations: int,
) -> dict[str, float]:
    """Return the GPU hours of a stage by command, and the ``bytes`` of its captured states.

    Args:
        raw: the drafter's ``config.json``.
        objective: resolved.
        conversations: of the stage's data.

    Raises:
        HyperDFlashConfigError: the stage's length is given in minutes.
    """
    if stage.minutes is not None:
        raise HyperDFlashConfigError(
            "plan --training counts stages of epochs or steps; found minutes, which are the cost."
        )
    steps = stage.resolve([conversations], objective).steps
    lengths = args.tokens, args.answer_tokens
    operations = sample_operations(raw, objective, stage.anchors, *lengths)
    tokens = conversations * args.tokens
    paths, d = raw["hyperdflash_config"]["hc_mult"], raw["hidden_size"]
    path_bytes = d + SCALE_BYTES if args.states_dtype == "fp8" else 2 * d
    return {
        "regenerate": conversations * args.answer_tokens / args.decode_rate / 3600,
        "capture": gpu_hours(args, 2 * args.active_parameters * tokens),
        "train": gpu_hours(args, steps * stage.batch * operations),
        "bytes": tokens * (paths * path_bytes + TOKEN_BYTES),
    }


def report(costs: list[dict[str, float]], args: argparse.Namespace) -> str:
    """Return the stages as one table, the days of all stages, and the assumptions."""
    lines = [f"{'stage':>5}{'regenerate':>12}{'capture':>10}{'train':>9}{'GPU hours':>11}{'TB':>8}"]
    hours = 0.0
    for stage, cost in enumerate(costs, 1):
        regenerate, capture, train, size = cost.values()
        stage_hours = regenerate + capture + train
        hours += stage_hours
        lines.append(
            f"{stage:>5}{regenerate:>12,.1f}{capture:>10,.1f}{train:>9,.1f}"
            f"{stage_hours:>11,.1f}{size / 1e12:>8,.2f}"
        )
    lines.append("days: " + "; ".join(f"{n} GPUs {hours / n / 24:.1f}" for n in args.gpus))
    lines.append(
        f"assumed: {args.utilization:.0%} of {args.gpu_tflops:g} TFLOP/s per GPU, "
        f"{args.active_parameters / 1e9:g}e9 active parameters, {args.decode_rate:g} answer "
        "tokens/s regenerated per GPU, no waiting for data"
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
    stages = zip(schedule.stage, counts, strict=True)
    costs = [stage_cost(args, raw, stage, objective, count) for stage, count in stages]
    print(json.dumps(costs, indent=1) if args.json else report(costs, args))
    return 0
