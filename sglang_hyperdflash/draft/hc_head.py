"""A target's ``hc_head``: the gate over its residual paths, which a drafter inherits."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_hyperdflash.tools.checksum import bytes_hash
from triton_ops import hc_gate_reduce_reference


class HcHead(NamedTuple):
    """``fn [m, m*d]``, ``base [m]``, ``scale [1]``: the gates of eq. 1 without any norm."""

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor

    def collapse(self, residual: torch.Tensor, *, rms_eps: float, hc_eps: float) -> torch.Tensor:
        """``[..., m*d]`` to ``[..., d]`` in the residual's dtype, fp32 inside."""
        return hc_gate_reduce_reference(residual, *self, None, None, rms_eps=rms_eps, hc_eps=hc_eps)

    def fingerprint(self) -> str:
        """A short hash of the three tensors as fp32 bytes.

        The value does not depend on the dtype that a checkpoint is served in, as long as its
        ``hc_head`` stays in fp32, as DeepSeek-V4 does.
        """
        return tensors_fingerprint(*self)


def tensors_fingerprint(*tensors: torch.Tensor) -> str:
    """A short hash of tensors as fp32 bytes, in order; shapes are not part of it."""
    plain = (t.detach().to("cpu", torch.float32).contiguous() for t in tensors)
    return bytes_hash(t.numpy().tobytes() for t in plain)
