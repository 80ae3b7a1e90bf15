"""Processes of a training: their backend, what each starts from, what they need no memory for."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training import process_group
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.process_group import ProcessGroup
from sglang_hyperdflash.training.samples import FeatureCache
from sglang_hyperdflash.training.trainer import Trainer
from tests.conftest import ROOT
from tests.unit.training.conftest import LargestTensor, answers
from tests.unit.training.test_trainer import RECIPE, new_drafter, new_trainer

FLASH = ROOT / "examples" / "deepseek_v4_flash_config" / "drafter" / "config.json"


def test_a_context_of_a_million_tokens_takes_no_table():
    with torch.device("meta"):
        drafter = Drafter(json.loads(FLASH.read_text()))
    assert drafter.raw["max_position_embeddings"] == 2**20
    assert sum(buffer.nbytes for buffer in drafter.buffers()) < 2**20


def test_gradients_are_summed_where_they_are(monkeypatch):
    """A flat copy of a drafter of a billion parameters would be 4 GB."""
    parameters = [nn.Parameter(torch.randn(8, 9)) for _ in range(5)]
    for parameter in parameters[:4]:
        parameter.grad = torch.randn(8, 9)
    before = [p.grad.clone() for p in parameters[:4]] + [torch.zeros(8, 9)]

    def all_reduce(tensor: torch.Tensor, async_op: bool) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: tensor.mul_(2))

    monkeypatch.setattr(process_group.dist, "all_reduce", all_reduce)
    world = ProcessGroup()
    world.size = 2
    with LargestTensor() as seen:
        world.sum_gradients(parameters)
    assert seen.most == 8 * 9
    for parameter, one in zip(parameters, before, strict=True):
        assert torch.equal(parameter.grad, 2 * one)


class Second(ProcessGroup):
    """The second of two processes; the main one is at another step, its weights are all 0.5."""

    def __init__(self, more: float = 0.0) -> None:
        self.size, self.rank, self.more = 2, 1, more

    def sum(self, tensor):
        return 2 * tensor + self.more

    def share(self, tensors):
        for tensor in tensors:
            tensor.fill_(0.5)


def test_every_process_starts_at_the_main_one_s_step_from_its_weights(target, tmp_path):
    cache = FeatureCache(target, answers(20, 33), dtype=torch.float32)
    new_trainer(target, cache, tmp_path / "has", steps=1, every=1).run(tmp_path / "best")
    given = (target, cache, {}, RECIPE)
    resumed = Trainer(new_drafter(target), *given, tmp_path / "has", Second())
    assert resumed.state["step"] == 1
    assert all((p == 0.5).all() for p in resumed.drafter.parameters())
    with pytest.raises(HyperDFlashConfigError, match="has not"):
        Trainer(new_drafter(target), *given, tmp_path / "has not", Second(1.0))


def test_processes_on_a_cpu_use_gloo_on_a_host_with_gpus(monkeypatch):
    """NCCL has no CPU tensors."""
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(process_group.dist, "init_process_group", asked.append)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for device in ("cpu", "cuda"):
        ProcessGroup(device)
    assert asked == ["gloo", "nccl"]
