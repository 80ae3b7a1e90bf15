"""The block of a round: every request's anchor, the positions of its rows, and where they write."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from sglang_hyperdflash.draft.propose import Proposal


@dataclass(frozen=True)
class Block:
    """What draft, verification and the write of draft K/V share; bs requests of ``width`` rows.

    Attributes:
        tokens: ``[bs, width]`` int64: the anchor, the last committed token, then mask tokens, or,
            once it is drafted, the drafts.
        positions: ``[bs, width]`` int64; the anchor's is SGLang's ``seq_lens``, without it.
        plan: SGLang's ``KVLocPlan`` of the rows' target slots.
        ends_cpu, ends_sum: the contexts' lengths after the block, or bounds of them, on the host;
            None where SGLang knows neither.
        proposal: what the drafts were drawn from; None for argmaxes, and at width 1.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    plan: Any
    ends_cpu: torch.Tensor | None
    ends_sum: int | None
    proposal: Proposal | None = None

    @property
    def width(self) -> int:
        """Rows of each request."""
        return self.tokens.shape[1]

    @property
    def anchors(self) -> torch.Tensor:
        """``[bs]`` int64."""
        return self.tokens[:, 0]

    @property
    def drafts(self) -> torch.Tensor:
        """``[bs, width - 1]`` int64."""
        return self.tokens[:, 1:]

    @property
    def slots(self) -> torch.Tensor:
        """``[bs * width]`` int64, the target's K/V slots of the rows."""
        return self.plan.write_virtual

    def drafted(self, drafts: torch.Tensor, proposal: Proposal | None) -> Block:
        """The block with ``drafts [bs, width - 1]`` int64."""
        tokens = torch.cat([self.tokens[:, :1], drafts], 1)
        return replace(self, tokens=tokens, proposal=proposal)


def prepare_block(batch: Any, width: int, mask_token: int, translator: Any) -> Block:
    """Lay out a round's rows in the slots that the scheduler reserved for them.

    Seam: ``KVIndexTranslator.plan_uniform_extend``, which reads the slots and writes positions and
    anchors in one launch; DSPARK's rounds begin with it too.

    Args:
        batch: a decoding ``ScheduleBatch``; its ``spec_info`` holds the anchors.
        translator: the target runner's.
    """
    draft_input, lengths = batch.spec_info, batch.seq_lens
    shape, device = (len(lengths), width), lengths.device
    tokens = torch.full(shape, mask_token, dtype=torch.int64, device=device)
    positions = torch.empty(shape, dtype=torch.int64, device=device)
    known = batch.seq_lens_cpu
    if known is not None:
        ends = known + width
        total = int(ends.sum())
    else:  # a backend that plans on the device: what is reserved is a safe bound
        ends = draft_input.nxt_kv_lens_cpu
        total = None if ends is None else int(draft_input.nxt_kv_lens_sum)
    plan = translator.plan_uniform_extend(
        req_pool_indices=batch.req_pool_indices,
        seq_lens=lengths,
        seq_lens_cpu=known if known is not None else draft_input.nxt_kv_lens_cpu,
        width=width,
        positions_out=positions,
        anchor_src=draft_input.bonus_tokens,
        anchor_out=tokens,
    )
    return Block(tokens, positions, plan, ends, total)
