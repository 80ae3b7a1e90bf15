"""The reducer from the pre-collapse residual to the drafter's context feature (paper, eq. 1).

Serving and training share these torch modules, and so the checkpoint names ``reducer.fn``,
``reducer.base``, ``reducer.scale`` and ``reducer.path_norm`` (or ``fc.weight``).
"""

from __future__ import annotations

import torch
from torch import nn

from sglang_hyperdflash.draft.config import HyperDFlashConfig
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from triton_ops import hc_gate_reduce
from triton_ops.hc_gate import rms_norm


def reducer_source(
    config: HyperDFlashConfig, residual: torch.Tensor, layers: torch.Tensor
) -> torch.Tensor:
    """Return the states that a reducer reads of ``S`` tokens, ``[b, S, config.source_width]``.

    Args:
        residual: ``[b, S, m*d]``, the residual before the collapse.
        layers: ``[b, S, n*d]``, the means of the paths after ``config.captured_layers``.

    Raises:
        HyperDFlashConfigError: the states hold other layers than the config asks for.
    """
    if config.source == "pre_hc_head":
        return residual
    if layers.shape[-1] != config.source_width:
        raise HyperDFlashConfigError(
            f"the drafter reads layers {list(config.target_layer_ids)} ({config.source_width} "
            f"columns); these states hold {layers.shape[-1]} columns of layers. Captures hold "
            "none: use features = cache or online."
        )
    return layers


class HCGateReducer(nn.Module):
    """Per-path sigmoid gates inherited from the target's ``hc_head``, with a per-path RMSNorm.

    The parameters are fp32 whatever the model's dtype.
    """

    def __init__(self, m: int, d: int, *, rms_eps: float, hc_eps: float) -> None:
        super().__init__()
        self.rms_eps, self.hc_eps = rms_eps, hc_eps
        self.fn = nn.Parameter(torch.zeros(m, m * d, dtype=torch.float32))
        self.base = nn.Parameter(torch.zeros(m, dtype=torch.float32))
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float32))
        self.path_norm = nn.Parameter(torch.ones(m, d, dtype=torch.float32))

    @torch.no_grad()
    def inherit(self, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor) -> None:
        """Start from the target's ``hc_head``; raise ``ValueError`` when a shape differs."""
        for name, source in (("fn", fn), ("base", base), ("scale", scale)):
            parameter = getattr(self, name)
            if source.shape != parameter.shape:
                raise ValueError(
                    f"cannot inherit hc_head {name}: expected {tuple(parameter.shape)}, "
                    f"found {tuple(source.shape)}"
                )
            parameter.copy_(source)

    def forward(self, hidden: torch.Tensor, hidden_norm: torch.Tensor | None) -> torch.Tensor:
        """Reduce ``hidden [N, m*d]`` to ``[N, d]`` in its dtype, in fp32 inside."""
        gate = self.fn, self.base, self.scale, self.path_norm
        return hc_gate_reduce(hidden, *gate, hidden_norm, **self.epsilons)

    @property
    def epsilons(self) -> dict[str, float]:
        """The keyword arguments of :func:`hc_gate_reduce`."""
        return {"rms_eps": self.rms_eps, "hc_eps": self.hc_eps}


class FcReducer(nn.Module):
    """A learned projection from the source to d columns, followed by the hidden norm.

    Args:
        columns: the source's columns, ``m * d`` for the pre-collapse residual.
        d: the hidden size.
    """

    def __init__(self, columns: int, d: int, *, rms_eps: float) -> None:
        super().__init__()
        self.rms_eps = rms_eps
        self.weight = nn.Parameter(torch.empty(d, columns))
        nn.init.normal_(self.weight, std=columns**-0.5)

    def forward(self, hidden: torch.Tensor, hidden_norm: torch.Tensor | None) -> torch.Tensor:
        """Project ``hidden [N, columns]`` to ``[N, d]`` in its dtype."""
        y = nn.functional.linear(hidden.to(self.weight.dtype), self.weight)
        if hidden_norm is None:
            return y.to(hidden.dtype)
        return rms_norm(y.float(), hidden_norm, self.rms_eps).to(hidden.dtype)


def build_reducer(config: HyperDFlashConfig) -> tuple[str, nn.Module]:
    """Return the checkpoint prefix (``reducer`` or ``fc``) and the reducer that a config names."""
    m, d, eps = config.hc_mult, config.hidden_size, config.rms_norm_eps
    if config.reducer == "fc":
        return "fc", FcReducer(config.source_width, d, rms_eps=eps)
    return "reducer", HCGateReducer(m, d, rms_eps=eps, hc_eps=config.hc_eps)
