"""What a drafter's reducer reads of a target's states, by the config's ``source``."""

from __future__ import annotations

import torch

from sglang_hyperdflash.draft.config import HyperDFlashConfig
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError


def reducer_source(
    config: HyperDFlashConfig, target, residual: torch.Tensor, layers: torch.Tensor
) -> torch.Tensor:
    """``[b, S, width]`` of the target's states of ``S`` tokens.

    Args:
        target: has ``hc_head`` when the source is ``post_hc_head``.
        residual: ``[b, S, m*d]``, in front of the collapse.
        layers: ``[b, S, n*d]``, the paths' means after ``config.captured_layers``.

    Raises:
        HyperDFlashConfigError: the states hold other layers than the config asks for.
    """
    if config.source == "pre_hc_head":
        return residual
    if config.source == "post_hc_head":
        eps = {"rms_eps": config.rms_norm_eps, "hc_eps": config.hc_eps}
        return target.hc_head.collapse(residual, **eps)
    columns = len(config.captured_layers) * config.hidden_size
    if layers.shape[-1] != columns:
        raise HyperDFlashConfigError(
            f"the drafter reads layers {list(config.target_layer_ids)} ({columns} columns); these "
            f"states hold {layers.shape[-1]} columns of layers. Captures hold none: use "
            "features = cache or online."
        )
    return layers if config.source == "layers" else torch.cat([residual, layers], -1)
