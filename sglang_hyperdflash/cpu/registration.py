"""What ``plugin.py`` registers with SGLang where the CPU platform is active."""

from __future__ import annotations

from sglang_hyperdflash.cpu.platform import (
    activation,
    dflash_seams,
    memory,
    parallel_seams,
    seeded_seams,
    torch_ops,
)
from sglang_hyperdflash.cpu.portable import PORTABLE_NEXTN
from sglang_hyperdflash.cpu.rivals import eagle_ops, eagle_seams
from sglang_hyperdflash.seams import declared, when_imported

SEAMS = declared(
    dflash_seams, torch_ops, eagle_seams, eagle_ops, parallel_seams, seeded_seams, memory
)


def register() -> None:
    """Threads, the attention backend, EAGLE's kernels and the NextN model; not the seams.

    Seams: the four lists of choices, ``register_attention_backend`` and ``ModelRegistry.models``.
    """
    from sglang.srt.arg_groups import choices

    activation.limit_threads()
    backend = [activation.ATTENTION_BACKEND]
    choices.add_attention_backend_choices(backend)
    choices.add_draft_attention_backend_choices(backend)
    choices.add_deterministic_attention_backend_choices(backend)
    choices.add_radix_supported_deterministic_attention_backend_choices(backend)
    when_imported("sglang.srt.layers.attention.attention_registry", _register_attention)
    when_imported("sglang.srt.models.registry", _register_nextn)
    eagle_seams.fill_missing_kernels()


def _register_attention() -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    @register_attention_backend(activation.ATTENTION_BACKEND)
    def create(runner):
        from sglang_hyperdflash.cpu.platform.attention import TorchAttention

        return TorchAttention(runner)


def _register_nextn() -> None:
    from sglang.srt.models.registry import ModelRegistry

    from sglang_hyperdflash.cpu.rivals.nextn import PortableDeepSeekV4ForCausalLMNextN

    ModelRegistry.models[PORTABLE_NEXTN] = PortableDeepSeekV4ForCausalLMNextN
