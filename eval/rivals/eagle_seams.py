"""What SGLang's EAGLE worker needs replaced on the CPU platform, and for the portable NextN layer.

EAGLE is a method to compare with: it runs SGLang's own worker, drafts and verification.
"""

from __future__ import annotations

import sys
from types import ModuleType

from eval.rivals import eagle_ops
from sglang_hyperdflash.cpu.platform.activation import ATTENTION_BACKEND
from sglang_hyperdflash.cpu.portable import PORTABLE_TARGET
from sglang_hyperdflash.seams import after, around, replace, when_imported

PORTABLE_NEXTN = f"{PORTABLE_TARGET}NextN"
OPS = "sglang.kernels.ops.speculative"
DFLASH_UTILS = "sglang.srt.speculative.dflash_utils"


class DraftDecodeBackends:
    """The chain's attention backends, one for every draft step but the last."""

    def __init__(self, runner, steps: int) -> None:
        from sglang_hyperdflash.cpu.platform.attention import TorchAttention

        self.attn_backends = [TorchAttention(runner, ahead=i + 1) for i in range(steps)]

    def init_forward_metadata(self, forward_batch) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


def _takes_torch_attention(factory, phase: int) -> bool:
    from sglang.srt.runtime_context import attention_backends

    return (factory.draft_attn_backend or attention_backends()[phase]) == ATTENTION_BACKEND


def _stamped(backend):
    backend.prefill_attention_backend_str = ATTENTION_BACKEND
    backend.decode_attention_backend_str = ATTENTION_BACKEND
    return backend


@around(
    "sglang.srt.speculative.draft_utils:DraftBackendFactory.create_decode_backend", "b3cbdb7aa4df"
)
def draft_decode_backend(original, self):
    """A chain of torch backends: SGLang's factory knows its own backends only."""
    if not _takes_torch_attention(self, 1):
        return original(self)
    if self.speculative_num_steps <= 1:
        return None
    chain = DraftDecodeBackends(self.draft_model_runner, self.speculative_num_steps - 1)
    for backend in chain.attn_backends:
        _stamped(backend)
    return _stamped(chain)


@around(
    "sglang.srt.speculative.draft_utils:DraftBackendFactory.create_draft_extend_backend",
    "fbf02eb137b2",
)
def draft_extend_backend(original, self):
    """The plain torch backend on the draft's pool."""
    if not _takes_torch_attention(self, 0):
        return original(self)
    from sglang_hyperdflash.cpu.platform.attention import TorchAttention

    return _stamped(TorchAttention(self.draft_model_runner))


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


def fill_missing_kernels() -> None:
    """Give SGLang the sampled chain verification that it has no kernel for without CUDA.

    SGLang's names are None there. A registry hook that replaces None would replace every None in
    every module, so the modules with these names are set one by one. In-tree DFLASH then verifies
    sampled requests exactly, too.
    """
    for name in (
        f"{OPS}.verify_sampling",
        "sglang.kernels.ops.sampling.renorm",
        "sglang.srt.speculative.eagle_utils",
        DFLASH_UTILS,
    ):
        when_imported(name, lambda name=name: _fill(sys.modules[name]))


def _fill(module: ModuleType) -> None:
    kernels = {
        "tree_speculative_sampling_target_only": eagle_ops.verify_chain_sampled,
        "top_k_renorm_prob": eagle_ops.top_k_renorm,
        "top_p_renorm_prob": eagle_ops.top_p_renorm,
    }
    for kernel, function in kernels.items():
        if hasattr(module, kernel) and getattr(module, kernel) is None:
            setattr(module, kernel, function)
    if module.__name__ == DFLASH_UTILS:
        module._DFLASH_SAMPLING_VERIFY_AVAILABLE = True
