"""K/V in pages of several tokens without Triton."""

from __future__ import annotations

import torch

from cpu_engine.platform.dflash_seams import last_slots


def test_the_last_slot_of_each_request():
    table = torch.arange(100, 124).view(3, 8).int()
    rows, lengths = torch.tensor([2, 0, 1]), torch.tensor([3, 0, 8])
    assert last_slots(table, rows, lengths).tolist() == [118, -1, 115]
