"""The SGLang draft model: in-tree DFlash layers behind the HyperDFlash reducer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.dflash import DFlashDraftModel

from sglang_hyperdflash.draft.checkpoint import checked_tensors, expected_tensors
from sglang_hyperdflash.draft.config import parse_config
from sglang_hyperdflash.draft.dependency import build_dependency
from sglang_hyperdflash.draft.fusion import build_fusion
from sglang_hyperdflash.draft.reducer import build_reducer
from sglang_hyperdflash.serving.last_feature import fused
from sglang_hyperdflash.serving.weight_updates import DRAFTER_STAYS, REFUSAL


class HyperDFlashDraftModel(DFlashDraftModel):
    """DFlash layers whose context feature is the reduced pre-collapse residual.

    Seam: ``DFlashWorkerV2`` calls ``project_target_hidden`` on the target's hidden states before
    every write of draft K/V, outside the CUDA graphs.
    """

    def __init__(self, config, quant_config=None, prefix: str = "") -> None:
        self.raw_config = config.to_dict()
        parsed = parse_config(self.raw_config)
        super().__init__(config, quant_config=quant_config, prefix=prefix)
        self.hyperdflash_config = parsed
        del self.fc  # sized for captured layers; ours follows the config's source
        self.reducer_name, reducer = build_reducer(parsed)
        setattr(self, self.reducer_name, reducer)
        self.dependency = build_dependency(parsed)
        if self.dependency is not None:
            self.dependency.requires_grad_(False)
        self.fusion = build_fusion(parsed)
        self.last_features: torch.Tensor | None = None
        if self.fusion is not None:
            self.fusion.requires_grad_(False)

    @property
    def reducer_module(self) -> torch.nn.Module:
        """The reducer under its checkpoint name."""
        return getattr(self, self.reducer_name)

    def project_target_hidden(self, target_hidden: torch.Tensor) -> torch.Tensor:
        """What the target gave to context features ``[N, d]`` (eq. 1).

        Args:
            target_hidden: the pre-collapse residual ``[N, m * d]``, or, with source ``layers``,
                the chosen layers' means ``[N, len(ids) * d]``.
        """
        return self.reducer_module(target_hidden, self.hidden_norm.weight)

    def allocate_last_features(self, requests: int) -> None:
        """A feature ``[d]`` for each row of the request pool, zeros: none yet."""
        weight = self.hidden_norm.weight
        self.last_features = weight.new_zeros(requests, len(weight))

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        input_embeds: torch.Tensor | None = None,
        get_embedding: bool = False,
        pp_proxy_tensors=None,
    ) -> LogitsProcessorOutput:
        """Draft rows; with fusion they start at their requests' last features.

        Seam: the draft's graph runner copies ``input_embeds`` and ``req_pool_indices`` in front of
        a replay, so both are the round's own, and reads the names of this function's parameters.
        """
        if self.fusion is not None:
            features = self.last_features[forward_batch.req_pool_indices]
            width = forward_batch.spec_info.draft_token_num
            input_embeds = fused(self.fusion, input_embeds, features, width)
        return super().forward(
            input_ids, positions, forward_batch, input_embeds, get_embedding, pp_proxy_tensors
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load exactly the tensors the config describes; anything else is an error."""
        expected = expected_tensors(self.raw_config, self.hyperdflash_config)
        super().load_weights(checked_tensors(weights, expected))
        setattr(self, REFUSAL, DRAFTER_STAYS)


EntryClass = HyperDFlashDraftModel
