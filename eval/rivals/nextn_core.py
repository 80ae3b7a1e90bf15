"""DeepSeek-V4's NextN (MTP) layer in plain torch, without an engine.

Every residual path of the target gets ``h_proj(RMSNorm(H_j)) + e_proj(RMSNorm(embedding))``, one
decoder layer runs over the paths, and the layer's own ``hc_head`` collapses them; embedding and
LM head are the target's. Its own residual feeds the next draft step. Form: SGLang's
``models/deepseek_v4_nextn.py``.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from sglang_hyperdflash.cpu.portable.core import (
    Attend,
    DecoderLayer,
    RotaryTable,
    add_final_state,
    check_config,
    final_state,
    rms_norm,
)

NEXTN_PREFIX = "mtp.0."


class NextNCore(nn.Module):
    """From a token's embedding and the residual before it to the state of the token after it.

    Parameters have the names of DeepSeek-V4's ``mtp.0.`` tensors.
    """

    def __init__(self, config) -> None:
        super().__init__()
        check_config(config)
        d = config.hidden_size
        self.rotary = RotaryTable(config)
        self.e_proj, self.h_proj = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.enorm = nn.Parameter(torch.ones(d).float())
        self.hnorm = nn.Parameter(torch.ones(d).float())
        self.layer = DecoderLayer(config, 0)
        add_final_state(self, config)

    def forward(
        self,
        embeddings: torch.Tensor,
        residual: torch.Tensor,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run ``N`` rows.

        Args:
            embeddings: ``[N, d]`` of tokens ``p+1``; residual: ``[N, m*d]`` of positions ``p``.
            positions: ``[N]``, p.

        Returns:
            The state ``[N, d]`` that the LM head turns into token ``p+2``, and the layer's own
            residual ``[N, m*d]``.
        """
        paths = residual.unflatten(-1, (self.m, -1))
        h = F.linear(rms_norm(paths, self.hnorm, self.rms_eps), self.h_proj.weight)
        e = F.linear(rms_norm(embeddings, self.enorm, self.rms_eps), self.e_proj.weight)
        streams = e.unsqueeze(1) + h
        rotation = self.rotary.at(positions)
        streams = self.layer(streams, input_ids, self.rotary, rotation, attend)
        return final_state(self, streams), streams.flatten(1)


def nextn_tensors(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterable[tuple[str, torch.Tensor]]:
    """The ``mtp.0.*`` tensors under the core's names."""
    of_core = ("e_proj.", "h_proj.", "enorm", "hnorm", "norm.", "hc_head_")
    for name, tensor in weights:
        name = name.removeprefix("model.")
        if not name.startswith(NEXTN_PREFIX):
            continue
        name = name.removeprefix(NEXTN_PREFIX)
        if name.startswith(of_core):
            yield name.replace("norm.weight", "norm"), tensor
        else:
            yield f"layer.{name}", tensor
