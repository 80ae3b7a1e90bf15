"""``hyperdflash plan --training``: what a training file costs, from its drafter's dimensions.

Operations and bytes are counted, with the padding and waiting of the trainer's dealing. The peak of
a GPU, the share of it that is reached, the spread of lengths, and the rates of servers and disks
are assumptions, which are options.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from functools import cache, partial
from statistics import fmean
from typing import Any

from sglang_hyperdflash.draft.checkpoint import expected_tensors
from sglang_hyperdflash.draft.config import load_config, parse_config
from sglang_hyperdflash.targets.files import drafter_folder
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.deal import deal, sample_rows
from sglang_hyperdflash.training.objective import Objective
from sglang_hyperdflash.training.recipe import Stage, read_schedule
from sglang_hyperdflash.training.replay import ANCHORS, GROUP

# Operations of attention, forward and backward, relative to the forward pass: a flash backward pass
# has 2.5 times as many.
ATTENTION_PASSES = 3.5
TOKEN_BYTES = SCALE_BYTES = 4
# Of a checkpoint: an fp32 weight and its two moments. Bytes/s that a GPU copies to its host.
PARAMETER_BYTES, COPY_RATE = 12, 10e9
# Batches of which means are taken.
DRAWS = 30
# Tokens of a conversation, and of its answer.
Length = tuple[int, int]


def forward(raw: dict[str, Any], tokens: int, rows: int) -> int:
    """Return the products of a forward pass's layers over context tokens and rows of blocks."""
    d, q = raw["hidden_size"], raw["num_attention_heads"] * raw["head_dim"]
    kv = 2 * raw["num_key_value_heads"] * raw["head_dim"]
    width = 2 * q + kv + 3 * raw["intermediate_size"]
    return raw["num_hidden_layers"] * 2 * d * (tokens * kv + rows * width)


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
    d = raw["hidden_size"]
    # The backward pass has two products for each of the forward's.
    network = 3 * forward(raw, tokens, blocks * raw["block_size"])
    # Logits are computed again in the backward pass; the LM head and the teacher are frozen.
    head = 2 * d * raw["vocab_size"] * (3 * drafts + 2 * taught)
    # The gates of the frozen target and of the reducer are computed again as well.
    gates = 2 * raw["hyperdflash_config"]["hc_mult"] ** 2 * d * (taught + 3 * tokens)
    dependency = raw["hyperdflash_config"].get("dependency")
    rank = 0 if dependency is None else dependency["rank"]
    return network + head + gates + 4 * 2 * rank * scored * (d + raw["vocab_size"])


@cache
def visible_keys(tokens: int, answer: int, block: int, window: int | None) -> float:
    """Return the mean number of keys that a block row sees, over all anchors of the answer.

    Args:
        tokens: of the conversation; its last ``answer`` tokens are the target's.
    """
    first, last = tokens - answer, tokens - 1
    context_keys = sum(min(anchor, window or anchor) for anchor in range(first, last))
    return context_keys / (last - first) + block


def attention(raw: dict[str, Any], lengths: Sequence[Length], anchors: float = math.inf) -> float:
    """Return the operations of a forward pass's attention, over so many blocks a sample at most."""
    sizes = raw["block_size"], raw["hyperdflash_config"].get("window")
    pairs = sum(min(anchors, n - 1) * visible_keys(tokens, n, *sizes) for tokens, n in lengths)
    width = raw["num_attention_heads"] * raw["head_dim"] * raw["num_hidden_layers"]
    return 4 * width * raw["block_size"] * pairs


def batch_operations(
    raw: dict[str, Any], objective: Objective, anchors: int, lengths: Sequence[Length]
) -> float:
    """Return the operations of a micro batch in a training step: matrix products and attention.

    Its samples are padded to the longest one, and to the most blocks. Every draft of a block counts
    as supervised, since the end of an answer cuts few blocks.

    Args:
        objective: resolved.
    """
    size, drafts = len(lengths), raw["block_size"] - 1
    blocks = [min(anchors, answer - 1) for _, answer in lengths]
    taught = drafts if objective.taught is None else min(objective.taught, drafts)
    scored = 0 if objective.loss == "selector" else drafts
    counts = (sum(blocks) * rows for rows in (drafts, taught, scored))
    padded = size * max(lengths)[0], size * max(blocks)
    return products(raw, *padded, *counts) + ATTENTION_PASSES * attention(raw, lengths, anchors)


def replay_operations(raw: dict[str, Any], lengths: Sequence[Length]) -> float:
    """Return the operations of an evaluation's group, with a block at every answer position.

    With a dependency head, whose own few are not counted, blocks are drafted a second time, and the
    target's logits computed, for the expected accept length.
    """
    size, drafts, answers = len(lengths), raw["block_size"] - 1, [n - 1 for _, n in lengths]
    passes = 1 if raw["hyperdflash_config"].get("dependency") is None else 2
    # Keys and values of the context are computed for some blocks at a time.
    context = size * max(lengths)[0] * math.ceil(max(answers) / ANCHORS)
    network = forward(raw, context, size * max(answers) * (drafts + 1)) + attention(raw, lengths)
    logits = sum(answers) * drafts * (2 * passes - 1)
    return passes * network + 2 * raw["hidden_size"] * raw["vocab_size"] * logits


def drawn(args: argparse.Namespace, size: int) -> list[list[Length]]:
    """Return batches of lengths of a lognormal spread, the same ones every time."""
    variance, draw = math.log1p(args.spread**2), random.Random(0)

    def length() -> Length:
        x = draw.lognormvariate(math.log(args.tokens) - variance / 2, math.sqrt(variance))
        return max(round(x), 2), max(round(x * args.answer_tokens / args.tokens), 2)

    return [[length() for _ in range(size)] for _ in range(DRAWS)]


def step_operations(
    args: argparse.Namespace, raw: dict[str, Any], objective: Objective, stage: Stage, gpus: int
) -> float:
    """Return the mean operations of a step on the GPU that has most of them."""
    total = 0.0
    operations = partial(batch_operations, raw, objective, stage.anchors)
    for batch in drawn(args, stage.batch):
        rows = [sample_rows(*size, stage.anchors, raw["block_size"]) for size in batch]
        shares = deal(rows, gpus, stage.micro_batch)
        total += max(sum(operations([batch[i] for i in p]) for p in share) for share in shares)
    return total / DRAWS


def stage_cost(
    args: argparse.Namespace,
    raw: dict[str, Any],
    stage: Stage,
    objective: Objective,
    conversations: int,
    gpus: int,
) -> dict[str, float]:
    """Return the GPU hours of a stage by part, and the TB of states on disk at once, and read.

    A part takes as long as its operations on the busiest GPU, or as its reading or writing.

    Args:
        raw: the drafter's ``config.json``. objective: resolved.
        conversations: of the stage's data. gpus: a divisor of its batch.

    Raises:
        HyperDFlashConfigError: the stage's length is given in minutes.
    """
    if stage.minutes is not None:
        raise HyperDFlashConfigError(
            "plan --training counts stages of epochs or steps; found minutes, which are the cost."
        )
    steps = stage.resolve([conversations], objective).steps
    checkpoints = math.ceil(steps / stage.every)
    paths, d = raw["hyperdflash_config"]["hc_mult"], raw["hidden_size"]
    path_bytes = d + SCALE_BYTES if args.states_dtype == "fp8" else 2 * d
    state = args.tokens * (paths * path_bytes + TOKEN_BYTES)  # of a conversation
    stored = min(conversations * state, (args.budget or math.inf) * 2**30)
    parameters = sum(map(math.prod, expected_tensors(raw, parse_config(raw)).values()))

    def hours(operations: float, size: float, rate: float) -> float:
        compute = operations / (args.gpu_tflops * 1e12 * args.utilization)
        return gpus * max(compute, size / (rate * 1e9)) / 3600

    prefill = 2 * args.active_parameters * args.tokens * conversations / gpus
    step = step_operations(args, raw, objective, stage, gpus)
    replay = fmean(replay_operations(raw, group) for group in drawn(args, GROUP))
    replay *= math.ceil(args.held_out / GROUP / gpus)
    held_out = args.held_out * state
    parts = {
        "regenerate": conversations * args.answer_tokens / args.decode_rate / 3600,
        "capture": hours(prefill, conversations * state, args.write_rate),
        "train": steps * hours(step, stage.batch * state, args.read_rate),
        "evaluate": checkpoints * hours(replay, held_out, args.read_rate),
        "checkpoint": checkpoints * PARAMETER_BYTES * parameters / COPY_RATE / 3600,
    }
    read = (steps * stage.batch * state + checkpoints * held_out) / 1e12
    return parts | {"GPU hours": sum(parts.values()), "TB stored": stored / 1e12, "TB read": read}


def report(costs: dict[int, list[dict[str, float]] | str], args: argparse.Namespace) -> str:
    """Return the stages on the first number of GPUs that can train, all days, and assumptions."""
    known = {n: stages for n, stages in costs.items() if not isinstance(stages, str)}
    first, lines = next(iter(known), 0), []
    for number, cost in enumerate(known.get(first, []), 1):
        if number == 1:
            lines.append(f"{first:>3} GPUs" + "".join(f"{name:>11}" for name in cost))
        lines.append(f"stage {number:>2}" + "".join(f"{value:>11,.1f}" for value in cost.values()))
    hours = {n: sum(cost["GPU hours"] for cost in stages) for n, stages in known.items()}
    days = "; ".join(f"{n} GPUs {hours[n] / n / 24:.1f}" for n in known)
    lines += [f"days: {days}"] if days else []
    lines += [reason for reason in costs.values() if isinstance(reason, str)]
    lines.append(
        f"assumed: {args.utilization:.0%} of {args.gpu_tflops:g} TFLOP/s per GPU, "
        f"{args.active_parameters / 1e9:g}e9 active parameters, {args.decode_rate:g} answer "
        f"tokens/s regenerated per GPU, {args.read_rate:g} GB/s read, {args.write_rate:g} written"
    )
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """Print the cost of a training file, or its JSON by number of GPUs."""
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
    args.held_out *= bool(schedule.held_out)
    costs: dict[int, list[dict[str, float]] | str] = {}
    for gpus in args.gpus:
        if odd := [stage.batch for stage in schedule.stage if stage.batch % gpus]:
            costs[gpus] = f"batch {odd[0]} cannot be shared by {gpus} GPUs: set a multiple"
            continue
        stages = zip(schedule.stage, counts, strict=True)
        costs[gpus] = [stage_cost(args, raw, stage, objective, n, gpus) for stage, n in stages]
    print(json.dumps(costs, indent=1) if args.json else report(costs, args))
    return 0
