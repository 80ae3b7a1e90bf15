"""Manifold-constrained hyper-connections (mHC) of DeepSeek-V4 in plain torch.

A token's residual is ``m`` streams, ``H [N, m, d]``. Around every block: ``pre`` gates collapse
the streams to the block's input, ``post`` gates expand its output, and a doubly stochastic
``comb`` (Sinkhorn-Knopp) mixes the streams. Formulas: DeepSeek-V4 paper, section 2.2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn


@functools.cache
def compiled() -> Callable:
    """Compile :func:`sinkhorn` for a float32 array ``[N, m, m]`` on a CPU, in place."""
    import numba

    signature = "void(float32[:, :, ::1], int64, float32)"
    return numba.njit(signature, error_model="numpy")(_normalise)


def _normalise(comb, iterations, eps) -> None:
    n, m, _ = comb.shape
    for row in range(n):
        for iteration in range(iterations):
            if iteration > 0:
                for i in range(m):
                    total = eps
                    for j in range(m):
                        total += comb[row, i, j]
                    for j in range(m):
                        comb[row, i, j] /= total
            for j in range(m):
                total = eps
                for i in range(m):
                    total += comb[row, i, j]
                for i in range(m):
                    comb[row, i, j] /= total


def sinkhorn(comb: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Normalise positive ``comb [N, m, m]`` to doubly stochastic, columns last.

    On a CPU without gradients it is one compiled loop: a hundred torch operations on four by four
    numbers would take half the time of a decode step.
    """
    gradients = comb.requires_grad and torch.is_grad_enabled()
    if comb.is_cpu and comb.dtype == torch.float32 and not gradients:
        comb = comb.detach().clone(memory_format=torch.contiguous_format)
        compiled()(comb.numpy(), iterations, eps)
        return comb
    comb = comb / comb.sum(-2, keepdim=True).add_(eps)
    for _ in range(iterations - 1):
        comb = comb / comb.sum(-1, keepdim=True).add_(eps)
        comb = comb / comb.sum(-2, keepdim=True).add_(eps)
    return comb


class HyperConnection(nn.Module):
    """The gates of one block: how it reads the streams, and how it writes to them."""

    def __init__(self, config) -> None:
        super().__init__()
        self.m = config.hc_mult
        self.iterations = config.hc_sinkhorn_iters
        self.hc_eps, self.rms_eps = config.hc_eps, config.rms_norm_eps
        size = (2 + self.m) * self.m
        self.fn = nn.Parameter(torch.empty(size, self.m * config.hidden_size).float())
        self.base = nn.Parameter(torch.empty(size).float())
        self.scale = nn.Parameter(torch.empty(3).float())

    def collapse(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the block input ``[N, d]``, ``post [N, m]`` and ``comb [N, m, m]``."""
        m, flat = self.m, streams.flatten(1).float()
        inverse_rms = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.rms_eps)
        logits = (flat @ self.fn.float().T) * inverse_rms  # of the normed streams
        pre = torch.sigmoid(logits[:, :m] * self.scale[0] + self.base[:m]) + self.hc_eps
        post = 2 * torch.sigmoid(logits[:, m : 2 * m] * self.scale[1] + self.base[m : 2 * m])
        comb = (logits[:, 2 * m :] * self.scale[2] + self.base[2 * m :]).view(-1, m, m)
        comb = sinkhorn(comb.softmax(-1) + self.hc_eps, self.iterations, self.hc_eps)
        collapsed = torch.bmm(pre.unsqueeze(1), streams.float()).squeeze(1)
        return collapsed.to(streams.dtype), post, comb

    @staticmethod
    def expand(
        streams: torch.Tensor, output: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
    ) -> torch.Tensor:
        """Return the next streams ``post * output + comb^T H``, ``[N, m, d]``, in their dtype."""
        dtype = streams.dtype
        mixed = torch.bmm(comb.to(dtype).transpose(1, 2), streams)
        return mixed + post.to(dtype).unsqueeze(-1) * output.unsqueeze(1)
