"""Training on a CUDA device follows training on the CPU."""

import dataclasses

import pytest
import torch

from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.trainer import Trainer
from tests.unit.training.conftest import FeatureCache
from tests.unit.training.test_trainer import RECIPE, new_drafter, samples

__all__ = ["samples"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_losses_and_gradients_are_the_cpus(target_dir, samples, tmp_path):
    losses, gradients = [], []
    for device in ("cpu", "cuda"):
        target = LocalTarget(target_dir)
        drafter = new_drafter(target).to(device)
        target.to(device)
        cache = FeatureCache(target, samples, dtype=torch.float32)
        recipe = dataclasses.replace(RECIPE, clip=1e9)
        trainer = Trainer(drafter, target, cache, {"all": cache}, recipe, tmp_path / device)
        losses.append(trainer.keep(trainer.step())["loss"])
        gradients.append(torch.cat([p.grad.reshape(-1).cpu() for p in drafter.parameters()]))
        trainer.run(tmp_path / device / "best")
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert (gradients[1] - gradients[0]).norm() < 1e-2 * gradients[0].norm()
