"""The block's rows start at what the target knew last (an option of HyperDFlash-2).

    x_k = e_k + W_h f + W_e norm(e_0)          # e_0 the anchor's embedding, e_k a mask's

``f`` is the context feature of the last token whose target state exists, the one before the anchor.
Without it a drafter sees that feature through attention alone. An MTP layer has state and token in
its residual stream, next to the LM head it shares with the target, and drafts better first tokens
of text it was not trained on: ``e_proj``, ``h_proj`` and ``enorm`` are DeepSeek-V3's names
(2412.19437, section 2.2).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from sglang_hyperdflash.draft.config import HyperDFlashConfig

START = 0.02


class FeatureFusion(nn.Module):
    """Checkpoint names: ``fusion.h_proj.weight``, ``fusion.e_proj.weight``, ``fusion.enorm``.

    Args:
        width: d; eps: of the norm.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.h_proj = nn.Linear(width, width, bias=False)
        self.e_proj = nn.Linear(width, width, bias=False)
        self.enorm = nn.Parameter(torch.ones(width, dtype=torch.float32))
        self.start()

    @torch.no_grad()
    def start(self) -> None:
        """The feature as it is, with a little of the anchor, as an MTP layer starts."""
        nn.init.eye_(self.h_proj.weight)
        self.e_proj.weight.normal_(std=START)
        self.enorm.fill_(1.0)

    def forward(self, anchor: torch.Tensor, feature: torch.Tensor) -> torch.Tensor:
        """What every row of a block starts with beside its embedding.

        Args:
            anchor: embeddings ``[..., d]`` of the blocks' anchors; feature: ``[..., d]``, zeros
                where there is none.

        Returns:
            ``[..., d]`` in the anchor's dtype.
        """
        normed = F.rms_norm(anchor.float(), self.enorm.shape, self.enorm.float(), self.eps)
        weight = self.h_proj.weight
        added = self.h_proj(feature.to(weight.dtype)) + self.e_proj(normed.to(weight.dtype))
        return added.to(anchor.dtype)


def build_fusion(config: HyperDFlashConfig) -> FeatureFusion | None:
    """The module that a config describes, or None."""
    return FeatureFusion(config.hidden_size, config.rms_norm_eps) if config.fusion else None
