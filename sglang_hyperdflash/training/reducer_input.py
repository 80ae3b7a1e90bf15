"""What a drafter's reducer reads of a target's states, by the config's ``source``."""

from __future__ import annotations

import torch

from sglang_hyperdflash.draft.config import HyperDFlashConfig
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.samples import States


def source_of(config: HyperDFlashConfig, target, states: States) -> torch.Tensor:
    """``[b, S, width]`` of the states.

    Args:
        target: has ``hc_head`` when the source is ``post_hc_head``.

    Raises:
        HyperDFlashConfigError: the states hold other layers than the config asks for.
    """
    if config.source == "pre_hc_head":
        return states.residual
    if config.source == "post_hc_head":
        eps = {"rms_eps": config.rms_norm_eps, "hc_eps": config.hc_eps}
        return target.hc_head.collapse(states.residual, **eps)
    columns = len(config.captured_layers) * config.hidden_size
    if states.layers.shape[-1] != columns:
        raise HyperDFlashConfigError(
            f"the drafter reads layers {list(config.target_layer_ids)} ({columns} columns); these "
            f"states hold {states.layers.shape[-1]} columns of layers. Captures hold none: use "
            "features = cache or online."
        )
    if config.source == "layers":
        return states.layers
    return torch.cat([states.residual, states.layers], -1)
