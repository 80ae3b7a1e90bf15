"""The pre-collapse residual and the ``hc_head`` of a target that SGLang has loaded.

SGLang's DeepSeek-V4 returns ``(hidden states, pre_hc_head)`` from its body and passes both to the
logits processor; all runners (eager, decode graph, prefill graph) support that form. HY-V4 returns
only the collapsed state. This module gives a loaded HY-V4 the same form: its body returns the pair,
and its logits processor splits it.

Only a model that HYPERDFLASH or a capture loads is changed, before any graph is captured.
"""

from __future__ import annotations

import functools
import os

import torch
from torch import nn

from sglang_hyperdflash import is_ours
from sglang_hyperdflash.draft.hc_head import HcHead
from sglang_hyperdflash.seams import after

# An environment variable that ``hyperdflash capture`` sets for its engine.
CAPTURE_FOLDER = "HYPERDFLASH_CAPTURE_FOLDER"
EXPOSED = ("HYV4ForCausalLM",)


@after("sglang.srt.model_executor.model_runner:ModelRunner.load_model", "bf6781e45efd")
def expose_residual(result, runner) -> None:
    """Make a freshly loaded target of HYPERDFLASH or of a capture return its residual.

    Not if the drafter's source is captured layers, which the residual would replace.
    """
    wanted = is_ours(runner.spec_algorithm) or CAPTURE_FOLDER in os.environ
    if type(runner.model).__name__ not in EXPOSED or not wanted or runner.is_draft_worker:
        return
    if not runner.spec_aux_config.dflash_use_aux_hidden_state:
        expose_hy_v4(runner.model)


def expose_hy_v4(model: nn.Module) -> None:
    """Return the pair from ``model.model.forward`` and split it for ``model.logits_processor``.

    Seams: ``HYV4Model.forward`` ends in a call of its module ``hc_head`` with ``[N, m, d]``, where
    the residual is read; ``HYV4ForCausalLM`` has no ``get_input_embeddings``, which DFLASH workers
    call. Graph runners call the body's ``forward`` itself, and replace it while they replay, so a
    module hook on the body would not run.
    """
    body, residuals = model.model, []
    original = body.forward

    @functools.wraps(original)
    def forward(*args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        residuals.clear()  # a failed pass leaves one
        return original(*args, **kwargs), residuals.pop()

    def split(module, args, kwargs):
        if not isinstance(args[1], tuple):
            return None
        hidden, residual = args[1]
        return (args[0], hidden, *args[2:]), {**kwargs, "hidden_states_before_norm": residual}

    body.hc_head.register_forward_pre_hook(lambda _, args: residuals.append(args[0].flatten(1)))
    body.forward = forward
    model.logits_processor.register_forward_pre_hook(split, with_kwargs=True)
    model.get_input_embeddings = lambda: body.embed_tokens


def target_hc_head(model: nn.Module) -> HcHead | None:
    """Return the ``hc_head`` of a loaded target, or None without one.

    Seam: ``hc_head_fn/base/scale`` on ``model.model`` of SGLang's ``DeepseekV4ForCausalLM`` and of
    the portable target; on ``model.model.hc_head`` of ``HYV4ForCausalLM``, with ``fn`` a linear.
    """
    inner = getattr(model, "model", model)
    head = getattr(inner, "hc_head", None)
    # DeepSeek-V4's own hc_head is a method.
    owner = head if isinstance(head, nn.Module) else inner
    tensors = [getattr(owner, f"hc_head_{name}", None) for name in ("fn", "base", "scale")]
    tensors[0] = getattr(tensors[0], "weight", tensors[0])
    return HcHead(*tensors) if all(isinstance(t, torch.Tensor) for t in tensors) else None
