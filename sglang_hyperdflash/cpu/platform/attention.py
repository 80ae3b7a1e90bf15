"""An SGLang attention backend in plain torch: paged K/V, sinks, windows, causal or block-wide.

All requests of a verified batch have the same number of query rows and form one batched product.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_hyperdflash.cpu.portable.core import softmax_with_sinks


@dataclass
class QueryGroup:
    """Requests with the same number of query rows."""

    first_row: int  # the group's first row in the flattened batch
    n: int  # query rows of each request
    prefix: torch.Tensor  # [b] tokens before the first query row
    slots: torch.Tensor  # [b, L] pool slots of all keys, padded with slot 0
    masks: dict[tuple[bool, int], torch.Tensor] = field(default_factory=dict)

    def mask(self, *, causal: bool, window: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the additive mask ``[b, n, L]``; ``window`` is SGLang's look-back, or -1."""
        key = (causal, window)
        if key not in self.masks:
            keys = torch.arange(self.slots.shape[1])
            queries = self.prefix[:, None] + torch.arange(self.n)
            last = queries if causal else queries[:, -1:].expand_as(queries)
            visible = keys <= last[..., None]
            if window >= 0:
                visible &= keys >= queries[..., None] - window
            mask = torch.zeros(visible.shape, dtype=dtype)
            self.masks[key] = mask.masked_fill_(~visible, float("-inf"))
        return self.masks[key]


class TorchAttention(AttentionBackend):
    """The attention backend of the CPU platform; seam: ``register_attention_backend``.

    Args:
        ahead: how many tokens beyond ``seq_lens`` a decode step is, for the draft steps of a chain.
    """

    def __init__(self, model_runner, ahead: int = 0) -> None:
        super().__init__()
        self.ahead = ahead
        self.device = model_runner.device
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.groups: list[QueryGroup] = []

    def support_triton(self) -> bool:
        return False

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Return the length of a request that pads a rank's batch to another rank's."""
        return 1

    get_cuda_graph_seq_len_fill_value = get_cpu_graph_seq_len_fill_value

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        mode = forward_batch.forward_mode
        if mode.is_idle() or forward_batch.batch_size == 0:
            self.groups = []
            return
        rows, totals = forward_batch.req_pool_indices, forward_batch.seq_lens
        if mode.is_decode():
            lengths = [1] * len(rows)
            totals = totals + self.ahead
        elif mode.is_target_verify():
            n = int(forward_batch.spec_info.draft_token_num)
            lengths = [n] * len(rows)
            totals = totals + n
        else:
            lengths = forward_batch.extend_seq_lens.tolist()
        if len(set(lengths)) == 1:
            self.groups = [self._group(0, lengths[0], rows, totals)]
            return
        self.groups, first = [], 0
        for row, n, total in zip(rows.split(1), lengths, totals.split(1), strict=True):
            self.groups.append(self._group(first, n, row, total))
            first += n

    def _group(
        self, first_row: int, n: int, rows: torch.Tensor, totals: torch.Tensor
    ) -> QueryGroup:
        longest = int(totals.max())
        slots = self.req_to_token_pool.req_to_token[rows, :longest].long()
        # Entries past the end belong to an earlier request.
        slots.masked_fill_(torch.arange(longest) >= totals.unsqueeze(1), 0)
        return QueryGroup(first_row, n, totals - n, slots)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write K/V, then attend from ``q [T, heads * d]``; returns ``[T, heads * d]``."""
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v
            )
        q = q.unflatten(-1, (layer.tp_q_head_num, layer.qk_head_dim))
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        outputs = [q.new_zeros(0, q.shape[1] * values.shape[-1])]  # all of an idle rank's
        for group in self.groups:
            rows = q[group.first_row : group.first_row + group.n * len(group.slots)]
            outputs.append(self._attend(rows, keys, values, layer, group, sinks))
        output = outputs[-1] if len(outputs) < 3 else torch.cat(outputs)
        if len(output) < len(q):  # padding rows of a larger batch
            output = torch.cat([output, output.new_zeros(len(q) - len(output), output.shape[1])])
        return output

    forward_decode = forward_extend

    @staticmethod
    def _attend(
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        layer: RadixAttention,
        group: QueryGroup,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        b, length = group.slots.shape
        heads, kv_heads, d = layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim
        per_kv, n = heads // kv_heads, group.n
        k = keys[group.slots].to(q.dtype).permute(0, 2, 3, 1).reshape(b * kv_heads, d, length)
        v = values[group.slots].to(q.dtype).permute(0, 2, 1, 3).reshape(b * kv_heads, length, -1)
        # [b, n, kv, per_kv, d] -> [b * kv, per_kv * n, d]: query heads share their KV head.
        q = q.view(b, n, kv_heads, per_kv, d).permute(0, 2, 3, 1, 4)
        q = q.reshape(b * kv_heads, per_kv * n, d)
        window = -1 if layer.sliding_window_size is None else layer.sliding_window_size
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        mask = group.mask(causal=causal, window=window, dtype=q.dtype)
        mask = mask.view(b, 1, 1, n, length).expand(b, kv_heads, per_kv, n, length)
        mask = mask.reshape(b * kv_heads, per_kv * n, length)
        scores = torch.baddbmm(mask, q, k, alpha=layer.scaling)
        if sinks is None:
            weights = scores.softmax(-1)
        else:
            by_head = scores.view(b, heads, n, length)
            weights = softmax_with_sinks(by_head, sinks).view_as(scores)
        output = torch.bmm(weights, v).view(b, kv_heads, per_kv, n, -1)
        return output.permute(0, 3, 1, 2, 4).reshape(b * n, -1)
