"""SGLang's MHA K/V pool without its Triton parts."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class TorchKVPool(MHATokenToKVPool):
    """Seam: ``SRTPlatform.get_kv_pool_cls``; the in-tree constructor warms a Triton copy up."""

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        for buffer in (*self.k_buffer, *self.v_buffer):
            buffer[tgt_loc] = buffer[src_loc]
