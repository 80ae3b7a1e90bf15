"""Hand out the pre-collapse residual of HY-V4, which collapses it inside its own forward.

SGLang's DeepSeek-V4 returns ``(hidden states, pre_hc_head)`` from its body and passes both to the
logits processor; all runners (eager, decode graph, prefill graph) support that form. HY-V4 returns
the collapsed state alone. Here a loaded model gets V4's form: the body returns the pair, and the
logits processor takes it apart where the model itself did not.

Only the instance that a server of ours loaded is touched, before any graph is captured.
"""

from __future__ import annotations

import functools
import inspect
import os

import torch
from torch import nn

from sglang_hyperdflash import is_ours
from sglang_hyperdflash.seams import after
from sglang_hyperdflash.serving.scheduler.capture_rows import CAPTURE_FOLDER
from sglang_hyperdflash.tools.errors import SeamError

EXPOSED = ("HYV4ForCausalLM",)


@after("sglang.srt.model_executor.model_runner:ModelRunner.load_model", "1a4eb8820ed6")
def expose_residual(result, runner) -> None:
    """Make a freshly loaded target hand out its residual, if it does not by itself.

    For a target of HYPERDFLASH or of a capture; not where the drafter's source is captured layers,
    which the residual would replace.
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
    ask for. Graph runners call ``forward`` of the body itself, and replace it while they replay; a
    module hook there would not run.

    Raises:
        SeamError: SGLang's model is not built like this.
    """
    body, read = model.model, []
    original = body.forward
    if not hasattr(body, "hc_head"):
        raise seam_error(f"{type(body).__name__}.hc_head", "a module", "none")

    @functools.wraps(original)
    def forward(*args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        read.clear()
        hidden = original(*args, **kwargs)
        if not read:
            raise RuntimeError(f"{type(body).__name__} returned without reading its residual.")
        return hidden, read.pop()

    def split(module, args, kwargs):
        if not isinstance(args[1], tuple):
            return None
        hidden, paths = args[1]
        return (args[0], hidden, *args[2:]), {**kwargs, "hidden_states_before_norm": paths}

    processor = model.logits_processor
    known = tuple(inspect.signature(processor.forward).parameters)
    if known[:2] != ("input_ids", "hidden_states") or "hidden_states_before_norm" not in known:
        expected = "input_ids, hidden_states, ..., hidden_states_before_norm"
        raise seam_error(f"{type(processor).__name__}.forward", expected, known)
    body.hc_head.register_forward_pre_hook(lambda _, args: read.append(args[0].flatten(1)))
    body.forward = forward
    processor.register_forward_pre_hook(split, with_kwargs=True)
    model.get_input_embeddings = lambda: body.embed_tokens


def seam_error(seam: str, expected: object, found: object) -> SeamError:
    """The error of a model that is not built as its exposure relies on."""
    return SeamError(f"SGLang seam {seam} changed: expected {expected}, found {found}.")
