"""transformers' own DeepSeek-V4 on the same checkpoint: an implementation that shares no line.

In fp32 it is the truth. In bf16, with K/V rounded as V4's pages round them, it shows how far such
arithmetic may be from the truth, whoever does it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.engine.v4.checkpoint import CONFIG
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


def _round_caches(caches: list) -> None:
    """Round K/V where a server stores them: after RoPE, before anything reads them."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HCACache

    def update(original, keys, values, *args, **kwargs):
        keys = rounded_latents(keys)
        return original(keys, keys, *args, **kwargs)

    def compressed(original, name, states):
        index = states.shape[-1] == INDEX
        return original(name, (rounded_index if index else rounded_latents)(states))

    for layer in caches:
        layer.update = partial(update, layer.update)
        if isinstance(layer, DeepseekV4HCACache):
            method = layer.update_compressor_states
            layer.update_compressor_states = partial(compressed, method)


@torch.no_grad()
def transformers(
    folder: Path, dtype: torch.dtype, tokens: list[int], decoded: int, fp8_cache: bool = True
) -> Golden:
    """Prefill all but the last ``decoded`` tokens, then one token at a time."""
    from transformers import DeepseekV4ForCausalLM, DynamicCache

    model, info = DeepseekV4ForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    model.eval()
    for name, weight in model.named_parameters():
        if "norm" in name:  # kept in fp32, but then its own next product has two dtypes
            weight.data = weight.data.to(dtype)
    cache, streams = DynamicCache(config=model.config), []
    if fp8_cache:
        _round_caches(cache.layers)
    model.model.layers[-1].register_forward_hook(
        lambda _module, _inputs, output: streams.append(output[0].float())
    )
    first = len(tokens) - decoded
    logits = [
        model(torch.tensor([step]), past_key_values=cache, use_cache=True).logits[0]
        for step in [tokens[:first]] + [[token] for token in tokens[first:]]
    ]
    return Golden(torch.cat(logits).float(), torch.cat(streams))


def logit_error(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Root mean square over the vocabulary of each row's log-probabilities, ``[S]``."""
    return (a.log_softmax(-1) - b.log_softmax(-1)).square().mean(-1).sqrt()


def path_error(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Relative distance of one path of every row, ``[S]``."""
    return (a - b).norm(dim=-1) / b.norm(dim=-1)


def _transposed(mixes: torch.Tensor) -> None:
    """The streams are mixed the other way; mixes are those of inputs, of outputs, of both."""
    m = CONFIG["hc_mult"]
    between = mixes[2 * m :].clone().unflatten(0, (m, m))
    mixes[2 * m :] = between.transpose(0, 1).flatten(0, 1)


MIXES = ("hc_attn_fn", "hc_attn_base", "hc_ffn_fn", "hc_ffn_base")
# What changes a checkpoint, by name: the end of weights' names and what is done to them in place.
WEIGHTS: dict[str, tuple[str | tuple[str, ...], Callable[[torch.Tensor], Any]]] = {
    "without sinks": ("attn_sink", lambda weight: weight.fill_(-1e4)),
    "without window biases": ("attn.compressor.ape", torch.Tensor.zero_),
    "without one mixing base": ("layers.2.hc_attn_base", torch.Tensor.zero_),
    "mixing the other way": (MIXES, _transposed),
    "index turned round": ("indexer.weights_proj.weight", torch.Tensor.neg_),
}
FIELDS = {
    "one rope": {"compress_rope_theta": CONFIG["rope_theta"]},
    "without clamps": {"swiglu_limit": 1e4},
}


def changed(target: Path, fault: str, folder: Path) -> Path:
    """The checkpoint with one fault of :data:`WEIGHTS` or :data:`FIELDS`, in a new folder."""
    from safetensors.torch import load_file, save_file

    weights = load_file(target / "model.safetensors")
    ends, change = WEIGHTS.get(fault, ((), None))
    for name in [name for name in weights if name.endswith(ends)]:
        change(weights[name])
    config = json.loads((target / "config.json").read_text()) | FIELDS.get(fault, {})
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
