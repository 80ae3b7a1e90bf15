"""Processes of a training: their backend, and what they need no memory for."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import torch
from torch import nn

from sglang_hyperdflash.training import process_group
from sglang_hyperdflash.training.drafter import Drafter
from tests.conftest import ROOT
from tests.unit.training.conftest import LargestTensor
from tests.waiting import PATIENCE

FLASH = ROOT / "examples" / "deepseek_v4_flash_config" / "drafter" / "config.json"


def test_a_context_of_a_million_tokens_takes_no_table():
    """Found as: RoPE tables of a GiB, which no estimate of a training's memory had."""
    with torch.device("meta"):
        drafter = Drafter(json.loads(FLASH.read_text()))
    assert drafter.raw["max_position_embeddings"] == 2**20
    assert sum(buffer.nbytes for buffer in drafter.buffers()) < 2**20


def test_gradients_are_summed_where_they_are(monkeypatch):
    """Found as: a flat copy of all of them, 4 GB of a drafter of a billion parameters."""
    parameters = [nn.Parameter(torch.randn(8, 9)) for _ in range(5)]
    for parameter in parameters[:4]:
        parameter.grad = torch.randn(8, 9)
    before = [parameter.grad.clone() for parameter in parameters[:4]]

    def all_reduce(tensor: torch.Tensor, async_op: bool) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: tensor.mul_(2))

    monkeypatch.setattr(process_group.dist, "all_reduce", all_reduce)
    world = process_group.ProcessGroup()
    world.size = 2
    with LargestTensor() as seen:
        world.sum_gradients(parameters)
    assert seen.most == 8 * 9
    for parameter, one in zip(parameters, before, strict=False):
        assert torch.equal(parameter.grad, 2 * one)
    assert torch.equal(parameters[4].grad, torch.zeros(8, 9))


BACKEND = """
import sys, torch, torch.distributed as dist
from sglang_hyperdflash.training.process_group import ProcessGroup
torch.cuda.is_available = lambda: True  # a host with GPUs
world = ProcessGroup("cpu")
total = world.sum(torch.tensor([world.rank + 1.0])).item()
sys.stdout.write(f"{dist.get_backend()} {total}\\n")  # at once: the other's comes too
world.close()
"""


def test_processes_on_a_cpu_use_gloo_on_a_host_with_gpus():
    """Found as: NCCL, which has no CPU tensors."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--no-python"]
    done = subprocess.run(
        [*torchrun, sys.executable, "-c", BACKEND], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.stdout.split() == ["gloo", "3.0"] * 2, done.stderr[-2000:]
