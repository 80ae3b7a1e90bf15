"""Memory and time of one training step of a drafter for DeepSeek-V4-Flash, worked out.

    python examples/recipes/v4_training_fit.py
    python examples/recipes/v4_training_fit.py --dependency-rank 256 --sequence 4096 --anchors 512

Activations and floating-point operations are counted, not guessed: the drafter's own code runs at
full width on tensors without data. Parameters, optimizer, borrowed matrices and logits follow from
their shapes. ``--measure`` runs one layer for real, on few tokens, and compares. Time is operations
over ``--tflops``: a lower bound that no run has confirmed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from sglang_hyperdflash.targets.files import TargetFacts
from sglang_hyperdflash.training.anchors import block_mask
from sglang_hyperdflash.training.drafter import Drafter, DrafterShape, draft_config

CONFIG = Path(__file__).parent.parent / "deepseek_v4_flash_config" / "target" / "config.json"
GIB = 2**30
FP32, BF16 = 4, 2
# fp32 weights, their gradient, and AdamW's two moments.
BYTES_A_PARAMETER = 4 * FP32
# Logits of a chunk that are alive at once: own and with the head, the log-softmax of each that its
# CE keeps, log q, log p, p - q, a gradient.
LOGITS_ALIVE = 8


@dataclass(frozen=True)
class Step:
    """One micro batch of a training step; bytes and operations.

    Attributes:
        saved: activations kept for the backward pass; flops: forward of the drafter.
        mask: the block mask as attention takes it.
    """

    parameters: int
    saved: int
    flops: int
    mask: int


def config_of(layers: int, rank: int | None) -> dict:
    """A drafter of the paper's sizes for DeepSeek-V4-Flash."""
    facts = TargetFacts.from_config(json.loads(CONFIG.read_text()))
    shape = DrafterShape(
        layers=layers,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate_size=3 * facts.hidden_size,
        reducer="hc_gate",
        dependency_rank=rank,
    )
    raw = draft_config(facts, None, shape, 0)
    raw["hyperdflash_config"] |= {"gate": "approximate"}
    return raw | {"max_position_embeddings": 8192}


@contextmanager
def counted(drafter: torch.nn.Module):
    """Bytes that autograd keeps, each storage once and no parameter's; read ``[0]`` afterwards."""
    own = {p.untyped_storage()._cdata for p in drafter.parameters()}
    seen: set[int] = set()
    total, kept = [0], []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own | seen:
            seen.add(storage._cdata)
            kept.append(storage)  # alive: no other may take its place
            total[0] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield total


def forward(drafter: Drafter, batch: int, sequence: int, blocks: int) -> torch.Tensor:
    """The drafter over ``blocks`` blocks of each of ``batch`` samples, as the trainer runs it."""
    config = drafter.config
    d, b = config.hidden_size, config.block_size
    residual = torch.randn(batch, sequence, config.hc_mult * d)
    anchors = torch.zeros(batch, blocks, dtype=torch.long)
    mask = block_mask(anchors, torch.ones_like(anchors).bool(), sequence, b, causal=config.causal)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        context = drafter.reduce(residual)
        return drafter(context, torch.randn(batch, blocks, b, d), anchors, mask)


def count(raw: dict, batch: int, sequence: int, blocks: int) -> Step:
    """A step on tensors without data."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        drafter = Drafter(raw)
        with counted(drafter) as saved, FlopCounterMode(display=False) as flops:
            forward(drafter, batch, sequence, blocks)
        parameters = sum(p.numel() for p in drafter.parameters())
    rows = blocks * raw["block_size"]
    mask = batch * rows * (sequence + rows)
    return Step(parameters, saved[0], flops.get_total_flops(), mask * (1 + BF16))


def seconds_of(action: Callable[[], None]) -> float:
    """Wall time of one call."""
    started = time.monotonic()
    action()
    return time.monotonic() - started


def measure(rank: int | None) -> None:
    """One real layer at full width: what autograd kept and what the count says."""
    raw, size = config_of(1, rank), {"batch": 1, "sequence": 96, "blocks": 8}
    expected = count(raw, **size)
    drafter = Drafter(raw)
    with counted(drafter) as saved:
        spent = seconds_of(lambda: forward(drafter, **size).float().square().mean().backward())
    print(
        f"one layer, {size}: kept {saved[0] / 2**20:.1f} MiB, counted "
        f"{expected.saved / 2**20:.1f}; forward and backward {spent:.1f} s, "
        f"{3 * expected.flops / spent / 1e9:.1f} GFLOP/s"
    )


def report(args: argparse.Namespace) -> str:
    """The table, in Markdown."""
    raw = config_of(args.layers, args.dependency_rank)
    vocabulary, d, b = raw["vocab_size"], raw["hidden_size"], raw["block_size"]
    step = count(raw, args.micro_batch, args.sequence, args.anchors)
    drafts = args.micro_batch * args.anchors * (b - 1)
    features = args.micro_batch * args.sequence * (raw["hyperdflash_config"]["hc_mult"] + 1) * d
    # Draft logits: forward, again in the backward, and its two products less the frozen weight's;
    # the teacher's twice. The head's: the same on r columns, with the gradient of B.
    per_row = 2 * vocabulary * d * 5 + 2 * vocabulary * (args.dependency_rank or 0) * 4
    logit_flops = drafts * per_row
    memory = {
        f"drafter, {step.parameters / 1e6:.0f} M parameters: weights, gradients, AdamW, fp32": (
            step.parameters * BYTES_A_PARAMETER
        ),
        "embedding and LM head of the target, fp32": 2 * vocabulary * d * FP32,
        f"target states of {args.micro_batch} x {args.sequence} tokens, fp32": features * FP32,
        "activations kept for the backward pass": step.saved,
        "block mask": step.mask,
        f"logits of {args.chunk} drafts": LOGITS_ALIVE * args.chunk * vocabulary * FP32,
    }
    flops = {
        "drafter, forward and backward": 3 * step.flops,
        "logits of drafts and teacher, forward, again, backward": logit_flops,
    }
    lines = [
        f"DeepSeek-V4-Flash, {args.layers} layers, {args.anchors} blocks of {b} a sample, micro "
        f"batch {args.micro_batch}, sequence {args.sequence}, head rank {args.dependency_rank}:",
        "",
        "| memory | GiB |",
        "|---|---|",
        *(f"| {name} | {value / GIB:.1f} |" for name, value in memory.items()),
        f"| sum | {sum(memory.values()) / GIB:.1f} |",
        "",
        f"| time of a micro batch at {args.tflops:g} TFLOP/s | TFLOP | ms |",
        "|---|---|---|",
    ]
    for name, value in [*flops.items(), ("sum", sum(flops.values()))]:
        lines.append(f"| {name} | {value / 1e12:.0f} | {value / args.tflops / 1e9:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--sequence", type=int, default=4096, help="tokens of a sample")
    parser.add_argument("--anchors", type=int, default=512, help="blocks of a sample")
    parser.add_argument("--micro-batch", type=int, default=4, help="samples")
    parser.add_argument("--chunk", type=int, default=2048, help="drafts with logits at a time")
    parser.add_argument("--dependency-rank", type=int, default=256)
    parser.add_argument("--tflops", type=float, default=400.0, help="of the GPU, reached in bf16")
    parser.add_argument("--measure", action="store_true", help="compare with one real layer")
    args = parser.parse_args()
    print(report(args))
    if args.measure:
        measure(args.dependency_rank)


if __name__ == "__main__":
    main()
