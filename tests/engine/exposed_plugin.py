"""A server plugin: SGLang's HY-V4 with dense attention, as its own needs CUDA kernels.

The architecture has another name, so that SGLang does not ask for those.
"""

import dataclasses

import torch
from safetensors.torch import save_file
from torch import nn

from sglang_hyperdflash.targets import kinds

ARCHITECTURE = "DenseHYV4ForCausalLM"


class DenseAttention(nn.Module):
    """Causal attention without positions; takes the arguments of ``HYV4Attention``."""

    def __init__(self, config, layer_id, *args, **kwargs) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention

        super().__init__()
        d, heads = config.hidden_size, config.num_attention_heads
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.out = nn.Linear(d, d, bias=False)
        self.attn = RadixAttention(heads, d // heads, (d // heads) ** -0.5, heads, layer_id)

    def prepare_qkv_latent(self, *args, **kwargs) -> None:
        return None

    def forward(self, positions, hidden_states, forward_batch, *args, **kwargs):
        q, k, v = self.qkv(hidden_states).chunk(3, dim=-1)
        return self.out(self.attn(q.contiguous(), k.contiguous(), v.contiguous(), forward_batch))


def dense_hy_v4() -> type:
    """SGLang's class with dense attention, under SGLang's name."""
    from sglang.srt.models import hunyuan_v4

    def load_weights(self, weights) -> None:
        own = dict(self.named_parameters())
        for name, value in weights:
            own[name].data.copy_(value)

    hunyuan_v4.HYV4Attention = DenseAttention
    return type("HYV4ForCausalLM", (hunyuan_v4.HYV4ForCausalLM,), {"load_weights": load_weights})


def kind() -> kinds.TargetKind:
    return dataclasses.replace(kinds.HY_V4, architectures=(ARCHITECTURE,))


def load() -> None:
    from sglang.srt.models.registry import ModelRegistry

    kinds.TARGETS = (*kinds.TARGETS, kind())
    ModelRegistry.models[ARCHITECTURE] = dense_hy_v4()


def main(folder: str) -> None:
    """Write weights that make every token of a context matter and every path differ."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    from tests.unit.targets.exposed_models import one_rank

    with one_rank():
        model = dense_hy_v4()(get_config(folder, trust_remote_code=False))
    draw, weights = torch.Generator().manual_seed(3), {}
    for name, parameter in model.named_parameters():
        scale = 1.0 if parameter.dim() < 2 or "embed" in name else 2 * parameter.shape[-1] ** -0.5
        weights[name] = torch.randn(parameter.shape, generator=draw) * scale
    save_file(weights, f"{folder}/model.safetensors")
