"""The target in this process, without an engine: hidden states and batched generation.

Uses the portable core with dense attention, so training needs torch and transformers only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig

from cpu_engine.portable.core import DeepseekV4Core, softmax_with_sinks
from cpu_engine.portable.weights import load_core
from sglang_hyperdflash.draft.hc_head import HcHead


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
        load_core(self.core, _read_safetensors(Path(folder)), outside=borrowed, skip=("mtp.",))
        self.requires_grad_(False)
        self.eval()
        self.scaling = self.config.head_dim**-0.5

    @property
    def hc_head(self) -> HcHead:
        """The target's final collapse."""
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
    def generate(
        self,
        prompts: list[list[int]],
        *,
        max_new_tokens: int,
        temperature: float,
        generator: torch.Generator,
    ) -> list[list[int]]:
        """Continue every prompt until EOS or the limit; returns the new tokens of each.

        Prompts run as one batch: all prompt tokens are fed one column at a time, so rows of
        different lengths need no padding mask.
        """
        lengths = torch.tensor([len(p) for p in prompts])
        limit = int(lengths.max()) + max_new_tokens
        cache = self.new_cache(len(prompts), limit)
        tokens = torch.zeros(len(prompts), limit + 1, dtype=torch.long)
        for i, prompt in enumerate(prompts):
            tokens[i, : len(prompt)] = torch.tensor(prompt)
        shortest = int(lengths.min())
        filled = torch.zeros(len(prompts), dtype=torch.long)
        hidden, _ = self.step(tokens[:, :shortest], filled, cache)
        done = torch.zeros(len(prompts), dtype=torch.bool)
        ends = lengths + max_new_tokens
        for at in range(shortest, limit):
            logits = self.lm_head(hidden[:, -1]).cpu()
            if temperature == 0:
                chosen = logits.argmax(-1)
            else:
                probs = (logits / temperature).softmax(-1)
                chosen = torch.multinomial(probs, 1, generator=generator).squeeze(1)
            live = (lengths <= at) & (at < ends) & ~done
            tokens[live, at] = chosen[live]
            stopped = live & (tokens[:, at] == self.config.eos_token_id)
            ends[stopped] = at + 1
            done |= stopped
            if bool((done | (ends <= at + 1)).all()):
                break
            hidden, _ = self.step(tokens[:, at : at + 1], torch.full_like(lengths, at), cache)
        return [tokens[i, int(lengths[i]) : int(ends[i])].tolist() for i in range(len(prompts))]

    @torch.inference_mode()
    def features(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[batch, S]`` tokens to final-norm ``[batch, S, d]`` and residual ``[.., m*d]``."""
        return self.features_with_layers(tokens, ())[:2]

    @torch.inference_mode()
    def features_with_layers(
        self, tokens: torch.Tensor, layer_ids: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """:meth:`features`, and the paths' means after layers, ``[batch, S, len(ids) * d]``."""
        cache, trace = self.new_cache(*tokens.shape), []
        lengths = torch.zeros(len(tokens), dtype=torch.long)
        final, residual = self.step(tokens, lengths, cache, trace)
        layers = [trace[i].mean(1).view_as(final) for i in layer_ids]
        none = final.new_zeros(*tokens.shape, 0)
        return final, residual, torch.cat([none, *layers], -1)


def _read_safetensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {folder}; expected a target checkpoint.")
    for path in files:
        yield from load_file(path).items()
