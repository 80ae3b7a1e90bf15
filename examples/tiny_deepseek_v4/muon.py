"""Muon: momentum whose matrices are made orthogonal before the step (Jordan et al., 2024).

Stacks of matrices (a layer's experts) are taken matrix by matrix, which ``torch.optim.Muon``
does not do.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

# The quintic of the reference implementation; five rounds bring singular values near one.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ROUNDS = 5


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """``[..., m, n]`` to about ``U V^T`` of each matrix's singular value decomposition."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).bfloat16()  # as in the reference: directions, not sizes
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """For parameters of two or three dimensions; ``lr`` is a step's spectral norm.

    Matrices of one shape are stacked, so that small ones share a multiplication. With
    ``torch.distributed`` up, gradients must be equal in all processes; each makes its part of the
    stacks orthogonal and sends it to the others.
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
            stacks = [self._directions(parameters, group) for parameters in shapes.values()]
            for parameters, steps in zip(shapes.values(), shared(stacks), strict=True):
                rows, columns = parameters[0].shape[-2:]
                scale = max(1.0, rows / columns) ** 0.5
                for parameter, step in zip(parameters, steps, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(step, alpha=-group["lr"] * scale)

    def _directions(self, parameters: list[torch.nn.Parameter], group: dict) -> torch.Tensor:
        """Nesterov's momentum of parameters of one shape, ``[number, *shape]``."""
        directions = []
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter)
            state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
            directions.append(parameter.grad.lerp(state["momentum"], group["momentum"]))
        return torch.stack(directions)


def shared(stacks: list[torch.Tensor]) -> list[torch.Tensor]:
    """:func:`orthogonal` of every stack, the work shared by all processes."""
    if not dist.is_initialized():
        return [orthogonal(stack) for stack in stacks]
    world, rank = dist.get_world_size(), dist.get_rank()
    parts = [stack.tensor_split(world) for stack in stacks]  # parts[shape][process]
    own = torch.cat([orthogonal(part[rank]).flatten() for part in parts])
    results = [torch.empty_like(stack) for stack in stacks]
    for source in range(world):
        sizes = [part[source].numel() for part in parts]
        flat = own if source == rank else torch.empty(sum(sizes))
        dist.broadcast(flat, source)
        for result, piece in zip(results, flat.split(sizes), strict=True):
            target = result.tensor_split(world)[source]
            target.copy_(piece.view_as(target))
    return results
