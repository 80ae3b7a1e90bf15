"""Entry point of the ``sglang.srt.plugins`` group: the one place that registers anything."""

from __future__ import annotations

from sglang_hyperdflash import ALGORITHM
from sglang_hyperdflash.config import DRAFT_ARCHITECTURE

# Spelled so that SGLang's tests for "DeepseekV4" in an architecture's name do not match: they
# would select V4's own chat encoding, cache layout and start-up rules.
PORTABLE_TARGET = "PortableDeepSeekV4ForCausalLM"
PORTABLE_NEXTN = "PortableDeepSeekV4ForCausalLMNextN"


def _worker_class(server_args) -> type:
    """Worker factory; imports the worker only when the algorithm is really used."""
    from sglang_hyperdflash.hooks import check_seams
    from sglang_hyperdflash.worker import HyperDFlashWorker

    check_seams()
    return HyperDFlashWorker


def _register_algorithm() -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import get_spec

    from sglang_hyperdflash.algorithm import HyperDFlashAlgorithm
    from sglang_hyperdflash.server_args import validate_server_args

    if get_spec(ALGORITHM) is None:
        SpeculativeAlgorithm.register(
            ALGORITHM,
            supports_overlap=True,
            validate_server_args=validate_server_args,
            spec_class=HyperDFlashAlgorithm,
        )(_worker_class)


def _register_resolution() -> None:
    """Seam: ``register_resolution_hook``, which would register the same hook twice."""
    from sglang.srt.arg_groups.resolution_hooks import _HOOKS, register_resolution_hook

    from sglang_hyperdflash.deepseek_v4 import resolve_early

    step = "handle_missing_default_values"
    if resolve_early not in _HOOKS.get(step, ()):
        register_resolution_hook(step)(resolve_early)


def _register_models() -> None:
    """Seam: ``ModelRegistry.models``, filled in every process before a model is built."""
    from sglang.srt.models.registry import ModelRegistry

    from sglang_hyperdflash.draft_model import HyperDFlashDraftModel
    from sglang_hyperdflash.reference.deepseek_v4 import PortableDeepSeekV4ForCausalLM
    from sglang_hyperdflash.reference.nextn import PortableDeepSeekV4ForCausalLMNextN

    ModelRegistry.models[DRAFT_ARCHITECTURE] = HyperDFlashDraftModel
    ModelRegistry.models[PORTABLE_TARGET] = PortableDeepSeekV4ForCausalLM
    ModelRegistry.models[PORTABLE_NEXTN] = PortableDeepSeekV4ForCausalLMNextN


def _register_reference_attention() -> None:
    from sglang.srt.arg_groups.choices import (
        add_attention_backend_choices,
        add_deterministic_attention_backend_choices,
        add_draft_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    )
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from sglang_hyperdflash.reference.attention import TorchReferenceAttention
    from sglang_hyperdflash.reference.eagle_seams import fill_missing_kernels
    from sglang_hyperdflash.reference.platform import ATTENTION_BACKEND

    fill_missing_kernels()
    add_attention_backend_choices([ATTENTION_BACKEND])
    add_draft_attention_backend_choices([ATTENTION_BACKEND])
    add_deterministic_attention_backend_choices([ATTENTION_BACKEND])
    add_radix_supported_deterministic_attention_backend_choices([ATTENTION_BACKEND])
    register_attention_backend(ATTENTION_BACKEND)(TorchReferenceAttention)


def load() -> None:
    """Register the algorithm, the models, the hooks and, without CUDA, the CPU attention.

    SGLang calls this once in every process it starts; it changes nothing for a server that
    runs another algorithm.
    """
    from sglang_hyperdflash import hooks
    from sglang_hyperdflash.reference.activation import is_active

    _register_algorithm()
    _register_resolution()
    if is_active():
        _register_reference_attention()
    _register_models()
    hooks.install()
