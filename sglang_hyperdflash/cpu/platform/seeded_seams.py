"""Torch replacements on the CPU platform for SGLang's kernels of deterministic inference."""

from __future__ import annotations

import torch

from sglang_hyperdflash.seams import replace
from triton_ops.gumbel import hash32


@replace("sglang.kernels.ops.sampling.murmur_hash:murmur_hash32", "b3fb6ecfaff0")
def torch_murmur_hash(seed, positions, col_indices):
    """Compute ``murmur_hash32``, ``[n, m]`` int64; SGLang's CPU form needs sgl_kernel."""
    signed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed
    return hash32(signed, positions, col_indices)


@replace(
    "sglang.srt.model_executor.model_runner:ModelRunner.maybe_enable_batch_invariant_mode",
    "50c417a13a23",
)
def keep_matrix_products(self):
    """Keep torch's products; SGLang's batch-invariant ones are Triton kernels.

    On a CPU fp32 results may differ in the last bits between batch sizes.
    """


@replace("sglang.srt.models.dflash:_radix_topk", "36f02c6d2f2b")
def torch_topk(scores, k):
    """Return the values and ids of each row's k largest; FlashInfer's kernel needs CUDA."""
    return torch.topk(scores, k, dim=-1)
