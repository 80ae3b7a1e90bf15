"""A target's ``hc_head``: the gate over its residual paths, which a drafter inherits."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_hyperdflash.tools.checksum import bytes_hash
from triton_ops import hc_gate_reduce_reference


class HcHead(NamedTuple):
    """The parameters of the target's gate: eq. 1 of the paper without any norm."""

    fn: torch.Tensor  # [m, m*d]
    base: torch.Tensor  # [m]
    scale: torch.Tensor  # [1]

    def collapse(self, residual: torch.Tensor, *, rms_eps: float, hc_eps: float) -> torch.Tensor:
        """Collapse ``residual [..., m*d]`` to ``[..., d]`` in its dtype, in fp32 inside."""
        return hc_gate_reduce_reference(residual, *self, None, None, rms_eps=rms_eps, hc_eps=hc_eps)

    def fingerprint(self) -> str:
        """Return a short hash of the three tensors as fp32 bytes.

        It does not depend on the dtype that a checkpoint is served in as long as ``hc_head`` stays
        in fp32, as it does in DeepSeek-V4.
        """
        return tensors_fingerprint(*self)


def tensors_fingerprint(*tensors: torch.Tensor) -> str:
    """Return a short hash of tensors as fp32 bytes, in order and without their shapes."""
    plain = (t.detach().to("cpu", torch.float32).contiguous() for t in tensors)
    return bytes_hash(t.numpy().tobytes() for t in plain)
