"""transformers' own classes of the targets: what ours are compared with, in fp32."""

from contextlib import ExitStack

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from sglang_hyperdflash.draft.hc_head import HcHead
from sglang_hyperdflash.targets.kinds import TARGETS


def _keep_mean(means: dict[int, torch.Tensor], i: int, m: int):
    """A forward hook: the mean over the paths of a layer's ``[b, S, m, d]`` or ``[b, S, m*d]``."""

    def keep(_module, _args, output) -> None:
        state = output[0] if isinstance(output, tuple) else output
        means[i] = state.flatten(2).unflatten(-1, (m, -1)).mean(-2)

    return keep


class TransformersTarget(nn.Module):
    """A frozen causal LM of transformers, whose ``hc_head`` collapses the residual paths."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.text, self.config = self.model.model, self.model.config.get_text_config()
        paths = (kind.paths_field for kind in TARGETS)
        self.m = next(getattr(self.config, name) for name in paths if hasattr(self.config, name))
        head = self.text.hc_head
        self.hc_head = HcHead(head.hc_fn, head.hc_base, head.hc_scale)
        self._residual: torch.Tensor | None = None
        head.register_forward_pre_hook(self._keep)
        self.requires_grad_(False)
        self.eval()

    def _keep(self, _module, args) -> None:
        self._residual = args[0]

    @torch.no_grad()
    def features(
        self, tokens: torch.Tensor, layer_ids: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``LocalTarget.features``. Attention is causal: padding on the right changes no row."""
        means: dict[int, torch.Tensor] = {}
        with ExitStack() as hooks:
            for i in layer_ids:
                hook = self.text.layers[i].register_forward_hook(_keep_mean(means, i, self.m))
                hooks.callback(hook.remove)
            final = self.text(input_ids=tokens, use_cache=False).last_hidden_state
        residual, self._residual = self._residual, None
        none = final.new_zeros(*tokens.shape, 0)
        return final, residual.flatten(2), torch.cat([none, *(means[i] for i in layer_ids)], -1)
