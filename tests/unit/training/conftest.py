"""What tests of training share."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_hyperdflash.training.local_target import LocalTarget


@pytest.fixture(scope="module")
def target(target_dir):
    """The tiny target, in plain torch."""
    return LocalTarget(target_dir)


class LargestTensor(TorchDispatchMode):
    """The most numbers that a tensor has while it is on."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple) else (found,):
            if isinstance(tensor, torch.Tensor):
                self.most = max(self.most, tensor.numel())
        return found
