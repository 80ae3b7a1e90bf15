"""What SGLang's EAGLE worker needs replaced on the CPU platform, and for the portable NextN layer.

EAGLE is a rival here, not our algorithm: it runs SGLang's own worker, drafts and verification.
"""

from __future__ import annotations

from sglang_hyperdflash.reference import eagle_ops

OPS = "sglang.kernels.ops.speculative"
FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory"


class DraftDecodeBackends:
    """The chain's attention backends, one for every draft step but the last."""

    def __init__(self, runner, steps: int) -> None:
        from sglang_hyperdflash.reference.attention import TorchReferenceAttention

        self.attn_backends = [TorchReferenceAttention(runner, ahead=i + 1) for i in range(steps)]

    def init_forward_metadata(self, forward_batch) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


def _is_ours(factory, phase: int) -> bool:
    from sglang.srt.runtime_context import attention_backends

    from sglang_hyperdflash.reference.platform import ATTENTION_BACKEND

    return (factory.draft_attn_backend or attention_backends()[phase]) == ATTENTION_BACKEND


def _stamped(backend):
    from sglang_hyperdflash.reference.platform import ATTENTION_BACKEND

    backend.prefill_attention_backend_str = ATTENTION_BACKEND
    backend.decode_attention_backend_str = ATTENTION_BACKEND
    return backend


def draft_decode_backend(original, self):
    """A chain of torch backends: SGLang's factory knows its own backends only."""
    if not _is_ours(self, 1):
        return original(self)
    if self.speculative_num_steps <= 1:
        return None
    chain = DraftDecodeBackends(self.draft_model_runner, self.speculative_num_steps - 1)
    for backend in chain.attn_backends:
        _stamped(backend)
    return _stamped(chain)


def draft_extend_backend(original, self):
    """The plain torch backend on the draft's pool."""
    if not _is_ours(self, 0):
        return original(self)
    from sglang_hyperdflash.reference.attention import TorchReferenceAttention

    return _stamped(TorchReferenceAttention(self.draft_model_runner))


def portable_residual_width(result, hf_config, hidden_size, hc_mult):
    """EAGLE carries the portable target's whole residual, as it does DeepSeek-V4's."""
    from sglang_hyperdflash.plugin import PORTABLE_NEXTN, PORTABLE_TARGET

    architectures = getattr(hf_config, "architectures", None) or [""]
    if architectures[0] not in (PORTABLE_TARGET, PORTABLE_NEXTN):
        return result
    return hidden_size * hc_mult, hidden_size * hc_mult


def keep_overlap(server_args) -> None:
    """Overlap scheduling works on the reference platform; other methods run with it too."""


def fill_missing_kernels() -> None:
    """Give SGLang the sampled chain verification that it has no kernel for without CUDA.

    Its names are None there. A hook registry REPLACE of None would replace every None in every
    module, so the modules that hold the names are set one by one; in-tree DFLASH then verifies
    sampled requests exactly too.
    """
    from importlib import import_module

    kernels = {
        "tree_speculative_sampling_target_only": eagle_ops.verify_chain_sampled,
        "top_k_renorm_prob": eagle_ops.top_k_renorm,
        "top_p_renorm_prob": eagle_ops.top_p_renorm,
    }
    for name in (
        f"{OPS}.verify_sampling",
        "sglang.kernels.ops.sampling.renorm",
        "sglang.srt.speculative.eagle_utils",
        "sglang.srt.speculative.dflash_utils",
    ):
        module = import_module(name)
        for kernel, function in kernels.items():
            if hasattr(module, kernel) and getattr(module, kernel) is None:
                setattr(module, kernel, function)
    dflash = import_module("sglang.srt.speculative.dflash_utils")
    dflash._DFLASH_SAMPLING_VERIFY_AVAILABLE = True


def eagle_seams() -> tuple:
    """The seams of this file, for :mod:`sglang_hyperdflash.hooks`."""
    from sglang_hyperdflash.hooks import Seam

    def parameters(function) -> tuple[str, ...]:
        return tuple(function.__code__.co_varnames[: function.__code__.co_argcount])

    replaced = {
        f"{OPS}.cache_locs.assign_draft_cache_locs_contiguous_func": (
            eagle_ops.assign_draft_cache_locs
        ),
        f"{OPS}.spec_tree.build_tree_kernel_efficient_func": eagle_ops.build_chain,
        f"{OPS}.spec_tree.verify_tree_greedy_func": eagle_ops.verify_chain_greedy,
        f"{OPS}.eagle.fill_bonus_tokens_func": eagle_ops.fill_bonus_tokens,
        f"{OPS}.gather_spec_extras.gather_spec_extras": eagle_ops.gather_spec_extras,
        "sglang.srt.arg_groups.speculative_hook._disable_overlap_schedule_for_cpu": keep_overlap,
    }
    reason = "EAGLE's helper is a Triton kernel or a CPU-engine operator"
    return (
        *(
            Seam(target, "replace", function, parameters(function), reason, cpu_only=True)
            for target, function in replaced.items()
        ),
        Seam(
            f"{FACTORY}.create_decode_backend",
            "around",
            draft_decode_backend,
            ("self",),
            "SGLang's factory of draft attention knows its own backends only",
            cpu_only=True,
        ),
        Seam(
            f"{FACTORY}.create_draft_extend_backend",
            "around",
            draft_extend_backend,
            ("self",),
            "SGLang's factory of draft attention knows its own backends only",
            cpu_only=True,
        ),
        Seam(
            "sglang.srt.configs.model_config.resolve_spec_hidden_size",
            "after",
            portable_residual_width,
            ("hf_config", "hidden_size", "hc_mult"),
            "EAGLE sizes its buffers by the width that the portable NextN layer reads",
        ),
    )
