"""Muon: momentum whose matrices are made orthogonal before the step (Jordan et al., 2024).

``torch.optim.Muon`` takes single matrices; this one takes stacks of them (a layer's experts) too.
"""

from __future__ import annotations

import torch

# The quintic of the reference implementation; five rounds bring singular values close to one.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ROUNDS = 5


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """``[..., m, n]`` to about ``U V^T`` of each matrix's singular value decomposition."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).bfloat16()  # as the reference: only directions matter
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """For parameters of two or three dimensions; ``lr`` is a step's spectral norm.

    Parameters of one shape are stacked, so that small matrices share a multiplication.
    """

    def __init__(
        self, parameters, lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.0
    ):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            shapes: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in shapes.items():
                steps = orthogonal(torch.stack([self._direction(p, group) for p in parameters]))
                scale = group["lr"] * max(1.0, shape[-2] / shape[-1]) ** 0.5
                for parameter, step in zip(parameters, steps, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(step, alpha=-scale)

    def _direction(self, parameter: torch.nn.Parameter, group: dict) -> torch.Tensor:
        """Nesterov's momentum."""
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
        return parameter.grad.lerp(state["momentum"], group["momentum"])
