"""Torch forms of the compressor plans of DeepSeek-V4 (SGLang's ``c_plan.cuh``).

A compressor keeps the last rows of a request in a ring: ``(kv, score)`` per token. A plan says, for
every compressed row of a step, which of its rows come from the ring and which from the step itself,
and which rows of the step enter the ring.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NO_ROW = -1


@dataclass(frozen=True)
class Rings:
    """Where a compressor's rings are.

    Ratio 128 rings belong to requests; ratio 4 rings to sliding-window pages, unless
    ``by_request``.
    """

    ratio: int
    table: torch.Tensor  # req_to_token [R, L]
    full_to_state: torch.Tensor  # target slot to sliding-window slot
    page: int  # tokens of a sliding-window page
    size: int  # rows of one ring
    by_request: bool

    def row(self, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Flat rows ``[n]`` int64 of positions of requests."""
        if self.ratio == 128 or self.by_request:
            return request * self.size + position % self.size
        slot = self.full_to_state[self.table[request, position].long()].long()
        return slot // self.page * self.size + slot % self.size

    @property
    def window(self) -> int:
        """Tokens that one compressed row reads: ratio 4 overlaps the row before."""
        return 8 if self.ratio == 4 else 128

    @property
    def pad(self) -> int:
        """Rows before the open window that are kept for a round that is cut short."""
        return self.size - self.window + 2 if self.size > self.window else 0


def _int32(*columns: torch.Tensor) -> torch.Tensor:
    return torch.stack([c.to(torch.int32) for c in columns], dim=1).contiguous()


def plan_decode(
    compress_ratio, req_pool_indices, req_to_token, full_to_state, seq_lens,
    swa_page_size, ring_size, use_req_ring,
):  # fmt: skip
    """One token a request."""
    from sglang.kernels.ops.attention.dsv4.compress import CompressorDecodePlan

    where = (req_to_token, full_to_state, swa_page_size)
    rings = Rings(compress_ratio, *where, ring_size, use_req_ring)
    request, last = req_pool_indices.long(), seq_lens.long() - 1
    write = rings.row(request, last)
    read = rings.row(request, (last - compress_ratio).clamp_min(0))
    plan = _int32(seq_lens, write, read // compress_ratio, write // compress_ratio)
    return CompressorDecodePlan(compress_ratio, plan.view(torch.uint8))


def plan_prefill(
    compress_ratio, req_pool_indices, seq_lens, extend_lens, req_to_token, full_to_state,
    swa_page_size, ring_size, num_q_tokens, use_cuda_graph, use_req_ring,
):  # fmt: skip
    """Prefill, and the verified blocks of a round."""
    from sglang.kernels.ops.attention.dsv4.compress import CompressorPrefillPlan

    where = (req_to_token, full_to_state, swa_page_size)
    rings = Rings(compress_ratio, *where, ring_size, use_req_ring)
    compressed, written, base = [], [], 0
    requests = (req_pool_indices.tolist(), seq_lens.tolist(), extend_lens.tolist())
    for request, seq_len, extend in zip(*requests, strict=True):
        if extend == 0:
            continue
        position = torch.arange(seq_len - extend, seq_len)
        compressed.append(_compressed(rings, request, position, base))
        written.append(_written(rings, request, position, base))
        base += extend
    c = torch.cat(compressed) if compressed else torch.empty(0, 4, dtype=torch.int32)
    w = torch.cat(written) if written else torch.empty(0, 2, dtype=torch.int32)
    if use_cuda_graph:  # padded with invalid entries to a fixed length
        empty = torch.tensor([[NO_ROW, 0, NO_ROW, NO_ROW]]).int()
        c = torch.cat([c, empty.expand(num_q_tokens - len(c), 4)])
        w = torch.cat([w, empty[:, [0, 2]].expand(num_q_tokens - len(w), 2)])
    c, w = (x.contiguous().view(torch.uint8).view(-1, 4 * x.shape[1]) for x in (c, w))
    return CompressorPrefillPlan(compress_ratio, c, w)


def _compressed(rings: Rings, request: int, position: torch.Tensor, base: int) -> torch.Tensor:
    """Rows ``(length, source and rows from the ring, ring pages)`` that are complete in a step."""
    step = torch.arange(len(position))
    done = (position + 1) % rings.ratio == 0
    at, step = position[done], step[done]
    row = torch.full_like(at, request)
    from_ring = rings.window - (step + 1).clamp_max(rings.window)
    earlier = rings.row(row, (at - rings.ratio).clamp_min(0)) // rings.ratio
    own = rings.row(row, at) // rings.ratio
    earlier = torch.where(from_ring == 0, NO_ROW, earlier)
    return _int32(at + 1, (base + step) | (from_ring << 16), earlier, own)


def _written(rings: Rings, request: int, position: torch.Tensor, base: int) -> torch.Tensor:
    """Rows ``(source, ring row)`` that later steps may still read."""
    seq_len = int(position[-1]) + 1
    last = seq_len // rings.ratio * rings.ratio
    overlap = rings.ratio == 4
    write = position >= min(last - (rings.ratio if overlap else 0), seq_len - rings.pad)
    if overlap and not rings.by_request:
        # The next page's first row reads this page's last rows.
        write |= position % rings.page >= rings.page - rings.ratio
    source = base + torch.arange(len(position))[write]
    row = torch.full_like(source, request)
    return _int32(source, rings.row(row, position[write]))
