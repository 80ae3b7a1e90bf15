"""The portable NextN (MTP) draft as an SGLang model: what ``EAGLE`` runs for the tiny target."""

from collections.abc import Iterable

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from torch import nn

from eval.rivals.nextn_core import NextNCore, nextn_tensors
from sglang_hyperdflash.cpu.portable.weights import load_core, sent_in_parts


class PortableDeepSeekV4ForCausalLMNextN(nn.Module):
    """A checkpoint of ``mtp.0.*`` tensors; embedding and LM head come from the target.

    Seam: ``EagleDraftWorker`` calls ``set_embed_and_head`` and passes the residual as
    ``forward_batch.spec_info.hidden_states``.
    """

    def __init__(self, config, quant_config=None, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        self.model = NextNCore(config)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        self.logits_processor = LogitsProcessor(config)
        heads, width = config.num_attention_heads, config.head_dim
        self.attention = RadixAttention(heads, width, width**-0.5, num_kv_heads=1, layer_id=0)

    def set_embed_and_head(self, embed: torch.Tensor, head: torch.Tensor) -> None:
        self.embed_tokens.weight, self.lm_head.weight = embed, head

    @torch.no_grad()
    def forward(self, input_ids, positions, forward_batch, input_embeds=None):
        """SGLang's ``LogitsProcessorOutput`` of ``input_ids [N]`` at ``positions [N]``."""

        def attend(_layer, q, kv, sinks):
            return self.attention(q.reshape(len(q), -1), kv, kv, forward_batch, sinks=sinks)

        embeddings = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
        residual = forward_batch.spec_info.hidden_states
        hidden, residual = self.model(embeddings, residual, input_ids, positions, attend)
        return self.logits_processor(
            input_ids, hidden, self.lm_head, forward_batch, hidden_states_before_norm=residual
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load ``mtp.0.*``; a missing, misshapen or non-finite tensor is refused."""
        load_core(self.model, nextn_tensors(weights), whole=not sent_in_parts(weights))
