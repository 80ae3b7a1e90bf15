"""A target in this process through transformers, frozen: any size that one machine holds.

:class:`~sglang_hyperdflash.training.local_target.LocalTarget` is the small portable class in
fp32; this one takes any model that transformers loads, on its devices and in its dtype.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import nn

from sglang_hyperdflash.draft.hc_head import HcHead
from sglang_hyperdflash.targets.kinds import TARGETS
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError


def _keep_mean(means: dict[int, torch.Tensor], i: int, m: int):
    """A forward hook: the mean over the paths of a layer's ``[b, S, m, d]`` or ``[b, S, m*d]``."""

    def keep(_module, _args, output) -> None:
        state = output[0] if isinstance(output, tuple) else output
        means[i] = state.flatten(2).unflatten(-1, (m, -1)).mean(-2)

    return keep


def _to_weight(module: nn.Linear, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """A forward pre-hook: a drafter's states are fp32, whatever the target's dtype."""
    return tuple(x.to(module.weight.dtype) for x in args)


def _load(name: str, **options) -> nn.Module:
    """The model class of a causal LM or, if the target has only a multimodal class, of that."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        return AutoModelForCausalLM.from_pretrained(name, **options)
    except ValueError as error:
        # transformers raises this before it reads a weight; there is no public way to ask first.
        if "Unrecognized configuration class" not in str(error):
            raise
        return AutoModelForImageTextToText.from_pretrained(name, **options)


class TransformersTarget(nn.Module):
    """A model of transformers with one module that collapses the residual paths (``targets.py``).

    ``hc_head`` is that module's, or None where it gates in another way.

    Args:
        name: folder or hub id. dtype, device_map: as transformers takes them.

    Raises:
        HyperDFlashConfigError: the model has no such module, whose input is the residual.
    """

    def __init__(
        self,
        name: str,
        *,
        dtype: torch.dtype = torch.float32,
        device_map: str | dict | None = None,
    ) -> None:
        super().__init__()
        self.model = _load(name, dtype=dtype, device_map=device_map)
        # Any kind with this module will do: they share the names of module and paths.
        kind = next((kind for kind in TARGETS if hasattr(self.text, kind.collapse_module)), None)
        if kind is None:
            modules = dict.fromkeys(f"model.{kind.collapse_module}" for kind in TARGETS)
            raise HyperDFlashConfigError(
                f"target {name} ({type(self.model).__name__}) has no {' or '.join(modules)}; its "
                "residual cannot be read before the collapse."
            )
        head = getattr(self.text, kind.collapse_module)
        self.config = self.model.config.get_text_config()
        self.m = int(getattr(self.config, kind.paths_field))
        own = hasattr(head, "hc_fn")
        self.hc_head = HcHead(head.hc_fn, head.hc_base, head.hc_scale) if own else None
        self._residual: torch.Tensor | None = None
        head.register_forward_pre_hook(self._keep)
        self.lm_head.register_forward_pre_hook(_to_weight)
        self.requires_grad_(False)
        self.eval()

    @property
    def text(self) -> nn.Module:
        """The text model; a multimodal target holds it under ``language_model``."""
        return getattr(self.model.model, "language_model", self.model.model)

    def _keep(self, _module, args) -> None:
        self._residual = args[0]

    @property
    def embed_tokens(self) -> nn.Embedding:
        """The target's embedding, shared with the drafter."""
        return self.model.get_input_embeddings()

    @property
    def lm_head(self) -> nn.Linear:
        """The target's LM head, shared with the drafter."""
        return self.model.get_output_embeddings()

    @torch.no_grad()
    def features(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[b, S]`` right-padded tokens to final-norm ``[b, S, d]`` and residual ``[b, S, m*d]``.

        Attention is causal, so padding on the right changes no real row.
        """
        return self.features_with_layers(tokens, ())[:2]

    @torch.no_grad()
    def features_with_layers(
        self, tokens: torch.Tensor, layer_ids: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """:meth:`features`, and the paths' means after layers, ``[b, S, len(ids) * d]``."""
        tokens = tokens.to(self.embed_tokens.weight.device)
        means: dict[int, torch.Tensor] = {}
        with ExitStack() as hooks:
            for i in layer_ids:
                hook = self.text.layers[i].register_forward_hook(_keep_mean(means, i, self.m))
                hooks.callback(hook.remove)
            # transformers keeps norms and gates in fp32, and passes their output to bf16 matrices.
            dtype = self.lm_head.weight.dtype
            with torch.autocast(tokens.device.type, dtype, enabled=dtype != torch.float32):
                final = self.text(input_ids=tokens, use_cache=False).last_hidden_state
        residual, self._residual = self._residual, None
        layers = [means[i].to(final.device) for i in layer_ids]
        none = final.new_zeros(*tokens.shape, 0)
        return final, residual.flatten(2), torch.cat([none, *layers], -1)
