"""Several processes of one training: what each of them starts from."""

from __future__ import annotations

import pytest
import torch

from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.process_group import ProcessGroup
from sglang_hyperdflash.training.samples import FeatureCache, Sample
from sglang_hyperdflash.training.trainer import Trainer
from tests.unit.training.test_trainer import RECIPE, new_drafter, new_trainer


@pytest.fixture(scope="module")
def cache(target):
    g = torch.Generator().manual_seed(0)
    rows = [torch.randint(10, 1300, (n,), generator=g).tolist() for n in (20, 33, 41, 28)]
    samples = [Sample.continuation(row, 6) for row in rows]
    return FeatureCache(target, samples, dtype=torch.float32)


def test_a_node_without_the_others_working_folder_is_refused(target, cache, tmp_path):
    class TwoNodes(ProcessGroup):
        """This process and one that resumed at step 6."""

        def sum(self, tensor):
            return tensor + 6

        def share(self, tensors):
            pass

    world = TwoNodes()
    world.size = 2
    arguments = (target, cache, {}, RECIPE)
    new_trainer(target, cache, tmp_path / "has").run(tmp_path / "best")
    assert Trainer(new_drafter(target), *arguments, tmp_path / "has", world).state["step"] == 6
    with pytest.raises(HyperDFlashConfigError, match="step 0 and another process a different one"):
        Trainer(new_drafter(target), *arguments, tmp_path / "has not", world)


def test_every_process_starts_from_the_main_one_s_weights(target, cache, tmp_path):
    """Found by reading: each node started a stage from what its own file system showed."""

    class Second(ProcessGroup):
        """The second of two processes; the main one's weights are all 0.5."""

        def sum(self, tensor):
            return 2 * tensor

        def share(self, tensors):
            for tensor in tensors:
                tensor.fill_(0.5)

    world = Second()
    world.size, world.rank = 2, 1
    trainer = Trainer(new_drafter(target), target, cache, {}, RECIPE, tmp_path, world)
    assert all((p == 0.5).all() for p in trainer.drafter.parameters())
