"""The paper's KL teacher: the mean of the residual paths, through the target's final norm."""

from __future__ import annotations

from collections.abc import Callable

import torch


def mean_pooled_state(
    residual: torch.Tensor, m: int, norm: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """``[..., m*d]`` to ``[..., d]``; the mean is taken in fp32.

    Args:
        norm: the target's final norm, from the mean to the state.
    """
    return norm(residual.unflatten(-1, (m, -1)).float().mean(-2))
