"""A target in this process through transformers, frozen: any size that one machine holds.

:class:`~sglang_hyperdflash.training.target.LocalTarget` is the small portable class in fp32; this
one takes whatever transformers loads, on its devices and in its dtype.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import nn

from sglang_hyperdflash.config import HyperDFlashConfigError


def _keep_mean(means: dict[int, torch.Tensor], i: int):
    """A forward hook that stores the mean over the paths of a layer's output ``[b, S, m, d]``."""

    def keep(_module, _args, output) -> None:
        means[i] = (output[0] if isinstance(output, tuple) else output).mean(-2)

    return keep


class TransformersTarget(nn.Module):
    """A ``*ForCausalLM`` whose ``model.hc_head`` collapses the residual paths (DeepSeek-V4).

    Args:
        name: folder or hub id. dtype, device_map: as transformers takes them.

    Raises:
        HyperDFlashConfigError: the model has no ``hc_head`` to read the residual in front of.
    """

    def __init__(
        self,
        name: str,
        *,
        dtype: torch.dtype = torch.float32,
        device_map: str | dict | None = None,
    ) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device_map)
        self.config = self.model.config
        head = getattr(self.model.model, "hc_head", None)
        if head is None:
            raise HyperDFlashConfigError(
                f"target {name} ({type(self.model).__name__}) has no model.hc_head; its residual "
                "cannot be read in front of the collapse."
            )
        self.hc_head = (head.hc_fn, head.hc_base, head.hc_scale)
        self._residual: torch.Tensor | None = None
        head.register_forward_pre_hook(self._keep)
        self.requires_grad_(False)
        self.eval()

    def _keep(self, _module, args) -> None:
        self._residual = args[0]

    @property
    def embed_tokens(self) -> nn.Embedding:
        """The target's embedding, which the drafter borrows."""
        return self.model.get_input_embeddings()

    @property
    def lm_head(self) -> nn.Linear:
        """The target's LM head, which the drafter borrows."""
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
                hook = self.model.model.layers[i].register_forward_hook(_keep_mean(means, i))
                hooks.callback(hook.remove)
            final = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
        residual, self._residual = self._residual, None
        layers = [means[i].to(final.device) for i in layer_ids]
        none = final.new_zeros(*tokens.shape, 0)
        return final, residual.flatten(2), torch.cat([none, *layers], -1)

    def mean_pooled_state(self, residual: torch.Tensor) -> torch.Tensor:
        """The paper's KL teacher state: the paths' mean through the final norm, ``[..., d]``."""
        paths = residual.unflatten(-1, (self.config.hc_mult, -1))
        return self.model.model.norm(paths.float().mean(-2).to(residual.dtype))
