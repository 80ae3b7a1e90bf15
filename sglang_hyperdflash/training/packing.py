"""Several short samples in one row: less padding, and each sample sees itself only.

Anchors and labels are drawn before packing, so a packed step trains on exactly the blocks of the
step that is not packed.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn.utils.rnn import pad_sequence

from sglang_hyperdflash.training.objective import Blocks
from sglang_hyperdflash.training.samples import Rows, States


def first_fit(lengths: list[int], limit: int) -> list[list[int]]:
    """Samples of each packed row, the longest first; one longer than ``limit`` has its own row."""
    rows: list[list[int]] = []
    space: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = next((r for r, left in enumerate(space) if lengths[i] <= left), None)
        if at is None:
            rows.append([i])
            space.append(limit - lengths[i])
        else:
            rows[at].append(i)
            space[at] -= lengths[i]
    return rows


def pack(
    plan: list[list[int]], lengths: list[int], rows: Rows, states: States, blocks: Blocks
) -> tuple[Rows, States, Blocks]:
    """Lay samples ``[b, S]`` out as the plan says, ``[len(plan), S']``.

    Args:
        plan: from :func:`first_fit`; lengths: real tokens of each sample.

    Returns:
        Rows (with ``starts``), states, and blocks whose anchors count from the packed row's start.
    """
    if not bool(blocks.keep.any()):
        return rows, states, blocks
    offsets = [0] * len(lengths)
    for row in plan:
        for before, i in pairwise(row):
            offsets[i] = offsets[before] + lengths[before]

    def lay(tensor: torch.Tensor) -> torch.Tensor:
        parts = (torch.cat([tensor[i, : lengths[i]] for i in row]) for row in plan)
        return pad_sequence(list(parts), batch_first=True)

    def lay_blocks(tensor: torch.Tensor) -> torch.Tensor:
        """Kept blocks only: padding blocks would cost as much as real ones."""
        parts = (torch.cat([tensor[i][blocks.keep[i]] for i in row]) for row in plan)
        return pad_sequence(list(parts), batch_first=True)

    shift = torch.tensor(offsets).unsqueeze(1)
    packed = Blocks(
        lay_blocks(blocks.anchors + shift),
        lay_blocks(blocks.keep),
        lay_blocks(blocks.labels),
        lay_blocks(blocks.supervised),
        lay_blocks(blocks.widths),
    )
    return (
        Rows(lay(rows.tokens), lay(rows.loss_mask), lay(rows.starts + shift)),
        States(lay(states.residual), lay(states.final), lay(states.layers)),
        packed,
    )
