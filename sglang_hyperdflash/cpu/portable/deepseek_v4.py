"""The portable DeepSeek-V4 target as an SGLang model: the core over paged RadixAttention.

It needs an attention backend with sinks: the torch reference on a CPU, triton on CUDA. It returns
the pre-collapse residual ``[N, m * d]`` as ``hidden_states_before_norm``, like SGLang's V4 class.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.runtime_context import get_parallel
from torch import nn

from sglang_hyperdflash.cpu.portable.core import DeepseekV4Core
from sglang_hyperdflash.cpu.portable.weights import load_core, sent_in_parts, shard_rows
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError


class PortableDeepSeekV4ForCausalLM(nn.Module):
    """A ``deepseek_v4`` checkpoint whose ``architectures`` names this class."""

    def __init__(self, config, quant_config=None, prefix: str = "") -> None:
        super().__init__()
        if quant_config is not None:
            raise HyperDFlashConfigError("the portable target supports no quantization.")
        if config.v_head_dim != config.head_dim:
            raise HyperDFlashConfigError(
                f"the portable DeepSeek-V4 target reads K and V from a head of {config.head_dim}; "
                f"v_head_dim is {config.v_head_dim} (SGLang's default when config.json has none). "
                f'Set "v_head_dim": {config.head_dim} in config.json.'
            )
        self.config = config
        self.model = DeepseekV4Core(config)
        size, parallel = (config.vocab_size, config.hidden_size), get_parallel()
        self.embed_tokens = VocabParallelEmbedding(
            *size, use_attn_tp_group=parallel.attn_dp_enabled
        )
        self.lm_head = ParallelLMHead(*size, use_attn_tp_group=parallel.enable_dp_lm_head)
        self.logits_processor = LogitsProcessor(config)
        self.captured_layers: tuple[int, ...] = ()
        window = config.sliding_window
        self.attention = nn.ModuleList(
            RadixAttention(
                num_heads=config.num_attention_heads,
                head_dim=config.head_dim,
                scaling=config.head_dim**-0.5,
                num_kv_heads=1,
                layer_id=i,
                # SGLang's window excludes the query itself.
                sliding_window_size=-1 if window >= config.max_position_embeddings else window - 1,
            )
            for i in range(config.num_hidden_layers)
        )

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_embed_and_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights that an EAGLE draft shares; a seam."""
        return self.embed_tokens.weight, self.lm_head.weight

    def get_attention_sliding_window_size(self) -> int | None:
        """Return the window that ModelRunner sizes metadata with, or None; a seam."""
        window = self.config.sliding_window
        return None if window >= self.config.max_position_embeddings else window - 1

    def set_dflash_layers_to_capture(self, layer_ids: list[int]) -> None:
        """Make a pass return the means after these layers instead of the residual; a seam."""
        self.captured_layers = tuple(layer_ids)

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        input_embeds: torch.Tensor | None = None,
    ):
        """Run ``N`` tokens and return SGLang's ``LogitsProcessorOutput``."""

        def attend(layer_idx, q, kv, sinks):
            return self.attention[layer_idx](q.flatten(1), kv, kv, forward_batch, sinks=sinks)

        embeddings = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
        trace: list[torch.Tensor] | None = [] if self.captured_layers else None
        hidden, residual = self.model(embeddings, input_ids, positions, attend, trace)
        means = [trace[i].mean(1) for i in self.captured_layers]
        return self.logits_processor(
            input_ids,
            hidden,
            self.lm_head,
            forward_batch,
            aux_hidden_states=means or None,
            hidden_states_before_norm=None if means else residual,
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a checkpoint in either naming scheme, or the parts that a trainer sends."""
        rows, outside = {}, {}
        for name in ("embed_tokens", "lm_head"):
            layer = getattr(self, name)
            # Seam: the indices that the DFLASH worker reads too.
            indices = layer.shard_indices
            shard = slice(indices.org_vocab_start_index, indices.org_vocab_end_index)
            # A shard may be padded; the checkpoint fills the leading rows.
            layer.weight.data[shard.stop - shard.start :] = 0
            rows[f"{name}.weight"] = shard
            outside[f"{name}.weight"] = layer.weight[: shard.stop - shard.start]
        whole = not sent_in_parts(weights)
        sharded = shard_rows(weights, rows, total=self.config.vocab_size)
        load_core(self.model, sharded, outside=outside, skip=("mtp.",), whole=whole)
