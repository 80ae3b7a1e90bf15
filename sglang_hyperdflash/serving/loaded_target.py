"""What the worker reads of a target that SGLang has loaded."""

from __future__ import annotations

import torch

from sglang_hyperdflash.draft.hc_head import HcHead


def pre_collapse_residual_width(target_config) -> int | None:
    """``m * d`` of a target config with hyper-connections, or None for one without."""
    hc_mult = getattr(target_config, "hc_mult", None)
    return None if hc_mult is None else int(hc_mult) * int(target_config.hidden_size)


def target_hc_head(model: torch.nn.Module) -> HcHead | None:
    """The ``hc_head`` of a loaded target, or None without one.

    Seam: ``hc_head_fn/base/scale`` on ``model.model`` of SGLang's ``DeepseekV4ForCausalLM``, and of
    the portable target; on ``model.model.hc_head`` of ``HYV4ForCausalLM``, ``fn`` as a linear.
    """
    inner = getattr(model, "model", model)
    head = getattr(inner, "hc_head", None)
    # DeepSeek-V4's own hc_head is a method.
    owner = head if isinstance(head, torch.nn.Module) else inner
    found = [getattr(owner, f"hc_head_{name}", None) for name in ("fn", "base", "scale")]
    found[0] = getattr(found[0], "weight", found[0])
    return HcHead(*found) if all(isinstance(t, torch.Tensor) for t in found) else None
