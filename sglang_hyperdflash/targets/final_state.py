"""From a target's pre-collapse residual to the state that its LM head reads, the training teacher.

Stores hold residuals only; the trainer computes the state on its device, for the rows it needs.
"""

from __future__ import annotations

import torch
from torch import nn

from sglang_hyperdflash.draft.hc_head import HcHead
from sglang_hyperdflash.targets.files import TargetFacts, TargetFiles
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError


class FinalState(nn.Module):
    """The target's collapse and its final norm, frozen.

    Args:
        gate: the gate of the collapse.
        norm: ``[d]``, the weight of the final norm.
    """

    def __init__(self, gate: HcHead, norm: torch.Tensor, *, rms_eps: float, hc_eps: float) -> None:
        super().__init__()
        self.fn, self.base, self.scale = (nn.Buffer(part.detach()) for part in gate)
        self.norm = nn.Buffer(norm.detach())
        self.rms_eps, self.hc_eps = rms_eps, hc_eps

    @classmethod
    def of(cls, files: TargetFiles) -> FinalState:
        """Read the collapse and the norm of a checkpoint.

        DeepSeek-V4.1 gates with the residual before its last layer's FFN; that gate on the final
        residual is an approximation.

        Raises:
            HyperDFlashConfigError: the target collapses with neither gate, or its checkpoint is
                incomplete.
        """
        facts, kind = TargetFacts.from_config(files.config()), files.kind
        m, d = facts.hc_mult, facts.hidden_size
        gate = files.hc_head(m, d)
        if gate is None and kind.gate_start == "approximate":
            gate = files.lagged_gate(m, d, facts.num_hidden_layers)
        if gate is None:
            raise HyperDFlashConfigError(
                f"target {files.name} ({kind.name}): expected a gate per residual path, from which "
                f"the state of its LM head follows, found none ({kind.statement}). Train with "
                'features = "online" on a target that this process can load.'
            )
        return cls(gate, files.tensor("norm"), rms_eps=facts.rms_norm_eps, hc_eps=facts.hc_eps)

    @torch.no_grad()
    def forward(self, residual: torch.Tensor) -> torch.Tensor:
        """Return the state ``[..., d]`` fp32 of ``residual [..., m*d]``, whatever autocast says."""
        gate = HcHead(self.fn, self.base, self.scale)
        with torch.autocast(residual.device.type, enabled=False):
            y = gate.collapse(residual.float(), rms_eps=self.rms_eps, hc_eps=self.hc_eps)
        return nn.functional.rms_norm(y, self.norm.shape, self.norm.float(), self.rms_eps)
