"""Draft K/V that are written later: of rounds without drafts, and of prefills between them.

Nothing but a drafted block reads them, so those of many passes are written at once, which costs one
launch of the reducer and of the projections instead of one a pass.
"""

from __future__ import annotations

import torch

# Rows whose residuals wait: 8 MiB on DeepSeek-V4-Flash, as much again while they are written.
PENDING_ROWS = 256
# Seam: SGLang's K/V pools keep slot 0 for rows that pad a batch; nobody reads it.
NOBODYS = 0


def last_owners(slots: torch.Tensor) -> torch.Tensor:
    """``slots [N]`` int64, in the order they were given; a slot's earlier rows get ``NOBODYS``.

    A request ends, and its slot is another's before its rows are written: two rows of one call.
    """
    again = slots.unsqueeze(1) == slots.unsqueeze(0)
    return slots.masked_fill(again.triu(1).any(1), NOBODYS)


class PendingRows:
    """Residuals ``[N, m * d]``, draft slots ``[N]`` and positions ``[N]`` of rows that wait.

    Args:
        most: how many may wait; 0 where slots are read by others than a drafted block.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def fits(self, rows: int) -> bool:
        """Whether so many more may wait."""
        return self._rows + rows <= self.most

    def add(self, hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Keep rows; nothing may write over the tensors afterwards."""
        self._parts.append((hidden, slots, positions))
        self._rows += len(slots)

    def take(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """All rows, each slot once, and none wait any more; None where none did."""
        parts, self._parts, self._rows = self._parts, [], 0
        if len(parts) < 2:  # a pass's own slots differ, and its residuals need no copy
            return parts[0] if parts else None
        hidden, slots, positions = (torch.cat(p) for p in zip(*parts, strict=True))
        return hidden, last_owners(slots.long()), positions
