"""A step's forward pass on a GPU of which only shapes exist: the host never waits for it."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from eval.step_flops import fake_pair
from sglang_hyperdflash.training import drafter as drafter_module
from sglang_hyperdflash.training import objective as objective_module
from sglang_hyperdflash.training.objective import Blocks, Objective
from sglang_hyperdflash.training.replay import Replay
from sglang_hyperdflash.training.samples import Sample, States, collate
from sglang_hyperdflash.training.trainer import Trainer
from tests.launches.counter import Counter, RefusedError
from tests.launches.cuda_ops import tensors
from tests.unit.commands.builders import SAMPLE

RAW = json.loads((SAMPLE / "drafter" / "config.json").read_bytes())
CUDA = torch.device("cuda")


class OnGpu(Counter):
    """Refuses waits and blocking copies; what concerns the host alone is computed."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        made_there = torch.device(kwargs.get("device") or "cpu").type == "cuda"
        if made_there or any(isinstance(t, FakeTensor) for t in tensors([args, kwargs])):
            return super().__torch_dispatch__(func, types, args, kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """What torch asks a driver, and a kernel that it would compile."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(drafter_module, "compiled_flex", lambda: lambda q, *_, **__: q.clone())


def forward(loss: str, bf16: bool) -> OnGpu:
    """Two samples' states on their way to the GPU, and their sums."""
    rows = collate([Sample.continuation(list(range(n)), 100) for n in (300, 200)])
    blocks = Blocks.draw(rows, 40, RAW["block_size"], [0, 1])
    width = RAW["hidden_size"] * RAW["hyperdflash_config"]["hc_mult"]
    states = States.without_layers(torch.zeros(*rows.tokens.shape, width, dtype=torch.bfloat16))
    with FakeTensorMode(allow_non_fake_inputs=True):
        with CUDA:
            drafter, target = fake_pair(RAW)
            replay = Replay(drafter, target, bf16)
        trainer = SimpleNamespace(drafter=drafter, target=target, replay=replay, device=CUDA)
        trainer.objective = Objective(loss=loss).resolved(drafter.config)
        trainer.recipe = SimpleNamespace(bf16=bf16)
        with OnGpu("step") as counted:
            sums = Trainer._sums(trainer, rows, states.to(CUDA), blocks)
    assert all(x.is_cuda for x in sums) and sums[0].requires_grad
    return counted


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("loss", ["ce_kl", "acceptance", "selector"])
def test_a_forward_pass_never_waits_for_the_gpu(loss, bf16):
    names = [launch.name for launch in forward(loss, bf16).launches]
    assert len(names) > 100 and "mm" in names


def test_a_copy_that_waits_is_noticed(monkeypatch):
    monkeypatch.setattr(objective_module, "moved", lambda tensor, device: tensor.to(device))
    with pytest.raises(RefusedError, match="copy between host and device"):
        forward("ce_kl", True)
