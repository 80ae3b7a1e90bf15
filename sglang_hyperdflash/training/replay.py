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
from sglang_hyperdflash.training.process_group import ProcessGroup
from sglang_hyperdflash.training.samples import Rows, Sample, Source, States, collate
from sglang_hyperdflash.training.vocabulary import bf16_products, vocabulary_logits

# Blocks whose logits are in memory at a time, and blocks of an answer that attend at a time: memory
# grows with an answer's length, not with its square.
BLOCKS, ANCHORS = 256, 128
GROUP = 8  # samples that are padded together


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
    """A drafter with the target's embedding and LM head.

    Args:
        bf16: whether held-out answers are replayed in bf16 on a GPU, as they are served.
    """

    def __init__(self, drafter: Drafter, target, bf16: bool = False) -> None:
        self.drafter, self.target, self.bf16 = drafter, target, bf16
        self.block = drafter.config.block_size
        self.mask_embedding = target.embed_tokens.weight[drafter.config.mask_token_id].float()

    def block_embeddings(self, tokens: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """``[b, n, B, d]`` fp32: the anchor token's embedding, then mask embeddings."""
        first = self.target.embed_tokens(tokens.gather(1, anchors)).float()
        masks = self.mask_embedding.expand(*anchors.shape, self.block - 1, -1)
        return torch.cat([first.unsqueeze(2), masks], dim=2)

    def context(self, states: States) -> torch.Tensor:
        """Context features ``[b, S, d]``."""
        source = reducer_source(self.drafter.config, states.residual, states.layers)
        return self.drafter.reduce(source)

    def draft_states(
        self,
        rows: Rows,
        states: States,
        anchors: torch.Tensor,
        keep: torch.Tensor,
        context: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states ``[b, n, B-1, d]`` of the drafts of the blocks at ``anchors [b, n]``.

        Args:
            context: of :meth:`context`, computed here by default.
        """
        config, tokens = self.drafter.config, rows.tokens.shape[1]
        mask = block_mask(anchors, keep, tokens, self.block, config.window, causal=config.causal)
        context = self.context(states) if context is None else context
        embeddings = self.block_embeddings(rows.tokens, anchors)
        return self.drafter(context, embeddings, anchors, mask)[:, :, 1:]

    def _kept_blocks(
        self, rows: Rows, states: States, anchors: torch.Tensor, keep: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Of some kept blocks at a time: where they are in ``[b, n]``, as two indices on the CPU,
        and their drafts' hidden states ``[N, B-1, d]``.
        """
        device = self.mask_embedding.device
        placed, states = rows.to(device), states.to(device)
        context = self.context(states)
        for start in range(0, keep.shape[1], ANCHORS):
            part = slice(start, start + ANCHORS)
            group = (x[:, part].to(device) for x in (anchors, keep))
            hidden = self.draft_states(placed, states, *group, context)
            for row, at in (i.unbind(1) for i in keep[:, part].nonzero().split(BLOCKS)):
                yield row, at + start, hidden[row.to(device), at.to(device)]

    @torch.no_grad()
    def draft(
        self, rows: Rows, states: States, anchors: torch.Tensor, keep: torch.Tensor
    ) -> torch.Tensor:
        """The drafts ``[b, n, B-1]`` of greedy requests at ``anchors [b, n]``, on the CPU.

        Each follows the drafts before it, as when serving; zeros where ``keep`` is False.
        """
        drafts = torch.zeros(*keep.shape, self.block - 1, dtype=torch.long)
        first, device = rows.tokens.gather(1, anchors), self.mask_embedding.device
        with device, bf16_products(device, self.bf16):
            for row, at, hidden in self._kept_blocks(rows, states, anchors, keep):
                found, anchor = self._candidates(hidden), first[row, at].to(device)
                drafts[row, at] = propose_greedy(found, anchor, self.drafter.dependency).cpu()
        return drafts

    @torch.no_grad()
    def overlap(self, rows: Rows, states: States, blocks: Blocks) -> torch.Tensor:
        """``sum min(p, q)`` of every draft at temperature 1, ``[b, n, B-1]`` fp32, on the CPU.

        This is the probability that p/q rejection accepts it, given that the text before it was
        accepted; q covers the candidates, as when serving. Zeros where ``keep`` is False.
        """
        result, device = torch.zeros(blocks.labels.shape), self.mask_embedding.device
        previous, head = blocks.previous(rows.tokens), self.drafter.dependency
        at_draft = blocks.anchors.unsqueeze(-1) + torch.arange(self.block - 1)
        at_draft = at_draft.clamp(max=rows.tokens.shape[1] - 1).to(states.residual.device)
        with device, bf16_products(device, self.bf16):
            for row, at, hidden in self._kept_blocks(rows, states, blocks.anchors, blocks.keep):
                found = self._candidates(hidden, self.drafter.config.candidates)
                scores = found.scores
                if head is not None:
                    before = previous[row, at].to(device)
                    flat = (x.flatten(0, 1) for x in (before, found.gates, found.ids))
                    scores = scores + head(*flat).view(scores.shape)
                row, at = row.to(at_draft.device), at.to(at_draft.device)
                taught = states.residual[row.unsqueeze(-1), at_draft[row, at]].to(device)
                p = torch.softmax(self._logits(self.target.final(taught)), -1).gather(-1, found.ids)
                result[row, at] = torch.minimum(p, torch.softmax(scores, -1)).sum(-1).cpu()
        return result

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        return vocabulary_logits(self.target.lm_head, states)

    def _candidates(self, hidden: torch.Tensor, k: int | None = None) -> Candidates:
        return self.drafter.candidates(self._logits(hidden), hidden, k)

    def evaluate(
        self, source: Source, *, sampled: bool = False, world: ProcessGroup | None = None
    ) -> dict[str, Any]:
        """Simulated tau (bonus included) and per-position acceptance on held-out answers.

        Args:
            sampled: measure ``tau_sampled`` too, the expected tau at temperature 1 under p/q
                rejection; preferably on answers sampled the same way.
            world: processes that share the answers, each of which must call this; all return the
                same.
        """
        self.drafter.eval()
        counts, expected = self.measure(source, sampled=sampled, world=world)
        histogram = counts.sum(0).tolist()
        accepted = sum(i * n for i, n in enumerate(histogram))
        found = {
            "tau": accept_length(accepted, max(sum(histogram), 1)),
            "position_acceptance": position_acceptance(histogram, self.block - 1),
        }
        if sampled:
            found["tau_sampled"] = expected
        self.drafter.train()
        return found

    @torch.no_grad()
    def measure(
        self,
        source: Source,
        *,
        sampled: bool = False,
        batch: int = GROUP,
        world: ProcessGroup | None = None,
    ) -> tuple[torch.Tensor, float]:
        """Replay the answers as a server would, reading their states once.

        Returns:
            Every sample's histogram of accepted drafts, ``[samples, B]`` int64 on the CPU, and if
            ``sampled`` the expected tau at temperature 1 over every whole block, ``1 + sum_k
            prod_{i <= k} overlap_i``; else 1.
        """
        counts = torch.zeros(len(source.samples), self.block, dtype=torch.int64)
        reach = torch.zeros(2, dtype=torch.float64)
        for first, rows, states, blocks in _everywhere(source, self.block, batch, world):
            drafts = self.draft(rows, states, blocks.anchors, blocks.keep)
            accepted = ((drafts == blocks.labels) & blocks.supervised).int().cumprod(-1).sum(-1)
            for row in range(len(accepted)):
                for taken in _rounds(accepted[row], blocks, row):
                    counts[first + row, taken] += 1
            whole = blocks.keep & blocks.supervised.all(-1)
            if sampled and bool(whole.any()):
                expected = self.overlap(rows, states, blocks)[whole].cumprod(-1).sum(-1)
                reach += torch.tensor([expected.double().sum(), len(expected)])
        if world is not None:
            counts, reach = world.sum(counts), world.sum(reach)
        total, count = reach.tolist()
        return counts, 1.0 + total / max(count, 1)


def _everywhere(
    source: Source, block: int, batch: int, world: ProcessGroup | None
) -> Iterator[tuple[int, Rows, States, Blocks]]:
    """A block at every position of the answers, a few samples at a time, and the first one's index;
    this process's share.
    """
    rank, size = (0, 1) if world is None else (world.rank, world.size)
    starts = range(rank * batch, len(source.samples), size * batch)
    groups = [list(range(start, min(start + batch, len(source.samples)))) for start in starts]
    for number, indices in enumerate(groups):
        states = source.states(indices)
        for ahead in groups[number + 1 : number + 2]:
            source.prefetch(ahead)
        rows = collate([source.samples[i] for i in indices])
        blocks = Blocks.draw(rows, rows.tokens.shape[1], block, [0] * len(indices))
        if bool(blocks.keep.any()):
            yield indices[0], rows, states, blocks


def _rounds(accepted: torch.Tensor, blocks: Blocks, row: int):
    """Accepted drafts of each round of one row, from every possible anchor's outcome.

    A block cut short by an answer's end is not counted, and ends its answer.
    """
    starts = blocks.anchors[row][blocks.keep[row]].tolist()
    places, next_start = set(starts), 0
    for at, anchor in enumerate(starts):
        if anchor < next_start:
            continue
        if not bool(blocks.supervised[row, at].all()):
            # Skip the rest of this answer: the anchors up to the next gap.
            next_start = anchor + 1
            while next_start in places:
                next_start += 1
            continue
        taken = int(accepted[at])
        yield taken
        next_start = anchor + taken + 1
