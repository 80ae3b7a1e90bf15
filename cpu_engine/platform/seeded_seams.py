"""Deterministic inference on the CPU platform: SGLang's hash and matrix kernels cannot run."""

from __future__ import annotations

import torch

from sglang_hyperdflash.seams import Seam
from triton_ops.gumbel import hash32


def torch_murmur_hash(seed, positions, col_indices):
    """``murmur_hash32``, ``[n, m]`` int64, in torch: SGLang's CPU form needs sgl_kernel."""
    signed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed
    return hash32(signed, positions, col_indices)


def keep_matrix_products(self):
    """Keep torch's own products: SGLang's batch-invariant ones are Triton kernels.

    A CPU's fp32 results may still differ in the last bits between batch sizes.
    """


def torch_topk(scores, k):
    """``(values, ids)`` of each row's k largest: FlashInfer's kernel takes CUDA tensors only."""
    return torch.topk(scores, k, dim=-1)


SEAMS = (
    Seam(
        "sglang.kernels.ops.sampling.murmur_hash:murmur_hash32",
        "replace",
        torch_murmur_hash,
        ("seed", "positions", "col_indices"),
        "e64f1438fc8f",
        "the hash of seeded sampling needs sgl_kernel on a CPU",
    ),
    Seam(
        "sglang.srt.model_executor.model_runner:ModelRunner.maybe_enable_batch_invariant_mode",
        "replace",
        keep_matrix_products,
        ("self",),
        "aed9bf16c7b5",
        "batch-invariant matrix products are Triton kernels",
    ),
    Seam(
        "sglang.srt.models.dflash:_radix_topk",
        "replace",
        torch_topk,
        ("scores", "k"),
        "557d40442b7a",
        "the top-k of draft candidates is FlashInfer's where that is installed",
    ),
)
