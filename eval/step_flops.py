"""``python -m eval.step_flops``: operations and bytes of a training step.

The trainer's own step on fake tensors: shapes and types alone, no GPU, no weights, no memory.
Without a GPU torch has no backward pass on fake CUDA tensors, so these are fake CPU tensors under a
GPU's autocast; attention is a CPU's, with a dense mask. *Before* is commit b6fd39dd, which held the
target's embedding and LM head in fp32; now they have the checkpoint's type.
"""

import argparse
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
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

aten = torch.ops.aten
PRODUCTS = {aten.mm}
# Memory is reserved, or looked at in another way.
FREE = {aten.empty, aten.empty_like, aten.new_empty, aten._unsafe_view}
# As much is read of the first argument as is written.
GATHERS = {aten.embedding, aten.gather, aten.index, aten.index_select}


@dataclass(frozen=True)
class Step:
    """One micro batch: samples of so many tokens, all of them answer except the prompt."""

    samples: int = 4
    tokens: int = 2048  # of a sample
    prompt: int = 256  # of these tokens
    anchors: int = 512  # of a sample


class Cost(TorchDispatchMode):
    """What a step does.

    Attributes:
        by_dtype: operations of matrix products by the type of their operands; attention is none.
        moved: bytes that operators read and write, each tensor once; views move nothing.
        cast: of these, by casts of the target's embedding or LM head. casts: their number.
        resident: bytes of embedding and LM head.
    """

    def __init__(self, ends: nn.Module) -> None:
        super().__init__()
        weights = ends.embed_tokens.weight, ends.lm_head.weight
        self.by_dtype: Counter[str] = Counter()
        self.moved = self.cast = self.casts = 0
        self.resident = sum(weight.nbytes for weight in weights)
        self._vocabulary = weights[0].shape

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet in PRODUCTS:
            name = str(args[0].dtype).removeprefix("torch.")
            self.by_dtype[name] += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        if func.namespace == "aten" and packet not in FREE and not func.is_view:
            read = args[1:] if packet in GATHERS else [args, kwargs]
            moved = _bytes([read, out]) + (_bytes(out) if packet in GATHERS else 0)
            self.moved += moved
            if packet == aten._to_copy and out.shape == self._vocabulary:
                self.cast, self.casts = self.cast + moved, self.casts + 1
        return out


def _bytes(values: Any) -> int:
    """Of different tensors; one that is expanded has no more than its memory."""
    tensors = {id(t): t for t in tree_leaves(values) if isinstance(t, torch.Tensor)}.values()
    return sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors)


def fake_pair(raw: dict, dtype: torch.dtype = torch.bfloat16) -> tuple[Drafter, nn.Module]:
    """A drafter and its target's ends without memory, inside a ``FakeTensorMode``.

    ``dtype`` is that of embedding and LM head.
    """
    small = raw | {"max_position_embeddings": min(raw["max_position_embeddings"], 1 << 14)}
    vocabulary, d = raw["vocab_size"], raw["hidden_size"]
    drafter, m = Drafter(small), raw["hyperdflash_config"]["hc_mult"]
    gate = HcHead(torch.empty(m, m * d), torch.empty(m), torch.empty(1))
    ends = nn.Module()
    ends.embed_tokens = nn.Embedding(vocabulary, d, dtype=dtype)
    ends.lm_head = nn.Linear(d, vocabulary, bias=False, dtype=dtype)
    ends.final = FinalState(gate, torch.empty(d), rms_eps=1e-6, hc_eps=1e-6)
    return drafter, ends.requires_grad_(False)


def count(
    raw: dict,
    step: Step | None = None,
    objective: Objective | None = None,
    *,
    bf16: bool = True,
    ends: torch.dtype = torch.bfloat16,
) -> Cost:
    """The cost of one micro batch, forward and backward.

    Args:
        raw: the drafter's config.json. bf16: as in a training file.
        ends: the type of the target's embedding and LM head.
    """
    step, device = step or Step(), torch.device("cpu")
    sample = Sample.continuation(list(range(step.tokens)), step.prompt)
    rows, seeds = collate([sample] * step.samples), list(range(step.samples))
    blocks = Blocks.draw(rows, step.anchors, raw["block_size"], seeds)
    width = raw["hidden_size"] * raw["hyperdflash_config"]["hc_mult"]
    # The mode is left before the step: which rows to compute is chosen by real numbers.
    with FakeTensorMode(allow_non_fake_inputs=True):
        drafter, target = fake_pair(raw, ends)
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
    with gpu, Cost(target) as cost:
        terms, *_ = Trainer._sums(trainer, rows, states, blocks)
        factors = torch.tensor(objective.factors)
        (factors * terms / denominators(objective, blocks)).sum().backward()
    return cost


def main() -> None:
    """Count a step of a drafter's config, now and before, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draft", type=Path, required=True, help="drafter folder (config.json)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    raw = json.loads((args.draft / "config.json").read_bytes())
    costs = {
        "before": count(raw, ends=torch.float32),
        "after": count(raw),
        "after, bf16 = false": count(raw, bf16=False),
    }
    names = ("by_dtype", "moved", "cast", "casts", "resident")
    result = {way: {name: getattr(cost, name) for name in names} for way, cost in costs.items()}
    write_json(args.out, result, indent=1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
