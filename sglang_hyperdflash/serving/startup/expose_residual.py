"""Hand out the pre-collapse residual of targets that collapse it inside their own forward.

SGLang's DeepSeek-V4 returns ``(hidden states, pre_hc_head)`` from its body and passes both to the
logits processor; every runner (eager, decode graph, prefill graph) knows that form. HY-V4 and
GLM-5-next return the collapsed state alone. Here their loaded models get V4's form: the body
returns the pair, and the logits processor takes it apart where the model itself did not.

Only the instance that a server of ours loaded is touched, before any graph is captured.
"""

from __future__ import annotations

import functools
import inspect
import os

import torch
from torch import nn

from sglang_hyperdflash import is_ours
from sglang_hyperdflash.seams import Seam
from sglang_hyperdflash.serving.scheduler.capture_rows import CAPTURE_FOLDER
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError, SeamError


class Residual:
    """The residual ``[N, m*d]`` of the forward that is under way; taken once."""

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None

    def take(self) -> torch.Tensor | None:
        value, self.value = self.value, None
        return value


def expose_residual(result, runner) -> None:
    """Make a freshly loaded target hand out its residual, if it does not by itself.

    Seam: ``ModelRunner.load_model``, for a target of HYPERDFLASH or of a capture; not for a drafter
    whose source is captured layers, which the residual would replace.
    """
    wanted = is_ours(runner.spec_algorithm) or CAPTURE_FOLDER in os.environ
    expose = EXPOSED.get(type(runner.model).__name__)
    if expose is None or not wanted or runner.is_draft_worker:
        return
    if not runner.spec_aux_config.dflash_use_aux_hidden_state:
        expose(runner.model)


def expose_hy_v4(model: nn.Module) -> None:
    """Read the residual where ``hc_head`` does.

    Seams: ``HYV4Model.forward`` ends in a call of its module ``hc_head`` with ``[N, m, d]``;
    ``HYV4ForCausalLM`` has no ``get_input_embeddings``, which DFLASH workers ask for.
    """
    residual = Residual()
    head = part(model.model, "hc_head")

    def read(module, args):
        residual.value = args[0].flatten(1)

    head.register_forward_pre_hook(read)
    return_residual(model, residual)
    model.get_input_embeddings = lambda: model.model.embed_tokens


def expose_glm5_next(model: nn.Module) -> None:
    """Let the paths leave the last layer, and average them in front of the final norm.

    Seams: the last layer's ``ffn_boundary.declaration.update.state`` is an ``MHCState`` whose
    ``is_last_layer`` makes it contract; ``Glm5NextModel.forward`` calls its module ``norm`` on what
    the last layer returned, except in an idle step.

    Raises:
        HyperDFlashConfigError: the model was built without paths, or in several stages.
    """
    from sglang.kernels.ops.layernorm.mhc import hc_contract

    residual, body = Residual(), model.model
    config = model.config
    if not config.mhc or body.pp_group.world_size != 1:
        raise HyperDFlashConfigError(
            f"GLM-5-next: expected mhc true in its config.json and --pp-size 1, so that one "
            f"pipeline stage has the whole residual; found mhc {config.mhc} (a missing field "
            f"counts as false) and {body.pp_group.world_size} stages."
        )
    state = part(body.layers[-1], "ffn_boundary", "declaration", "update", "state")
    if part(state, "is_last_layer") is not True:
        raise seam_error(f"{type(state).__name__}.is_last_layer", "True on the last layer", False)
    state.is_last_layer = False
    m = int(state.hc_mult)

    def contract(module, args):
        residual.value = args[0]
        return (hc_contract(args[0], m), *args[1:])

    part(body, "norm").register_forward_pre_hook(contract)
    return_residual(model, residual, idle=lambda paths: hc_contract(paths, m))


EXPOSED = {
    "HYV4ForCausalLM": expose_hy_v4,
    "Glm5NextForConditionalGeneration": expose_glm5_next,
}


def return_residual(model: nn.Module, residual: Residual, idle=None) -> None:
    """Return the pair from ``model.model.forward`` and split it for ``model.logits_processor``.

    Graph runners call ``forward`` of the body itself, and replace it while they replay; a module
    hook there would be passed by.

    Args:
        idle: from what an idle step returns, its residual, to its state; None when the body reads
            the residual in idle steps too.
    """
    body = model.model
    original = body.forward

    @functools.wraps(original)
    def forward(*args, **kwargs):
        residual.value = None
        hidden = original(*args, **kwargs)
        found = residual.take()
        if found is not None:
            return hidden, found
        if idle is not None:
            given = inspect.signature(original).bind(*args, **kwargs).arguments
            if given["forward_batch"].forward_mode.is_idle():
                return idle(hidden), hidden
        raise RuntimeError(f"{type(body).__name__} returned without reading its residual.")

    body.forward = forward

    def split(module, args, kwargs):
        if not isinstance(args[1], tuple):
            return None
        hidden, paths = args[1]
        return (args[0], hidden, *args[2:]), {**kwargs, "hidden_states_before_norm": paths}

    processor = part(model, "logits_processor")
    known = inspect.signature(processor.forward).parameters
    if (
        list(known)[:2] != ["input_ids", "hidden_states"]
        or "hidden_states_before_norm" not in known
    ):
        raise seam_error(
            f"{type(processor).__name__}.forward",
            "input_ids, hidden_states, ..., hidden_states_before_norm",
            tuple(known),
        )
    processor.register_forward_pre_hook(split, with_kwargs=True)


def part(owner: object, *names: str):
    """An attribute of an attribute ...; an error that names what SGLang no longer has."""
    for name in names:
        if not hasattr(owner, name):
            raise seam_error(f"{type(owner).__name__}.{name}", "an attribute", "none")
        owner = getattr(owner, name)
    return owner


def seam_error(seam: str, expected: object, found: object) -> SeamError:
    """The error of a model that is not built as its exposure relies on."""
    return SeamError(f"SGLang seam {seam} changed: expected {expected}, found {found}.")


SEAMS = (
    Seam(
        "sglang.srt.model_executor.model_runner:ModelRunner.load_model",
        "after",
        expose_residual,
        ("self",),
        "1a4eb8820ed6",
        "HY-V4 and GLM-5-next collapse their residual before they return",
    ),
)
