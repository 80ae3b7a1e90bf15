"""What ``plugin.py`` registers with SGLang where the CPU platform is active."""

from __future__ import annotations

import os
import sys

from sglang_hyperdflash.cpu.platform import activation, engine_seams, memory, torch_ops
from sglang_hyperdflash.seams import declared, when_imported

SEAMS = declared(engine_seams, torch_ops, memory)


def register() -> None:
    """Threads and the attention backend; not the seams.

    Seams: the four lists of choices and ``register_attention_backend``.
    """
    from sglang.srt.arg_groups import choices

    # For later processes. Waiting threads that spin make a server several times slower on a busy
    # machine, and a model that is small enough for this platform gains nothing from more threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    backend = [activation.ATTENTION_BACKEND]
    choices.add_attention_backend_choices(backend)
    choices.add_draft_attention_backend_choices(backend)
    choices.add_deterministic_attention_backend_choices(backend)
    choices.add_radix_supported_deterministic_attention_backend_choices(backend)
    when_imported("sglang.srt.layers.attention.attention_registry", _register_attention)
    when_imported(BATCHES, _no_pinned_memory)
    when_imported(GATHERS, _copy_rows_with_torch)


BATCHES = "sglang.srt.model_executor.forward_batch_info"
GATHERS = "sglang.srt.layers.dp_attention"


def _no_pinned_memory() -> None:
    """Seam: ``forward_batch_info._is_cpu``, read where ranks share their numbers of tokens."""
    sys.modules[BATCHES]._is_cpu = True


def _copy_rows_with_torch() -> None:
    """Seam: ``dp_attention.memcpy_func``, between a rank's rows and all ranks'."""
    sys.modules[GATHERS].memcpy_func = sys.modules[GATHERS].memcpy_cpu


def _register_attention() -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    @register_attention_backend(activation.ATTENTION_BACKEND)
    def create(runner):
        from sglang_hyperdflash.cpu.platform.attention import TorchAttention

        return TorchAttention(runner)
