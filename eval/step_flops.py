"""``python -m eval.step_flops``: floating-point operations of a training step by data type.

The trainer's own step on fake tensors: shapes and types alone, no GPU, no weights, no memory.
Without a GPU torch has no backward pass on fake CUDA tensors, so these are fake CPU tensors under a
GPU's autocast.
"""

import argparse
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from sglang_hyperdflash.draft.hc_head import HcHead
from sglang_hyperdflash.targets.final_state import FinalState
from sglang_hyperdflash.tools.atomic import write_json
from sglang_hyperdflash.training import trainer as trainer_module
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.objective import Blocks, Objective, denominators
from sglang_hyperdflash.training.replay import Replay
from sglang_hyperdflash.training.samples import Sample, States, collate
from sglang_hyperdflash.training.trainer import Trainer

PRODUCTS = {torch.ops.aten.mm}


@dataclass(frozen=True)
class Step:
    """One micro batch: samples of so many tokens, all of them answer except the prompt."""

    samples: int = 4
    tokens: int = 2048  # of a sample
    prompt: int = 256  # of these tokens
    anchors: int = 512  # of a sample


class ProductFlops(TorchDispatchMode):
    """Operations of matrix products by the type of their operands; attention is not a product."""

    def __init__(self) -> None:
        super().__init__()
        self.by_dtype: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        packet = getattr(func, "overloadpacket", None)
        if packet in PRODUCTS:
            name = str(args[0].dtype).removeprefix("torch.")
            self.by_dtype[name] += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        return out


def fake_pair(raw: dict) -> tuple[Drafter, nn.Module]:
    """A drafter and its target's ends without memory, inside a ``FakeTensorMode``."""
    small = raw | {"max_position_embeddings": min(raw["max_position_embeddings"], 1 << 14)}
    vocabulary, d = raw["vocab_size"], raw["hidden_size"]
    drafter, m = Drafter(small), raw["hyperdflash_config"]["hc_mult"]
    gate = HcHead(torch.empty(m, m * d), torch.empty(m), torch.empty(1))
    ends = nn.Module()
    ends.embed_tokens = nn.Embedding(vocabulary, d, dtype=torch.bfloat16)
    ends.lm_head = nn.Linear(d, vocabulary, bias=False, dtype=torch.bfloat16)
    ends.final = FinalState(gate, torch.empty(d), rms_eps=1e-6, hc_eps=1e-6)
    return drafter, ends.requires_grad_(False)


def count(
    raw: dict, step: Step | None = None, objective: Objective | None = None, *, bf16: bool = True
) -> dict[str, int]:
    """Operations of one micro batch, forward and backward, by type.

    ``raw`` is the drafter's config.json, ``bf16`` as in a training file.
    """
    step, device = step or Step(), torch.device("cpu")
    sample = Sample.continuation(list(range(step.tokens)), step.prompt)
    rows, seeds = collate([sample] * step.samples), list(range(step.samples))
    blocks = Blocks.draw(rows, step.anchors, raw["block_size"], seeds)
    width = raw["hidden_size"] * raw["hyperdflash_config"]["hc_mult"]
    # The mode is left before the step: which rows to compute is chosen by real numbers.
    with FakeTensorMode(allow_non_fake_inputs=True):
        drafter, target = fake_pair(raw)
        states = States.without_layers(torch.empty(step.samples, step.tokens, width))
    objective = (objective or Objective()).resolved(drafter.config)
    trainer = SimpleNamespace(
        drafter=drafter,
        target=target,
        objective=objective,
        recipe=SimpleNamespace(bf16=bf16),
        device=device,
        replay=Replay(drafter, target, bf16),
    )

    def gpu_products(device: torch.device, enabled: bool) -> torch.autocast:
        return torch.autocast(device.type, torch.bfloat16, enabled)

    gpu = mock.patch.object(trainer_module, "bf16_products", gpu_products)
    with gpu, ProductFlops() as counted:
        terms, *_ = Trainer._sums(trainer, rows, states, blocks)
        factors = torch.tensor(objective.factors)
        (factors * terms / denominators(objective, blocks)).sum().backward()
    return dict(counted.by_dtype)


def main() -> None:
    """Count a step of a drafter's config and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draft", type=Path, required=True, help="drafter folder (config.json)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    raw = json.loads((args.draft / "config.json").read_bytes())
    counts = {"bf16": count(raw), "bf16 = false": count(raw, bf16=False)}
    write_json(args.out, counts, indent=1)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
