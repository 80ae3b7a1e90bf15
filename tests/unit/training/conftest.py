"""What tests of training share."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.samples import InMemory, Sample, States, computed


@pytest.fixture(scope="package")
def target(target_dir):
    """The tiny target, in plain torch."""
    return LocalTarget(target_dir)


def answers(*lengths: int, prompt: int = 6) -> list[Sample]:
    """Random tokens: a prompt and one answer each."""
    g = torch.Generator().manual_seed(0)
    rows = [torch.randint(10, 1300, (n,), generator=g).tolist() for n in lengths]
    return [Sample.continuation(row, prompt) for row in rows]


class LargestTensor(TorchDispatchMode):
    """The most numbers that a tensor has while it is on."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.most = max(self.most, tensor.numel())
        return result


class FeatureCache(InMemory):
    """The target's states of every sample, computed once and kept in memory.

    Stored in ``dtype`` (bf16 by default): ``(m + len(layer_ids)) * d`` numbers a token.
    """

    def __init__(
        self,
        target,
        samples: list[Sample],
        *,
        batch: int = 32,
        dtype: torch.dtype = torch.bfloat16,
        layer_ids: tuple[int, ...] = (),
    ) -> None:
        super().__init__(samples)
        self._kept: list[tuple[torch.Tensor, ...]] = [()] * len(samples)
        for i, *states in computed(target, samples, batch, layer_ids, dtype):
            self._kept[i] = tuple(rows.clone() for rows in states)

    def states(self, indices: list[int]) -> States:
        """See :class:`Source`."""
        parts = zip(*(self._kept[i] for i in indices), strict=True)
        return States(*(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) for rows in parts))
