"""The plugin of SGLang: hooks and kernels for EAGLE on the CPU platform, and the NextN model.

EAGLE runs SGLang's own worker, drafts and verification; only what needs a GPU is replaced. ``load``
is the entry point of the ``sglang.srt.plugins`` group in ``installed``.
"""

import sys
from functools import partial

from eval.rivals import eagle_ops
from sglang_hyperdflash.cpu.platform import activation
from sglang_hyperdflash.cpu.platform.activation import ATTENTION_BACKEND
from sglang_hyperdflash.cpu.portable import PORTABLE_TARGET
from sglang_hyperdflash.seams import after, around, declared, install, replace, when_imported
from sglang_hyperdflash.serving.startup import dflash_seams

PORTABLE_NEXTN = f"{PORTABLE_TARGET}NextN"
FACTORY = "sglang.srt.speculative.draft_utils:DraftBackendFactory"
DFLASH_UTILS = "sglang.srt.speculative.dflash_utils"
SAMPLING_MODULES = (
    f"{eagle_ops.OPS}.verify_sampling",
    "sglang.kernels.ops.sampling.renorm",
    "sglang.srt.speculative.eagle_utils",
    DFLASH_UTILS,
)
KERNELS = {
    "tree_speculative_sampling_target_only": eagle_ops.verify_chain_sampled,
    "top_k_renorm_prob": eagle_ops.top_k_renorm,
    "top_p_renorm_prob": eagle_ops.top_p_renorm,
}


def _takes_torch_attention(factory, phase: int) -> bool:
    from sglang.srt.runtime_context import attention_backends

    return (factory.draft_attn_backend or attention_backends()[phase]) == ATTENTION_BACKEND


def _torch_attention(runner, ahead: int = 0):
    """A torch backend with its name, which SGLang reads from it."""
    from sglang_hyperdflash.cpu.platform.attention import TorchAttention

    backend = TorchAttention(runner, ahead)
    backend.prefill_attention_backend_str = ATTENTION_BACKEND
    backend.decode_attention_backend_str = ATTENTION_BACKEND
    return backend


class DraftDecodeBackends:
    """The chain's attention backends, one for every draft step but the last."""

    prefill_attention_backend_str = decode_attention_backend_str = ATTENTION_BACKEND

    def __init__(self, runner, steps: int) -> None:
        self.attn_backends = [_torch_attention(runner, ahead=i + 1) for i in range(steps)]

    def init_forward_metadata(self, forward_batch) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


@around(f"{FACTORY}.create_decode_backend", "b3cbdb7aa4df")
def draft_decode_backend(original, self):
    """A chain of torch backends: SGLang's factory knows its own backends only."""
    if not _takes_torch_attention(self, 1):
        return original(self)
    if self.speculative_num_steps <= 1:
        return None
    return DraftDecodeBackends(self.draft_model_runner, self.speculative_num_steps - 1)


@around(f"{FACTORY}.create_draft_extend_backend", "fbf02eb137b2")
def draft_extend_backend(original, self):
    """The plain torch backend on the draft's pool."""
    if not _takes_torch_attention(self, 0):
        return original(self)
    return _torch_attention(self.draft_model_runner)


@after("sglang.srt.configs.model_config:resolve_spec_hidden_size", "954351f24688")
def portable_residual_width(result, hf_config, hidden_size, hc_mult):
    """EAGLE carries the portable target's whole residual, as it does DeepSeek-V4's."""
    architectures = getattr(hf_config, "architectures", None) or [""]
    if architectures[0] not in (PORTABLE_TARGET, PORTABLE_NEXTN):
        return result
    return hidden_size * hc_mult, hidden_size * hc_mult


@replace("sglang.srt.arg_groups.speculative_hook:_disable_overlap_schedule_for_cpu", "5c279ce84a76")
def keep_overlap(server_args) -> None:
    """Keep overlap scheduling: it works on this platform, and other methods run with it too."""


def _fill_missing_kernels(name: str) -> None:
    """Give a module of SGLang the sampled chain verification that it has only for CUDA.

    SGLang's names are None there. A registry hook that replaces None would replace every None in
    every module, so the modules with these names are set one by one. In-tree DFLASH then verifies
    sampled requests exactly, too.
    """
    module = sys.modules[name]
    for kernel, function in KERNELS.items():
        if getattr(module, kernel, function) is None:
            setattr(module, kernel, function)
    if name == DFLASH_UTILS:
        module._DFLASH_SAMPLING_VERIFY_AVAILABLE = True


def _register_nextn() -> None:
    from sglang.srt.models.registry import ModelRegistry

    from eval.rivals.nextn import PortableDeepSeekV4ForCausalLMNextN

    ModelRegistry.models[PORTABLE_NEXTN] = PortableDeepSeekV4ForCausalLMNextN


SEAMS = declared(sys.modules[__name__], eagle_ops)


def load() -> None:
    """Register kernels, the NextN model and the hooks where the CPU platform is active.

    Seam: ``ModelRegistry.models``.
    """
    if activation.is_active():
        for name in SAMPLING_MODULES:
            when_imported(name, partial(_fill_missing_kernels, name))
        when_imported("sglang.srt.models.registry", _register_nextn)
        dflash_seams.own_dtype.add("DFLASH")
        install(SEAMS)
