"""The target in this process, without an engine: the portable one whole, of others the ends.

Uses the portable core with dense attention, so training needs torch and transformers only.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig

from sglang_hyperdflash.cpu.portable.core import DeepseekV4Core, softmax_with_sinks
from sglang_hyperdflash.cpu.portable.weights import load_core
from sglang_hyperdflash.draft.hc_head import HcHead
from sglang_hyperdflash.targets.files import TargetFacts, TargetFiles
from sglang_hyperdflash.targets.final_state import FinalState
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError


class DenseCache:
    """Per-layer K=V rows ``[layers, batch, length, d]`` with each row's own fill level."""

    def __init__(self, layers: int, batch: int, length: int, d: int) -> None:
        self.kv = torch.zeros(layers, batch, length, d)
        self.positions = torch.arange(length)

    def attend(self, lengths: torch.Tensor, n: int, scaling: float):
        """An ``Attend`` for ``n`` new tokens a row, at positions ``lengths ... lengths+n-1``.

        Args:
            lengths: ``[batch]`` tokens each row already holds.
        """
        batch = len(lengths)
        rows = torch.arange(batch).repeat_interleave(n)
        at = (lengths[:, None] + torch.arange(n)).reshape(-1)
        visible = int(lengths.max()) + n
        mask = self.positions[:visible] <= at.view(batch, n, 1)  # [batch, n, visible]

        def attend(layer: int, q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor):
            self.kv[layer][rows, at] = kv.float()
            heads, d = q.shape[1:]
            keys = self.kv[layer, :, :visible]
            q = q.view(batch, n, heads, d).transpose(1, 2).reshape(batch, heads * n, d)
            scores = (q.float() @ keys.transpose(1, 2) * scaling).view(batch, heads, n, visible)
            scores = scores.masked_fill(~mask.unsqueeze(1), float("-inf"))
            weights = softmax_with_sinks(scores, sinks)
            output = weights.reshape(batch, heads * n, visible) @ keys
            output = output.view(batch, heads, n, d).transpose(1, 2)
            return output.reshape(batch * n, heads, d).to(kv.dtype)

        return attend


class LocalTarget(nn.Module):
    """A portable DeepSeek-V4 checkpoint in fp32, frozen."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.config = AutoConfig.from_pretrained(folder)
        self.core = DeepseekV4Core(self.config)
        self.embed_tokens = nn.Embedding(self.config.vocab_size, self.config.hidden_size)
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        borrowed = {f"{n}.weight": getattr(self, n).weight for n in ("embed_tokens", "lm_head")}
        files = sorted(Path(folder).glob("*.safetensors"))
        weights = (named for path in files for named in load_file(path).items())
        load_core(self.core, weights, outside=borrowed, skip=("mtp.",))
        self.requires_grad_(False)
        self.eval()
        self.scaling = self.config.head_dim**-0.5
        epsilons = {"rms_eps": self.core.rms_eps, "hc_eps": self.core.hc_eps}
        self.final = FinalState(self.hc_head, self.core.norm, **epsilons)

    @property
    def hc_head(self) -> HcHead:
        return HcHead(self.core.hc_head_fn, self.core.hc_head_base, self.core.hc_head_scale)

    @property
    def device(self) -> torch.device:
        """Where the target is; methods take tensors of any device and return them here."""
        return self.embed_tokens.weight.device

    def new_cache(self, batch: int, length: int) -> DenseCache:
        with self.device:
            return DenseCache(len(self.core.layers), batch, length, self.config.head_dim)

    @torch.inference_mode()
    def step(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        cache: DenseCache,
        trace: list[torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run ``tokens [batch, n]`` after ``lengths [batch]`` cached ones.

        ``trace``, when given, receives every layer's ``[batch * n, m, d]`` streams.

        Returns:
            Final-norm states ``[batch, n, d]`` and pre-collapse residuals ``[batch, n, m*d]``.
        """
        batch, n = tokens.shape
        ids, lengths = tokens.reshape(-1).to(self.device), lengths.to(self.device)
        with self.device:
            positions = (lengths[:, None] + torch.arange(n)).reshape(-1)
            attend = cache.attend(lengths, n, self.scaling)
            hidden, residual = self.core(self.embed_tokens(ids), ids, positions, attend, trace)
        return hidden.view(batch, n, -1), residual.view(batch, n, -1)

    @torch.inference_mode()
    def features(
        self, tokens: torch.Tensor, layer_ids: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """States of tokens ``[b, S]``: final-norm ``[b, S, d]``, residual ``[b, S, m*d]``, and the
        paths' means after layers ``[b, S, len(layer_ids) * d]``.
        """
        cache, trace = self.new_cache(*tokens.shape), []
        lengths = torch.zeros(len(tokens), dtype=torch.long)
        final, residual = self.step(tokens, lengths, cache, trace)
        layers = [trace[i].mean(1).view_as(final) for i in layer_ids]
        none = final.new_zeros(*tokens.shape, 0)
        return final, residual, torch.cat([none, *layers], -1)


class BorrowedTarget(nn.Module):
    """``embed_tokens``, ``lm_head`` and the collapse of a target whose states are on disk, frozen,
    in the checkpoint's dtype: 2.1 GB of one that no trainer could load (DeepSeek-V4-Flash).

    Raises:
        HyperDFlashConfigError: a tensor is missing or does not fit the target's config.
    """

    def __init__(self, files: TargetFiles) -> None:
        super().__init__()
        facts = TargetFacts.from_config(files.config())
        shape = (facts.vocab_size, facts.hidden_size)
        embedding = files.stored_tensor("embed_tokens.weight")
        tied = files.config().get("tie_word_embeddings")
        head = embedding if tied else files.stored_tensor("lm_head.weight")
        for name, tensor in (("embedding", embedding), ("LM head", head)):
            if tuple(tensor.shape) != shape:
                raise HyperDFlashConfigError(
                    f"target {files.name}: its {name} has shape {tuple(tensor.shape)}; its "
                    f"config.json asks for {shape}."
                )
        self.embed_tokens = nn.Embedding.from_pretrained(embedding)
        self.lm_head = nn.Linear(*reversed(shape), bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(head)
        self.final = FinalState.of(files)
        self.requires_grad_(False)
