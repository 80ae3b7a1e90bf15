"""One process or many: the few collectives of training, over torchrun's environment."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist


class ProcessGroup:
    """This process among all; without torchrun a world of one, whose collectives do nothing."""

    def __init__(self) -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if self.size > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Add up gradients in one message.

        A sum, not DDP's mean: every process divides its loss by the denominators of the global
        batch already.
        """
        if self.size == 1:
            return
        parameters = [p for p in parameters if p.requires_grad]
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        flat = torch.cat([p.grad.reshape(-1) for p in parameters])
        dist.all_reduce(flat)
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad.copy_(part.view_as(p))

    def barrier(self) -> None:
        """Wait for every process."""
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the process group, if there is one."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
