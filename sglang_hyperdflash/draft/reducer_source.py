"""What a drafter's reducer reads of a target's states, by the config's ``source``."""

from __future__ import annotations

import torch

from sglang_hyperdflash.draft.config import HyperDFlashConfig
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError


def reducer_source(
    config: HyperDFlashConfig, residual: torch.Tensor, layers: torch.Tensor
) -> torch.Tensor:
    """``[b, S, width]`` of the target's states of ``S`` tokens.

    Args:
        residual: ``[b, S, m*d]``, before the collapse.
        layers: ``[b, S, n*d]``, the paths' means after ``config.captured_layers``.

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
