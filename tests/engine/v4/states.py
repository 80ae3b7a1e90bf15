"""What a request leaves for its later tokens: compressor rows in rings, compressed keys in pages.

Addresses are SGLang's own (``CompressStatePool``, ``DeepSeekV4TokenToKVPool``). What is compared is
the bytes in the pools, never a recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

WINDOW = {4: 8, 128: 128}  # tokens that one compressed row reads
WORD = 8


def live(length: int, ratio: int) -> range:
    """Positions before ``length`` whose ring rows are read by a compression still to come.

    The next one ends with the first multiple of ``ratio`` after ``length``.
    """
    return range(max(0, (length // ratio + 1) * ratio - WINDOW[ratio]), length)


@dataclass(frozen=True)
class Kind:
    """One compressor of one layer: its ring and the pages of its keys.

    Attributes:
        ring: SGLang's ``CompressStatePool``. pages: ``[pages, bytes]``; a page holds its rows' data
            first, then their scales.
        data, scale, padding: bytes of a row's data and scales, and those of the scales that nothing
            writes.
    """

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
            self.kinds.append(Kind(layer, ring, pool.get_extra_key_buffer(layer), 576, 8, 1))
            index = pool.indexer_compress_state_pools[layer]
            if index is not None:
                pages = pool.get_index_k_with_scale_buffer(layer)
                self.kinds.append(Kind(layer, index, pages, 128, 4, 0))

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
        key = torch.cat([data, scales], dim=1)
        return F.pad(key, (0, -key.shape[1] % WORD)).view(torch.int64)
