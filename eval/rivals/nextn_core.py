"""DeepSeek-V4's NextN (MTP) layer in plain torch, without an engine.

Every residual path of the target gets ``h_proj(RMSNorm(H_j)) + e_proj(RMSNorm(embedding))``, one
decoder layer runs over the paths, and the layer's own ``hc_head`` collapses them; embedding and
LM head are the target's. Its own residual feeds the next draft step. Form: SGLang's
``models/deepseek_v4_nextn.py``.
"""

from collections.abc import Iterable

import torch
from torch import nn

from sglang_hyperdflash.cpu.portable import core

NEXTN_PREFIX = "mtp.0."
NamedTensors = Iterable[tuple[str, torch.Tensor]]


class NextNCore(nn.Module):
    """From a token's embedding and the residual before it to the state of the token after it.

    Parameters have the names of DeepSeek-V4's ``mtp.0.`` tensors.
    """

    def __init__(self, config) -> None:
        super().__init__()
        core.check_config(config)
        d = config.hidden_size
        self.rotary = core.RotaryTable(config)
        self.e_proj, self.h_proj = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.enorm = nn.Parameter(torch.ones(d).float())
        self.hnorm = nn.Parameter(torch.ones(d).float())
        self.layer = core.DecoderLayer(config, 0)
        core.add_final_state(self, config)

    def forward(
        self,
        embeddings: torch.Tensor,
        residual: torch.Tensor,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: core.Attend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run ``N`` rows, each at its position ``p``.

        ``embeddings [N, d]`` and ``input_ids [N]`` are of the tokens ``p+1``, ``residual [N, m*d]``
        is of the ``positions [N]``. Returns the state ``[N, d]`` that the LM head turns into token
        ``p+2``, and the layer's own residual ``[N, m*d]``.
        """
        paths = residual.unflatten(-1, (self.m, -1))
        h = self.h_proj(core.rms_norm(paths, self.hnorm, self.rms_eps))
        e = self.e_proj(core.rms_norm(embeddings, self.enorm, self.rms_eps))
        streams = e.unsqueeze(1) + h
        rotation = self.rotary.at(positions)
        streams = self.layer(streams, input_ids, self.rotary, rotation, attend)
        return core.final_state(self, streams), streams.flatten(1)


def nextn_tensors(weights: NamedTensors) -> NamedTensors:
    """The ``mtp.0.*`` tensors under the core's names; others are left out."""
    outside_layer = ("e_proj.", "h_proj.", "enorm", "hnorm", "norm.", "hc_head_")
    for name, tensor in weights:
        name = name.removeprefix("model.")
        if name.startswith(NEXTN_PREFIX):
            name = name.removeprefix(NEXTN_PREFIX)
            in_core = name.replace("norm.weight", "norm")
            yield (in_core if name.startswith(outside_layer) else f"layer.{name}"), tensor
