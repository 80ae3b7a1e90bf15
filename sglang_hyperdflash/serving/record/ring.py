"""Room for rows on their way to the host: reserved once, so that no copy ever allocates."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch


@dataclass(eq=False)
class Piece:
    """Rows ``start`` to ``stop`` of a ring, taken."""

    start: int
    stop: int
    free: bool = False


class Ring:
    """Pinned rows of the host, and as many of the device that are copied to them.

    A copy reads the device's rows while the target's next pass overwrites its outputs. Pieces are
    taken by one thread and freed by any.

    Attributes:
        host: ``[rows, width]``, pinned for an accelerator. device: of the same shape; on a CPU the
            same tensor.
    """

    def __init__(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.on_device = device.type != "cpu"
        self.host = torch.empty(rows, width, dtype=dtype, pin_memory=self.on_device)
        self.device = torch.empty_like(self.host, device=device) if self.on_device else self.host
        self._taken: deque[Piece] = deque()
        self._lock = threading.Lock()

    def take(self, count: int) -> Piece | None:
        """``count`` rows in a row; None if these are not free."""
        rows = len(self.host)
        with self._lock:
            while self._taken and self._taken[0].free:
                self._taken.popleft()
            if not self._taken:
                start, end = 0, rows
            else:
                oldest, newest = self._taken[0], self._taken[-1]
                start, end = newest.stop, rows
                if newest.start < oldest.start:
                    end = oldest.start
                elif end - start < count:
                    start, end = 0, oldest.start
            if end - start < count:
                return None
            piece = Piece(start, start + count)
            self._taken.append(piece)
            return piece
