"""What training borrows of a target whose states are on disk: embedding, LM head, final norm.

Of a checkpoint that no trainer could load, these are about 1 GB (DeepSeek-V4-Flash).
"""

from __future__ import annotations

import torch
from torch import nn

from sglang_hyperdflash.targets.files import TargetFacts, TargetFiles
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.mean_pool import mean_pooled_state


class BorrowedTarget(nn.Module):
    """``embed_tokens``, ``lm_head`` and ``mean_pooled_state`` of a target checkpoint, fp32, frozen.

    Raises:
        HyperDFlashConfigError: a tensor is missing or does not fit the target's config.
    """

    def __init__(self, files: TargetFiles) -> None:
        super().__init__()
        self.facts = TargetFacts.from_config(files.config())
        shape = (self.facts.vocab_size, self.facts.hidden_size)
        embedding = files.tensor("embed_tokens.weight")
        tied = files.config().get("tie_word_embeddings")
        head = embedding if tied else files.tensor("lm_head.weight")
        for name, tensor in (("embedding", embedding), ("LM head", head)):
            if tuple(tensor.shape) != shape:
                raise HyperDFlashConfigError(
                    f"target {files.name}: its {name} has shape {tuple(tensor.shape)}; its "
                    f"config.json asks for {shape}."
                )
        self.embed_tokens = nn.Embedding.from_pretrained(embedding)
        self.lm_head = nn.Linear(*reversed(shape), bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(head)
        self.norm = nn.Parameter(files.tensor("norm"))
        self.requires_grad_(False)

    def mean_pooled_state(self, residual: torch.Tensor) -> torch.Tensor:
        """The paper's KL teacher state: the paths' mean through the final norm, ``[..., d]``."""
        return mean_pooled_state(residual, self.facts.hc_mult, self._norm)

    def _norm(self, state: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(state, self.norm.shape, self.norm, self.facts.rms_norm_eps)
