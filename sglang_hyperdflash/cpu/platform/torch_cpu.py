"""An out-of-tree SGLang platform that runs the engine on a CPU with torch alone.

SGLang's own CPU engine needs sgl_kernel's CPU operators. Without them any machine can run and test
the whole speculative framework.
"""

from __future__ import annotations

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_hyperdflash import ALGORITHM
from sglang_hyperdflash.cpu.platform.activation import ATTENTION_BACKEND
from sglang_hyperdflash.cpu.platform.torch_ops import extend_cache_locs

SUPPORTED_ALGORITHMS = (ALGORITHM, "DFLASH", "EAGLE")


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A platform without Triton and graphs, on request only (``platform.activation``)."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_device(self, device_id: int = 0) -> str:
        """Return a string, not a ``torch.device``, because server arguments split it."""
        return "cpu"

    def apply_server_args_defaults(self, server_args) -> None:
        """Replace choices of SGLang's ``--device cpu`` rule that cannot run on this platform.

        AMX's backend needs sgl_kernel's CPU operators; torch_native has no sinks and no verify
        mode. Ranks reduce over gloo; custom all-reduce would warn that its set-up failed.
        """
        if server_args.attention_backend in (None, "intel_amx", "torch_native"):
            server_args.attention_backend = ATTENTION_BACKEND
        server_args.disable_custom_all_reduce = True

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm in SUPPORTED_ALGORITHMS

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return algorithm in SUPPORTED_ALGORITHMS and backend == ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION_BACKEND

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        if kind != "mha":
            return None
        # SGLang resolves the platform while its utils are still being imported.
        from sglang_hyperdflash.cpu.platform.kv_pool import TorchKVPool

        return TorchKVPool

    def get_speculative_cache_locs_fn(self):
        return extend_cache_locs

    def get_torch_profiler_activity_str(self) -> str:
        """Return the name that SGLang's profiler requires of an out-of-tree platform.

        The name ``CPU`` would start a second profiler inside the first.
        """
        return "CPU_PLATFORM"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def init_backend(self) -> None:
        # The overlap scheduler calls record_stream, but CPU tensors have no streams.
        torch.Tensor.record_stream = lambda self, stream: None
        # SGLang compiles small samplers, which on a CPU needs a C++ compiler, takes seconds per
        # shape and gains nothing.
        torch._dynamo.config.disable = True
