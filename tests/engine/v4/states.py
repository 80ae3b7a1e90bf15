"""What a request leaves for its later tokens: compressor rows in rings, compressed keys in pages.

Addresses are SGLang's own (``CompressStatePool``, ``DeepSeekV4TokenToKVPool``). What is compared is
the bytes in the pools, never a recomputation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

STATES = "V4_STATES"  # a file: [request, state, layer, position, checksum] a line
WINDOW = {4: 8, 128: 128}  # tokens that one compressed row reads
WORD = 8

States = dict[tuple[str, str, int, int], set[int]]


def live(length: int, ratio: int) -> range:
    """Positions before ``length`` whose ring rows are read by a compression still to come.

    The next one ends with the first multiple of ``ratio`` after ``length``.
    """
    return range(max(0, (length // ratio + 1) * ratio - WINDOW[ratio]), length)


@dataclass(frozen=True)
class Kind:
    """One compressor of one layer: its ring and the pages of its keys.

    Attributes:
        name: ``latents`` or ``index``. ring: SGLang's ``CompressStatePool``.
        pages: ``[pages, bytes]``; a page holds its rows' data first, then their scales.
        data, scale, padding: bytes of a row's data and scales, and those of the scales that nothing
            writes.
    """

    name: str
    layer: int
    ring: Any
    pages: torch.Tensor
    data: int
    scale: int
    padding: int

    @property
    def ratio(self) -> int:
        return self.ring.ratio

    @property
    def rows(self) -> torch.Tensor:
        """All rings, ``[rows, width]`` fp32."""
        return self.ring.kv_score_buffer.kv_score


class Pools:
    """The pools of a target's model runner, read by request and position."""

    def __init__(self, pool: Any, table: torch.Tensor) -> None:
        self.pool, self.table, self.kinds = pool, table, []
        for layer, ring in enumerate(pool.compress_state_pools):
            if ring is None:
                continue
            self.kinds.append(Kind("latents", layer, ring, pool.get_extra_key_buffer(layer),
                                   data=576, scale=8, padding=1))  # fmt: skip
            index = pool.indexer_compress_state_pools[layer]
            if index is not None:
                pages = pool.get_index_k_with_scale_buffer(layer)
                self.kinds.append(Kind("index", layer, index, pages, 128, 4, 0))

    def where(self, kind: Kind, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Ring rows ``[n]`` of positions ``[n]`` of requests ``[n]``; int64."""
        if kind.ring.request_scoped:
            return kind.ring.translate_from_req_position_to_state_loc(request, position)
        slot = self.pool.full_to_swa_index_mapping[self.table[request, position].long()]
        return kind.ring.translate_from_swa_loc_to_state_loc(slot)

    def ring(self, kind: Kind, request, position, rows=None) -> torch.Tensor:
        """Ring rows, ``[n, words]`` int64; as they are now, or in a copy of ``rows``."""
        rows = kind.rows if rows is None else rows
        return rows[self.where(kind, request, position)].view(torch.int64)

    def keys(self, kind: Kind, request: torch.Tensor, window, pages=None) -> torch.Tensor:
        """The stored key of each window, ``[n, words]`` int64; now, or in a copy of ``pages``."""
        pages = (kind.pages if pages is None else pages).view(torch.uint8)
        pages = pages.view(len(pages), -1)
        size = self.pool.page_size // kind.ratio
        slot = self.table[request, window * kind.ratio].long() // kind.ratio
        page, slot = (slot // size)[:, None], (slot % size)[:, None]
        data = pages[page, slot * kind.data + torch.arange(kind.data)]
        written = torch.arange(kind.scale - kind.padding)
        scales = pages[page, size * kind.data + slot * kind.scale + written]
        found = torch.cat([data, scales], dim=1)
        return F.pad(found, (0, -found.shape[1] % WORD)).view(torch.int64)


def checksum(rows: torch.Tensor) -> list[int]:
    """One number for each row of words; it differs where any word does."""
    odd = torch.arange(1, rows.shape[1] + 1) * 0x9E3779B97F4A7C1 | 1
    mixed = (rows ^ rows >> 29) * odd
    return (mixed ^ mixed >> 32).sum(1).tolist()


def _lengths(forward_batch) -> list[int]:
    """Tokens of each request before this pass."""
    mode = forward_batch.forward_mode
    if mode.is_target_verify():
        return forward_batch.seq_lens.tolist()
    if mode.is_decode():
        return (forward_batch.seq_lens - 1).tolist()
    return list(forward_batch.extend_prefix_lens_cpu)


def _found(pools: Pools, request: int, length: int) -> Iterator[tuple[str, int, range, list[int]]]:
    """All that ``length`` tokens of a request have left: state, layer, positions, checksums."""
    for kind in pools.kinds:
        rows, windows = live(length, kind.ratio), range(length // kind.ratio)
        for name, positions, read in (("ring", rows, pools.ring), ("key", windows, pools.keys)):
            at = torch.tensor(positions, dtype=torch.int64)
            found = checksum(read(kind, torch.full_like(at, request), at))
            yield f"{kind.name} {name}", kind.layer, positions, found


def record(path: str) -> None:
    """Write down what every pass finds of the tokens before it, where it changed.

    Layer 0 compresses nothing: when its attention is called, no compressor of the pass has run.
    Seam: ``DeepseekV4AttnBackend.forward``.
    """
    from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend

    forward = DeepseekV4AttnBackend.forward
    sink = open(path, "w")  # noqa: SIM115
    known: dict[tuple, int] = {}

    def recorded(self, q, k, v, layer, forward_batch, *args, **kwargs):
        first = layer.layer_id == 0 and not self.is_draft_runner
        if first and forward_batch.rids and not forward_batch.forward_mode.is_idle():
            pools = Pools(self.token_to_kv_pool, self.req_to_token)
            requests = forward_batch.req_pool_indices.tolist()
            lengths = _lengths(forward_batch)
            for rid, request, length in zip(forward_batch.rids, requests, lengths, strict=True):
                for state, at, positions, sums in _found(pools, request, length):
                    for position, total in zip(positions, sums, strict=True):
                        key = (rid, state, at, position)
                        if known.get(key) != total:
                            known[key] = total
                            sink.write(json.dumps([*key, total]) + "\n")
            sink.flush()
        return forward(self, q, k, v, layer, forward_batch, *args, **kwargs)

    DeepseekV4AttnBackend.forward = recorded


def read_states(path: Path) -> States:
    """Every checksum that a state was ever found with; a committed one has one."""
    found: States = {}
    for line in path.read_text().splitlines():
        *key, total = json.loads(line)
        found.setdefault(tuple(key), set()).add(total)
    return found


def install() -> None:
    """What the environment asks for."""
    if STATES in os.environ:
        record(os.environ[STATES])
