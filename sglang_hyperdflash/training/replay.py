"""Drafting in training: block states, and held-out answers replayed block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from sglang_hyperdflash.draft.propose import Candidates, propose_greedy
from sglang_hyperdflash.draft.reducer import reducer_source
from sglang_hyperdflash.tools.acceptance import accept_length, position_acceptance
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.anchors import block_mask
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.objective import Blocks
from sglang_hyperdflash.training.samples import Rows, Sample, Source, States, collate

# Blocks whose logits are in memory at a time.
BLOCKS = 256


def check_whole_blocks(samples: Sequence[Sample], block_size: int, name: str) -> None:
    """Refuse held-out answers that are too short for measuring tau: the replay counts whole blocks.

    Args:
        name: where the samples come from, for the error.

    Raises:
        HyperDFlashConfigError: no answer is as long as a block.
    """
    longest = max((end - start for sample in samples for start, end in sample.spans), default=0)
    if longest < block_size:
        raise HyperDFlashConfigError(
            f"[held_out] {name}: expected an answer of at least {block_size} tokens, the drafter's "
            f"block size, found {longest} in the longest one: tau cannot be measured. Give longer "
            "answers, or remove it from [held_out]."
        )


class Replay:
    """A drafter with the target's embedding and LM head."""

    def __init__(self, drafter: Drafter, target) -> None:
        self.drafter, self.target = drafter, target
        self.block = drafter.config.block_size
        self.mask_embedding = target.embed_tokens.weight[drafter.config.mask_token_id].float()

    def block_embeddings(self, tokens: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """``[b, n, B, d]`` fp32: the anchor token's embedding, then mask embeddings."""
        first = self.target.embed_tokens(tokens.gather(1, anchors)).float()
        masks = self.mask_embedding.expand(*anchors.shape, self.block - 1, -1)
        return torch.cat([first.unsqueeze(2), masks], dim=2)

    def draft_states(
        self, rows: Rows, states: States, anchors: torch.Tensor, keep: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states ``[b, n, B-1, d]`` of the drafts of the blocks at ``anchors [b, n]``."""
        config, tokens = self.drafter.config, rows.tokens.shape[1]
        mask = block_mask(anchors, keep, tokens, self.block, config.window, causal=config.causal)
        context = self.drafter.reduce(reducer_source(config, states.residual, states.layers))
        embeddings = self.block_embeddings(rows.tokens, anchors)
        return self.drafter(context, embeddings, anchors, mask)[:, :, 1:]

    @torch.no_grad()
    def draft(
        self, rows: Rows, states: States, anchors: torch.Tensor, keep: torch.Tensor
    ) -> torch.Tensor:
        """The drafts ``[b, n, B-1]`` of greedy requests at ``anchors [b, n]``, on the CPU.

        Each follows the drafts before it, as when serving; zeros where ``keep`` is False.
        """
        device = self.mask_embedding.device
        rows, states, anchors, kept = (x.to(device) for x in (rows, states, anchors, keep))
        with device:
            hidden = self.draft_states(rows, states, anchors, kept)[kept]
        first = rows.tokens.gather(1, anchors)[kept]
        parts = [
            propose_greedy(self._candidates(h), a, self.drafter.dependency)
            for h, a in zip(hidden.split(BLOCKS), first.split(BLOCKS), strict=True)
        ]
        drafts = torch.zeros(*keep.shape, self.block - 1, dtype=torch.long)
        drafts[keep.cpu()] = torch.cat(parts).cpu()
        return drafts

    @torch.no_grad()
    def overlap(self, rows: Rows, states: States, blocks: Blocks) -> torch.Tensor:
        """``sum min(p, q)`` of every draft at temperature 1, ``[b, n, B-1]`` fp32, on the CPU.

        This is the probability that p/q rejection accepts it, given that the text before it was
        accepted; q covers the candidates, as when serving. Zeros where nothing is supervised.
        """
        result = torch.zeros(blocks.labels.shape)
        device, keep = self.mask_embedding.device, blocks.keep
        rows, states, blocks = (x.to(device) for x in (rows, states, blocks))
        with device:
            hidden = self.draft_states(rows, states, blocks.anchors, blocks.keep)[blocks.keep]
        previous = blocks.previous(rows.tokens)[blocks.keep]
        taught = blocks.before(states.residual, blocks.keep)
        parts = []
        for first in range(0, len(hidden), BLOCKS):
            part = slice(first, first + BLOCKS)
            found = self._candidates(hidden[part], self.drafter.config.candidates)
            scores = found.scores
            if self.drafter.dependency is not None:
                head, shape = self.drafter.dependency, scores.shape
                flat = (previous[part], found.gates, found.ids)
                scores = scores + head(*(x.flatten(0, 1) for x in flat)).view(shape)
            teacher = self.target.final(taught[part])
            p = torch.softmax(self.target.lm_head(teacher).float(), -1).gather(-1, found.ids)
            parts.append(torch.minimum(p, torch.softmax(scores, -1)).sum(-1))
        result[keep.cpu()] = torch.cat(parts).cpu()
        return result

    def _candidates(self, hidden: torch.Tensor, k: int | None = None) -> Candidates:
        return self.drafter.candidates(self.target.lm_head(hidden), hidden, k)

    def evaluate(self, source: Source, *, sampled: bool = False) -> dict[str, Any]:
        """Simulated tau (bonus included) and per-position acceptance on held-out answers.

        Args:
            sampled: measure ``tau_sampled`` too, the expected tau at temperature 1 under p/q
                rejection; preferably on answers sampled the same way.
        """
        self.drafter.eval()
        histogram = self.acceptance(source)
        accepted = sum(i * n for i, n in enumerate(histogram))
        found = {
            "tau": accept_length(accepted, max(sum(histogram), 1)),
            "position_acceptance": position_acceptance(histogram, self.block - 1),
        }
        if sampled:
            found["tau_sampled"] = self.expected_tau(source)
        self.drafter.train()
        return found

    @torch.no_grad()
    def acceptance(self, source: Source, batch: int = 8) -> list[int]:
        """Replay the answers as a server would: a histogram of accepted drafts."""
        histogram = [0] * self.block
        for rows, states, blocks in self._everywhere(source, batch):
            drafts = self.draft(rows, states, blocks.anchors, blocks.keep)
            accepted = ((drafts == blocks.labels) & blocks.supervised).int().cumprod(-1).sum(-1)
            for row in range(len(accepted)):
                for taken in _rounds(accepted[row], blocks, row):
                    histogram[taken] += 1
        return histogram

    @torch.no_grad()
    def expected_tau(self, source: Source, batch: int = 8) -> float:
        """``1 + sum_k prod_{i <= k} overlap_i``, the mean over every whole block of the answers."""
        total, count = 0.0, 0
        for rows, states, blocks in self._everywhere(source, batch):
            whole = blocks.keep & blocks.supervised.all(-1)
            if bool(whole.any()):
                reach = self.overlap(rows, states, blocks)[whole].cumprod(-1).sum(-1)
                total += float(reach.double().sum())
                count += len(reach)
        return 1.0 + total / max(count, 1)

    def _everywhere(self, source: Source, batch: int) -> Iterator[tuple[Rows, States, Blocks]]:
        """A block at every position of the answers, a few answers at a time."""
        for start in range(0, len(source.samples), batch):
            indices = list(range(start, min(start + batch, len(source.samples))))
            rows = collate([source.samples[i] for i in indices])
            every = rows.tokens.shape[1]
            blocks = Blocks.draw(rows, every, self.block, [0] * len(indices))
            if bool(blocks.keep.any()):
                yield rows, source.states(indices), blocks


def _rounds(accepted: torch.Tensor, blocks: Blocks, row: int):
    """Accepted drafts of each round of one row, from every possible anchor's outcome.

    A block cut short by an answer's end is not counted, and ends its answer.
    """
    starts = blocks.anchors[row][blocks.keep[row]].tolist()
    next_start = 0
    for at, anchor in enumerate(starts):
        if anchor < next_start:
            continue
        if not bool(blocks.supervised[row, at].all()):
            # Skip the rest of this answer: the anchors up to the next gap.
            next_start = anchor + 1
            while next_start in starts[at + 1 :]:
                next_start += 1
            continue
        taken = int(accepted[at])
        yield taken
        next_start = anchor + taken + 1
