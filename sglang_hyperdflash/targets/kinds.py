"""The hyper-connection targets of SGLang 0.5.23, and how a drafter's reducer can start on each.

An architecture that is not in :data:`TARGETS` is refused. Source: SGLang's
``models/{deepseek_v4,glm5_next,hunyuan_v4,qwen4_exp}.py``. Nothing here imports SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sglang_hyperdflash import ALGORITHM
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

# The target's own gate; one that approximates it; no gate at all.
GateStart = Literal["exact", "approximate", "fc"]


@dataclass(frozen=True)
class TargetKind:
    """One family of targets.

    Attributes:
        name: the family's name in messages.
        architectures: the names in ``config.json``.
        exposed: whether SGLang passes the residual to a worker; if not,
            :mod:`sglang_hyperdflash.targets.loaded` does.
        gate_start: how the reducer starts.
        statement: how the target collapses its ``m`` paths, in one sentence for the user.
        tensors: checkpoint spellings of ``fn``, ``base`` and ``scale``; ``{last}`` is the last
            layer. Prefixes ``model.`` and ``language_model.`` are optional.
        paths_field: the config's name of ``m``.
        not_served: why no server can use such a drafter, or None.
    """

    name: str
    architectures: tuple[str, ...]
    exposed: bool
    gate_start: GateStart
    statement: str
    tensors: tuple[tuple[str, ...], ...] = ()
    paths_field: str = "hc_mult"
    not_served: str | None = None


DEEPSEEK_V4 = TargetKind(
    name="DeepSeek-V4",
    architectures=("DeepseekV4ForCausalLM", "PortableDeepSeekV4ForCausalLM"),
    exposed=True,  # pre_hc_head [N, m*d], returned as the model's hidden states
    gate_start="exact",
    statement="the gate is the target's hc_head",
    tensors=(
        ("hc_head_fn", "hc_head.hc_fn"),
        ("hc_head_base", "hc_head.hc_base"),
        ("hc_head_scale", "hc_head.hc_scale"),
    ),
)

DEEPSEEK_V41 = TargetKind(
    name="DeepSeek-V4.1",
    architectures=("DeepseekV41ForCausalLM",),
    exposed=True,  # pre_hc_head [N, m*d], returned as the model's hidden states
    gate_start="approximate",
    statement="there is no hc_head; the last layer's hc_ffn gate reads the residual one sub-layer "
    "earlier, so inheriting it is only approximate",
    tensors=(
        ("layers.{last}.hc_ffn_fn", "layers.{last}.ffn_hc.fn"),
        ("layers.{last}.hc_ffn_base", "layers.{last}.ffn_hc.base"),
        ("layers.{last}.hc_ffn_scale", "layers.{last}.ffn_hc.scale"),
    ),
)

HY_V4 = TargetKind(
    name="HY-V4",
    architectures=("HYV4ForCausalLM",),
    exposed=False,  # the input [N, m, d] of model.hc_head, inside the model's forward
    gate_start="exact",
    statement="the gate is the target's hc_head",
    # The names of the checkpoint, of SGLang's and transformers' parameters, and of checkpoints that
    # transformers writes: undoing its renames adds a spurious hc_pre.
    tensors=(
        (
            "hc_head.hc_head_fn",
            "hc_head.hc_head_fn.weight",
            "hc_head.hc_fn",
            "hc_pre.hc_head.hc_head_fn",
        ),
        ("hc_head.hc_head_base", "hc_head.hc_base", "hc_pre.hc_head.hc_head_base"),
        ("hc_head.hc_head_scale", "hc_head.hc_scale", "hc_pre.hc_head.hc_head_scale"),
    ),
)

QWEN4_EXP = TargetKind(
    name="Qwen3.8-Flash-Next",
    architectures=("Qwen4ExpForConditionalGeneration", "Qwen4ExpForCausalLM"),
    exposed=True,  # the streams [N, m*d], returned as the output's hidden_states
    gate_start="fc",
    statement="its gates are element-wise, so a gate per path cannot start from them; the generic "
    "projection is trained from scratch",
    paths_field="hc_count",
    not_served="it exposes its residual, but serving it with a drafter has never been tried",
)

TARGETS = (DEEPSEEK_V4, DEEPSEEK_V41, HY_V4, QWEN4_EXP)
# Hyper-connection targets whose residual no drafter can read, and why.
AVERAGED = {
    "Glm5NextForConditionalGeneration": "GLM-5.3-Flash has residual streams, but its last layer "
    "averages them: it has no hc_head, and SGLang hands out only their mean"
}


def target_kind(config: Mapping[str, Any]) -> TargetKind:
    """Return the entry of :data:`TARGETS` for a target's ``config.json``.

    DeepSeek-V4.1 checkpoints may carry V4's architecture name; their ``model_type`` or
    ``hc_pre_from_prev_sublayer`` differs.

    Raises:
        HyperDFlashConfigError: the config has no architecture, or an unknown one.
    """
    architectures = config.get("architectures") or []
    if not architectures:
        raise HyperDFlashConfigError(
            "the target's config.json lacks architectures. Add the field to the target's "
            "config.json."
        )
    architecture = architectures[0]
    kind = next((kind for kind in TARGETS if architecture in kind.architectures), None)
    if kind is None:
        served = [kind for kind in TARGETS if kind.not_served is None]
        known = ", ".join(name for kind in served for name in kind.architectures)
        reason = AVERAGED.get(architecture, f"the target's config.json names {architecture}")
        raise HyperDFlashConfigError(
            f"{ALGORITHM} needs a target that hands out its hyper-connection residual streams; "
            f"served are {known}. Found: {reason}. Use DFLASH or EAGLE for this model, or add "
            "it to sglang_hyperdflash/targets/kinds.py."
        )
    fields = text_fields(config)
    named_v41 = str(fields.get("model_type")).startswith("deepseek_v41")
    if kind is DEEPSEEK_V4 and (named_v41 or fields.get("hc_pre_from_prev_sublayer")):
        return DEEPSEEK_V41
    return kind


def text_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``config.json`` with a multimodal target's nested ``text_config`` merged into it."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return dict(config)
    outer = {name: config[name] for name in ("architectures", "model_type") if config.get(name)}
    return {**config, **text, **outer}


def check_served_target(config: Mapping[str, Any]) -> TargetKind:
    """Return the entry of a target that is to be served.

    Args:
        config: the target's ``config.json``, or SGLang's ``get_config(...).to_dict()`` of it.

    Raises:
        HyperDFlashConfigError: the target is unknown or cannot be served yet.
    """
    kind = target_kind(config)
    if kind.not_served is not None:
        raise HyperDFlashConfigError(
            f"{ALGORITHM} cannot serve {kind.name} ({config['architectures'][0]}) yet: "
            f"{kind.not_served}. `hyperdflash init` makes a drafter for it; serve the target with "
            "another algorithm or without speculative decoding."
        )
    return kind
