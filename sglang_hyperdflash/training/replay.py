"""Drafting in training: block states, and held-out answers replayed block by block."""

from __future__ import annotations

from typing import Any

import torch

from sglang_hyperdflash.tools.acceptance import accept_length, position_acceptance
from sglang_hyperdflash.training.anchors import block_mask
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.objective import Blocks
from sglang_hyperdflash.training.reducer_input import source_of
from sglang_hyperdflash.training.samples import Rows, Source, States, collate


class Replay:
    """A drafter with the target's embedding and LM head, which it borrows."""

    def __init__(self, drafter: Drafter, target) -> None:
        self.drafter, self.target = drafter, target
        self.block = drafter.config.block_size
        self.mask_embedding = target.embed_tokens.weight[drafter.config.mask_token_id]

    def block_embeddings(self, tokens: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """``[b, n, B, d]``: the anchor token's embedding, then mask embeddings."""
        first = self.target.embed_tokens(tokens.gather(1, anchors))
        masks = self.mask_embedding.expand(*anchors.shape, self.block - 1, -1)
        return torch.cat([first.unsqueeze(2), masks], dim=2)

    def draft_states(
        self, rows: Rows, states: States, anchors: torch.Tensor, keep: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states ``[b, n, B-1, d]`` of the drafts of the blocks at ``anchors [b, n]``."""
        starts = rows.starts.gather(1, anchors)
        window = self.drafter.config.window
        first = starts if window is None else torch.maximum(starts, anchors - window)
        mask = block_mask(anchors, keep, rows.tokens.shape[1], self.block, first)
        positions = torch.arange(rows.tokens.shape[1]) - rows.starts
        context = self.drafter.reduce(source_of(self.drafter.config, self.target, states))
        embeddings = self.block_embeddings(rows.tokens, anchors)
        return self.drafter(context, embeddings, anchors - starts, mask, positions)[:, :, 1:]

    def draft(self, rows: Rows, states: States, blocks: Blocks) -> torch.Tensor:
        """The most probable tokens ``[b, n, B-1]`` of every block, on the CPU."""
        device = self.mask_embedding.device
        rows, states, blocks = (x.to(device) for x in (rows, states, blocks))
        with device:
            hidden = self.draft_states(rows, states, blocks.anchors, blocks.keep)
            return self.target.lm_head(hidden).argmax(-1).cpu()

    def evaluate(self, source: Source) -> dict[str, Any]:
        """Simulated tau (bonus included) and per-position acceptance on held-out answers."""
        self.drafter.eval()
        histogram = self.acceptance(source)
        self.drafter.train()
        accepted = sum(i * n for i, n in enumerate(histogram))
        return {
            "tau": accept_length(accepted, max(sum(histogram), 1)),
            "position_acceptance": position_acceptance(histogram, self.block - 1),
        }

    @torch.no_grad()
    def acceptance(self, source: Source, batch: int = 8) -> list[int]:
        """Replay the answers as a server would: a histogram of accepted drafts."""
        histogram = [0] * self.block
        for start in range(0, len(source.samples), batch):
            indices = list(range(start, min(start + batch, len(source.samples))))
            rows = collate([source.samples[i] for i in indices])
            every = rows.tokens.shape[1]
            blocks = Blocks.draw(rows, every, self.block, [0] * len(indices))
            drafts = self.draft(rows, source.states(indices), blocks)
            accepted = ((drafts == blocks.labels) & blocks.supervised).int().cumprod(-1).sum(-1)
            for row in range(len(indices)):
                for taken in _rounds(accepted[row], blocks, row):
                    histogram[taken] += 1
        return histogram


def _rounds(accepted: torch.Tensor, blocks: Blocks, row: int):
    """Accepted drafts of each round of one row, from every possible anchor's outcome.

    A block cut short by an answer's end says nothing of its tail, and ends its answer.
    """
    starts = blocks.anchors[row][blocks.keep[row]].tolist()
    next_start = 0
    for at, anchor in enumerate(starts):
        if anchor < next_start:
            continue
        if not bool(blocks.supervised[row, at].all()):
            # Skip what is left of this answer: the anchors up to the next gap.
            next_start = anchor + 1
            while next_start in starts[at + 1 :]:
                next_start += 1
            continue
        taken = int(accepted[at])
        yield taken
        next_start = anchor + taken + 1
