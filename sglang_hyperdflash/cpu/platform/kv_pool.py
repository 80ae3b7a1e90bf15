"""SGLang's MHA K/V pool without its Triton parts."""

from __future__ import annotations

import logging

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

logger = logging.getLogger(__name__)


class TorchKVPool(MHATokenToKVPool):
    """SGLang's MHA pool without its Triton copy; seam: ``SRTPlatform.get_kv_pool_cls``."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        # SGLang's own message rounds to 10 MB and omits the heads, so it would not show sharding.
        slots, heads, head_dim = self.k_buffer[0].shape
        sizes = len(self.k_buffer), heads, head_dim, slots
        logger.info("Torch K/V pool: layers=%d heads=%d head_dim=%d slots=%d", *sizes)

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        for buffer in (*self.k_buffer, *self.v_buffer):
            buffer[tgt_loc] = buffer[src_loc]
