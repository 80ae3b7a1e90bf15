"""Slots for the K/V of a drafter that attends to the last W context tokens only.

A ring: every token that is committed takes the next slot, whoever it belongs to, and the oldest
token loses its own. Target token ids map to slots, so a prefix hit finds what is still there. A
request's live tokens are always a suffix of its context, because they were written in order. Lost
tokens cost acceptance, never correctness: drafts are verified.

Everything stays on the device; no method reads a value back.
"""

from __future__ import annotations

import torch


class DraftWindow:
    """Which pool slot holds which token's draft K/V.

    Pool slots: 0 is SGLang's sink, ``1 ... ring`` the ring, then ``block`` of a drafted block for
    each request of a batch, overwritten in every round.

    Args:
        tokens: target token ids in use, 0 included.
        ring: slots shared by all requests; window: W; block: B; batch: most requests at once.
    """

    def __init__(
        self, *, tokens: int, ring: int, window: int, block: int, batch: int, device: str
    ) -> None:
        if ring < window:
            raise ValueError(f"a ring of {ring} slots cannot hold one window of {window} tokens")
        self.ring, self.window, self.block = ring, window, block
        self.slot_of = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        # One more owner than slots: tokens that do not enter write there.
        self.owner = torch.full((ring + 1,), -1, dtype=torch.int64, device=device)
        self.next_slot = torch.zeros((), dtype=torch.int64, device=device)
        self.scratch = 1 + ring + torch.arange(batch * block, device=device)
        self.back = torch.arange(window, device=device)
        self.columns = torch.arange(block, device=device)

    @property
    def size(self) -> int:
        """Slots that the pool needs, the sink not counted."""
        return self.ring + len(self.scratch)

    def enter(self, ids: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Give tokens the next slots.

        Args:
            ids: ``[n]`` int64 target token ids, each at most once among the kept.
            kept: ``[n]`` bool. The others lose the slot they had.

        Returns:
            ``[n]`` int64 pool slots; 0 where not kept, and where ``ring`` kept ones follow: one
            slot for two tokens of a call would leave to chance whose K/V it holds.
        """
        count, total = kept.long().cumsum(0), kept.sum()
        kept = kept & (count > total - self.ring)
        place = torch.remainder(self.next_slot + count - 1, self.ring)
        self.slot_of[ids] = torch.where(kept, place, -1)
        self.owner[torch.where(kept, place, self.ring)] = ids
        self.next_slot.add_(total).remainder_(self.ring)
        return torch.where(kept, place + 1, 0)

    def forget(self, ids: torch.Tensor) -> None:
        """Ids that were given to new tokens: what they held is no longer theirs."""
        self.slot_of[ids] = -1

    def per_request(self, requests: int) -> int:
        """Tokens of each of ``requests`` prompts that may enter in one call."""
        return min(self.window, self.ring // max(requests, 1))

    def view(
        self, table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The live end of some requests' contexts, at most W tokens.

        Args:
            table: the target's ``req_to_token [R, L]``; rows, lengths: ``[b]``.

        Returns:
            slots ``[b, W]`` int64, oldest first, and how many of them count, ``[b]`` int64.
        """
        places = lengths.long().unsqueeze(1) - 1 - self.back
        ids = table[rows.long().unsqueeze(1), places.clamp(min=0)].long()
        slot = self.slot_of[ids]
        live = (places >= 0) & (slot >= 0) & (self.owner[slot.clamp(min=0)] == ids)
        visible = live.long().cumprod(1).sum(1)
        newest_last = (visible.unsqueeze(1) - 1 - self.back).clamp(min=0)
        return (slot.clamp(min=0) + 1).gather(1, newest_last), visible

    def write_table(
        self,
        table: torch.Tensor,
        rows: torch.Tensor,
        slots: torch.Tensor,
        visible: torch.Tensor,
        width: int,
    ) -> None:
        """Write the drafter's own rows: the window, then the slots of the block.

        Args:
            table: the drafter's ``req_to_token [R, >= W + B]``; slots, visible: from :meth:`view`.
            width: rows of this round's blocks, at most B.
        """
        rows = rows.long().unsqueeze(1)
        table[rows, self.back] = slots.to(table.dtype)
        block = self.scratch[: len(rows) * width].view(len(rows), width)
        columns = visible.unsqueeze(1) + self.columns[:width]
        table[rows, columns] = block.to(table.dtype)

    def scratch_slots(self, ids: torch.Tensor) -> torch.Tensor:
        """Where a round's blocks write, ``[bs * width]``, whatever ids the target gave the rows."""
        return self.scratch[: ids.numel()]
