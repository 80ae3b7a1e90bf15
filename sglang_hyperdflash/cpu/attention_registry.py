"""Register the CPU platform's torch attention backend with SGLang."""

from __future__ import annotations

from sglang_hyperdflash.cpu.activation import ATTENTION_BACKEND


def register_attention() -> None:
    """Seams: the four lists of choices and ``register_attention_backend``."""
    from sglang.srt.arg_groups.choices import (
        add_attention_backend_choices,
        add_deterministic_attention_backend_choices,
        add_draft_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    )

    from sglang_hyperdflash.seams import when_imported

    add_attention_backend_choices([ATTENTION_BACKEND])
    add_draft_attention_backend_choices([ATTENTION_BACKEND])
    add_deterministic_attention_backend_choices([ATTENTION_BACKEND])
    add_radix_supported_deterministic_attention_backend_choices([ATTENTION_BACKEND])
    when_imported("sglang.srt.layers.attention.attention_registry", _register_class)


def _register_class() -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    @register_attention_backend(ATTENTION_BACKEND)
    def create(runner):
        from sglang_hyperdflash.cpu.attention import TorchAttention

        return TorchAttention(runner)
