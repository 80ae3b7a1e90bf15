"""One buffer for the target states that the drafter reads, shared by all captured batches.

SGLang keeps the outputs of each graph; ``[rows, m * d]`` for every captured size of every width
would take 1 GiB on DeepSeek-V4-Flash, and the means of layers as well. The last step of each graph
copies them into the one buffer instead, so the graphs' own tensors share their pool's memory. The
drafter's K/V are written from the buffer before the next replay, on the same stream.
"""

from __future__ import annotations

from typing import Any

import torch


def being_captured(tensor: torch.Tensor) -> bool:
    """Whether a CUDA graph is being captured, which would own memory that is allocated now."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class SharedResidual:
    """A hook on the target's decode graphs; seam: ``ModelRunner.capture_tail_hooks``."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def __call__(self, graphs: Any, output: Any, forward_batch: Any, num_tokens: int) -> None:
        """Copy the residual ``[rows, m * d]`` of a captured forward pass into the buffer.

        SGLang warms up every shape before its capture, the largest first; that allocates the
        buffer. A capture for which the buffer is too small keeps its own tensor.
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
