"""transformers' own classes of the targets: what ours are compared with, in fp32."""

from contextlib import ExitStack

import torch
from torch import nn

from sglang_hyperdflash.draft.hc_head import HcHead
from sglang_hyperdflash.targets.kinds import TARGETS


def _keep_mean(means: dict[int, torch.Tensor], i: int, m: int):
    """A forward hook: the mean over the paths of a layer's ``[b, S, m, d]`` or ``[b, S, m*d]``."""

    def keep(_module, _args, output) -> None:
        state = output[0] if isinstance(output, tuple) else output
        means[i] = state.flatten(2).unflatten(-1, (m, -1)).mean(-2)

    return keep


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


# What collapses the residual paths in the text models of transformers.
COLLAPSES = ("hc_head", "hyper_connection_mixer")
PATHS = tuple(dict.fromkeys(kind.paths_field for kind in TARGETS))


class TransformersTarget(nn.Module):
    """A frozen model of transformers with one module that collapses the residual paths.

    ``hc_head`` is that module's, or None where it gates in another way.

    Args:
        name: folder or hub id.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = _load(name, dtype=torch.float32)
        head = next(getattr(self.text, name) for name in COLLAPSES if hasattr(self.text, name))
        self.config = self.model.config.get_text_config()
        self.m = next(getattr(self.config, name) for name in PATHS if hasattr(self.config, name))
        own = hasattr(head, "hc_fn")
        self.hc_head = HcHead(head.hc_fn, head.hc_base, head.hc_scale) if own else None
        self._residual: torch.Tensor | None = None
        head.register_forward_pre_hook(self._keep)
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
    def features(
        self, tokens: torch.Tensor, layer_ids: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``LocalTarget.features``. Attention is causal: padding on the right changes no row."""
        tokens = tokens.to(self.embed_tokens.weight.device)
        means: dict[int, torch.Tensor] = {}
        with ExitStack() as hooks:
            for i in layer_ids:
                hook = self.text.layers[i].register_forward_hook(_keep_mean(means, i, self.m))
                hooks.callback(hook.remove)
            final = self.text(input_ids=tokens, use_cache=False).last_hidden_state
        residual, self._residual = self._residual, None
        layers = [means[i].to(final.device) for i in layer_ids]
        none = final.new_zeros(*tokens.shape, 0)
        return final, residual.flatten(2), torch.cat([none, *layers], -1)
