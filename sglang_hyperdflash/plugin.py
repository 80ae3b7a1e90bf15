"""Entry point of the ``sglang.srt.plugins`` group: the one place that registers anything."""

from __future__ import annotations

import sys

from sglang_hyperdflash import ALGORITHM, seams
from sglang_hyperdflash.cpu import registration
from sglang_hyperdflash.cpu.platform import activation
from sglang_hyperdflash.cpu.portable import PORTABLE_TARGET, choose_arguments
from sglang_hyperdflash.serving import capture_rows, refusals
from sglang_hyperdflash.serving.draft_kv import size
from sglang_hyperdflash.serving.scheduler import finish, metrics, weight_updates
from sglang_hyperdflash.serving.startup import dflash_seams
from sglang_hyperdflash.serving.verification import prefill
from sglang_hyperdflash.targets import deepseek_v4, loaded
from sglang_hyperdflash.tools.errors import HyperDFlashError

# The modules with hooks on SGLang.
SERVING_SEAMS = seams.declared(dflash_seams, prefill, finish, loaded, deepseek_v4, size,
                               metrics, capture_rows, weight_updates, refusals)  # fmt: skip
CPU_SEAMS = registration.SEAMS
ALL_SEAMS = SERVING_SEAMS + CPU_SEAMS


def _worker_class(server_args) -> type:
    """Worker factory; imports the worker only when the algorithm is used."""
    from sglang_hyperdflash.serving.worker import HyperDFlashWorker

    return HyperDFlashWorker


def _register_algorithm() -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import get_spec

    from sglang_hyperdflash.serving.startup.algorithm import HyperDFlashAlgorithm
    from sglang_hyperdflash.serving.startup.checks import validate_server_args

    if get_spec(ALGORITHM) is None:
        SpeculativeAlgorithm.register(
            ALGORITHM,
            supports_overlap=True,
            validate_server_args=validate_server_args,
            spec_class=HyperDFlashAlgorithm,
        )(_worker_class)


def _register_resolution() -> None:
    """Seams: ``register_resolution_hook``, which would register the same hook twice, and
    ``register_model_override``.
    """
    from sglang.srt.arg_groups.resolution_hooks import _HOOKS, register_resolution_hook

    step = "handle_missing_default_values"
    if deepseek_v4.resolve_early not in _HOOKS.get(step, ()):
        register_resolution_hook(step)(deepseek_v4.resolve_early)

    def add() -> None:
        from sglang.srt.arg_groups.model_override_base import register_model_override

        register_model_override(PORTABLE_TARGET)(choose_arguments)

    seams.when_imported("sglang.srt.arg_groups.model_override_base", add)


def _register_models() -> None:
    """Seam: ``ModelRegistry.models``, filled in every process before a model is built."""

    def add() -> None:
        from sglang.srt.models.registry import ModelRegistry

        from sglang_hyperdflash.cpu.portable.deepseek_v4 import PortableDeepSeekV4ForCausalLM
        from sglang_hyperdflash.serving.drafting.model import HyperDFlashDraftModel

        models = HyperDFlashDraftModel, PortableDeepSeekV4ForCausalLM
        ModelRegistry.models.update({model.__name__: model for model in models})

    seams.when_imported("sglang.srt.models.registry", add)


def _print_refusals_alone() -> None:
    """Print an error of ours that ends the process as its one sentence, without a traceback."""
    print_error = sys.excepthook

    def print_refusal(kind, error, traceback) -> None:
        if isinstance(error, HyperDFlashError):
            print(f"sglang-hyperdflash: error: {error}", file=sys.stderr)
        else:
            print_error(kind, error, traceback)

    sys.excepthook = print_refusal


def load() -> None:
    """Register the algorithm, the models, the hooks and, where it is asked for, the CPU platform.

    SGLang calls this once in every process it starts. The hooks of ``SERVING_SEAMS`` act on
    HYPERDFLASH alone. With ``HYPERDFLASH_CPU=1`` and no accelerator servers of all algorithms run
    on the CPU platform, which sets ``OMP_NUM_THREADS`` and ``OMP_WAIT_POLICY`` unless they are set,
    and installs ``CPU_SEAMS``.
    """
    _print_refusals_alone()
    _register_algorithm()
    _register_resolution()
    _register_models()
    seams.install(SERVING_SEAMS)
    if activation.is_active():
        registration.register()
        seams.install(CPU_SEAMS)
