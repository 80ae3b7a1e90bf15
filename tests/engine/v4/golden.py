"""transformers' own DeepSeek-V4 on the same checkpoint: an implementation that shares no line.

In fp32 it is the truth. In bf16, with K/V rounded as V4's pages round them, it shows how far such
arithmetic may be from the truth, whoever does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from tests.engine.v4.latents import GROUP, INDEX, NOPE, fp8_row, hadamard


@dataclass(frozen=True)
class Golden:
    """Of one text of ``S`` tokens.

    logits: ``[S, V]`` fp32. residual: ``[S, m, d]``, the streams after the last layer.
    """

    logits: torch.Tensor
    residual: torch.Tensor


def rounded_latents(x: torch.Tensor) -> torch.Tensor:
    """``x [..., 512]`` as a page gives it back: groups of 64 in fp8, the rotated end in bf16."""
    groups = x[..., :NOPE].float().unflatten(-1, (-1, GROUP))
    least = groups.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448
    scale = torch.exp2(torch.ceil(torch.log2(least)))
    nope = (groups / scale).to(torch.float8_e4m3fn).float() * scale
    return torch.cat([nope.flatten(-2), x[..., NOPE:].bfloat16().float()], dim=-1).to(x.dtype)


def rounded_index(x: torch.Tensor) -> torch.Tensor:
    """``x [..., 128]`` as the index cache gives it back."""
    values, scale = fp8_row(hadamard(x.float()))
    return hadamard(values.float() * scale).to(x.dtype)


def _round_caches(model) -> None:
    """Round K/V where a server stores them: after RoPE, before anything reads them."""
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

    def update(own):
        def rounded(self, keys, values, *args, **kwargs):
            keys = rounded_latents(keys)
            return own(self, keys, keys, *args, **kwargs)

        return rounded

    def states(own):
        def rounded(self, name, compressed):
            index = compressed.shape[-1] == INDEX
            return own(self, name, (rounded_index if index else rounded_latents)(compressed))

        return rounded

    for layer in model.caches:
        kind = type(layer)
        layer.update = update(kind.update).__get__(layer)
        if isinstance(layer, v4.DeepseekV4HCACache):
            layer.update_compressor_states = states(kind.update_compressor_states).__get__(layer)


def logit_error(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Root mean square over the vocabulary of each row's log-probabilities, ``[S]``."""
    return (a.log_softmax(-1) - b.log_softmax(-1)).square().mean(-1).sqrt()


def path_error(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Relative distance of every path, ``[S, m]``."""
    return (a - b).norm(dim=-1) / b.norm(dim=-1)


def medians(error: torch.Tensor, prompt: int) -> list[float]:
    """Over the prefill's rows and over the decoded ones."""
    return [float(part.median()) for part in (error[:prompt], error[prompt:])]


class Transformers:
    """The model, in one dtype."""

    def __init__(self, folder: Path, dtype: torch.dtype, fp8_cache: bool = False) -> None:
        from transformers import DeepseekV4ForCausalLM

        self.model, info = DeepseekV4ForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", output_loading_info=True
        )
        assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        self.model.eval()
        for name, weight in self.model.named_parameters():
            if "norm" in name:  # kept in fp32, but then its own next product has two dtypes
                weight.data = weight.data.to(dtype)
        self.fp8_cache, self.caches = fp8_cache, []

    @torch.no_grad()
    def run(self, tokens: list[int], decoded: int) -> Golden:
        """Prefill all but the last ``decoded`` tokens, then one token at a time."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        if self.fp8_cache:
            self.caches = cache.layers
            _round_caches(self)
        streams = []
        hook = self.model.model.layers[-1].register_forward_hook(
            lambda _module, _inputs, output: streams.append(output[0].float())
        )
        first = len(tokens) - decoded
        steps = [tokens[:first]] + [[token] for token in tokens[first:]]
        logits = [
            self.model(torch.tensor([step]), past_key_values=cache, use_cache=True).logits[0]
            for step in steps
        ]
        hook.remove()
        return Golden(torch.cat(logits).float(), torch.cat(streams))
