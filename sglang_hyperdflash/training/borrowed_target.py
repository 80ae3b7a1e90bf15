"""Embedding, LM head and final norm of a target whose states are on disk.

Of a checkpoint that no trainer could load, these are about 1 GB (DeepSeek-V4-Flash).
"""

from __future__ import annotations

from torch import nn

from sglang_hyperdflash.targets.files import TargetFacts, TargetFiles
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError


class BorrowedTarget(nn.Module):
    """``embed_tokens``, ``lm_head`` and final ``norm`` of a target checkpoint, fp32, frozen.

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
