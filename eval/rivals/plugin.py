"""Entry point of the ``sglang.srt.plugins`` group in ``installed``."""

from __future__ import annotations

from eval.rivals import eagle_ops, eagle_seams
from sglang_hyperdflash.cpu.platform import activation
from sglang_hyperdflash.seams import declared, install, when_imported
from sglang_hyperdflash.serving.startup import dflash_seams

SEAMS = declared(eagle_seams, eagle_ops)


def load() -> None:
    """Register kernels, the NextN model and the hooks where the CPU platform is active.

    Seam: ``ModelRegistry.models``.
    """
    if activation.is_active():
        eagle_seams.fill_missing_kernels()
        when_imported("sglang.srt.models.registry", _register_nextn)
        dflash_seams.own_dtype.add("DFLASH")
        install(SEAMS)


def _register_nextn() -> None:
    from sglang.srt.models.registry import ModelRegistry

    from eval.rivals.nextn import PortableDeepSeekV4ForCausalLMNextN

    ModelRegistry.models[eagle_seams.PORTABLE_NEXTN] = PortableDeepSeekV4ForCausalLMNextN
