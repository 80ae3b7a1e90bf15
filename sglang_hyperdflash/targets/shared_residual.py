"""One buffer for what the drafter reads of every captured batch of the target.

SGLang keeps each graph's outputs, and ``[rows, m * d]`` of every captured size of every width would
be 1 GiB on DeepSeek-V4-Flash; layers' means likewise. The last step of each graph copies it into
the one buffer instead; the graphs' own tensors then share their pool's memory.
The drafter's K/V are written from it before the next replay, on the same stream.
"""

from __future__ import annotations

from typing import Any

import torch


def being_captured(tensor: torch.Tensor) -> bool:
    """Whether a CUDA graph is being captured: memory taken now would be the graph's own."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class SharedResidual:
    """A hook of the target's decode graphs; seam: ``ModelRunner.capture_tail_hooks``."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def __call__(self, graphs: Any, output: Any, forward_batch: Any, num_tokens: int) -> None:
        """Put the residual ``[rows, m * d]`` of a forward pass that is captured into the buffer.

        SGLang warms a shape up before it captures it, the largest first: the buffer is made there.
        A capture that finds none large enough keeps its own tensor.
        """
        residual = getattr(output, "hidden_states", None)
        if residual is None:
            return
        if not self._holds(residual):
            if being_captured(residual):
                return
            self._buffer = residual.new_empty(residual.shape)
        output.hidden_states = self._buffer[: len(residual)].copy_(residual)

    def _holds(self, residual: torch.Tensor) -> bool:
        buffer = self._buffer
        if buffer is None or buffer.dtype != residual.dtype:
            return False
        return buffer.shape[1:] == residual.shape[1:] and len(buffer) >= len(residual)
