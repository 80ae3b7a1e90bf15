"""One process or many: the few collectives of training, over torchrun's environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sglang_hyperdflash.tools.errors import HyperDFlashError

T = TypeVar("T")
POLL = 2.0  # seconds between two looks for what other programs write


@contextmanager
def _together() -> Iterator[None]:
    """A collective; a lost process becomes a one-line error."""
    try:
        yield
    except RuntimeError as error:
        raise HyperDFlashError(
            f"another process of this run ended or cannot be reached ({str(error).splitlines()[0]})"
            ". Its own message gives the reason; run the same command again to resume."
        ) from error


class ProcessGroup:
    """This process among all; without torchrun a world of one, whose collectives do nothing.

    A collective raises ``HyperDFlashError`` when another process is lost.

    Args:
        device: of the drafter, ``cpu`` or ``cuda``; collectives take tensors of both.

    Attributes:
        background: a second group, for another thread's collectives.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if self.size > 1 and not dist.is_initialized():
            with _together():
                dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        several = self.size > 1
        self.background = dist.new_group(backend="gloo") if several else None

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all processes, in place."""
        if self.size > 1:
            with _together():
                dist.all_reduce(tensor)
        return tensor

    def synchronized(self, module: nn.Module) -> nn.Module:
        """A module that starts with the main process's weights everywhere; backward passes add up
        gradients over all processes, but for those inside its ``no_sync()``.

        DDP divides by the number of processes, so the loss is to be multiplied by it.
        """
        if self.size == 1:
            return module
        # It also keeps DDP from changing its buckets after the first step, and with them the order
        # of sums: a resumed run has the weights of one that was never killed.
        fixed = {"find_unused_parameters": True, "broadcast_buffers": False}
        with _together():
            return DistributedDataParallel(module, gradient_as_bucket_view=True, **fixed)

    def on_main(self, make: Callable[[], T]) -> T:
        """What ``make`` gives on the main process, on all; the others wait for it.

        Raises:
            What it raises, on the main process. SystemExit: of code 2, on the others.
        """
        sent: list[Any] = [None, False]
        try:
            if self.is_main:
                sent[0] = make()
        except BaseException:
            sent[1] = True
            raise
        finally:
            if self.size > 1:
                with _together():
                    dist.broadcast_object_list(sent, src=0)
        if sent[1]:
            raise SystemExit(2)
        return sent[0]

    def close(self) -> None:
        """Leave the process group, if there is one; silently, if it lost a process."""
        if self.size > 1 and dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()
