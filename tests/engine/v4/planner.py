"""SGLang's own planner of the compressors' rings, without a GPU: ``c_plan.cuh`` of its wheel.

A compressor keeps the last rows of a request in a ring: ``(kv, score)`` per token. A plan says, for
every compressed row of a step, which of its rows come from the ring and which from the step itself,
and which rows of the step enter the ring. The kernels compute with integers only, so their source
compiles for the host, with ``host_cuda.hpp`` in the place of threads, barriers and reductions.
"""

import ctypes
import os
import re
import subprocess
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

HOST, CALLS = (Path(__file__).with_name(f"host_{part}.hpp") for part in ("cuda", "planner"))
NO_ROW = -1
# Rows that are kept for a round that is cut short, where a test says so; else SGLang's number.
KEPT: int | None = None


def _between(text: str, first: str, last: str) -> str:
    return first + text.split(first, 1)[1].split(last, 1)[0]


def source() -> str:
    """A translation unit for the host."""
    root = Path(str(find_spec("sglang").origin)).parent / "kernels/jit"
    plans = (root / "csrc/deepseek_v4/c_plan.cuh").read_text()
    structs = (root / "include/sgl_kernel/deepseek_v4/compress_v2.cuh").read_text()
    name, last = "namespace device::compress", "__global__ void plan_compress_prefill_legacy_kernel"
    parts = (HOST.read_text(), _between(structs, f"{name} {{", f"}}  // {name}"), "}")
    parts += ("using namespace device::compress;", _between(plans, "using PlanC", last))
    pad = re.search(r"const auto mtp_pad = ([^;]+);", plans)[1]
    return "\n".join((*parts, f"#define MTP_PAD {pad}", CALLS.read_text()))


@cache
def library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        written, built = Path(folder, "planner.cpp"), Path(folder, "planner.so")
        written.write_text(source())
        flags = ("-std=c++20", "-O1", "-w", "-shared", "-fPIC")
        subprocess.run([os.environ.get("CXX", "g++"), *flags, written, "-o", built], check=True)
        return ctypes.CDLL(str(built))


def _call(name: str, plans: tuple[torch.Tensor, ...], given: tuple, table: int, *numbers) -> None:
    """``given``: tensors; ``table``: a row of the table of requests has so many entries."""
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (*plans, *given)]
    library()[name](*pointers, ctypes.c_int64(table), *map(int, numbers))


def plan_decode(
    compress_ratio, req_pool_indices, req_to_token, full_to_state, seq_lens,
    swa_page_size, ring_size, use_req_ring,
):  # fmt: skip
    """One token a request."""
    from sglang.kernels.ops.attention.dsv4.compress import CompressorDecodePlan

    plan, n = torch.empty(len(seq_lens), 16, dtype=torch.uint8), len(seq_lens)
    tensors = (req_pool_indices.long(), req_to_token, full_to_state, seq_lens.long())
    sizes = (req_to_token.stride(0), n, swa_page_size, ring_size, compress_ratio, use_req_ring)
    _call("plan_decode", (plan,), tensors, *sizes)
    return CompressorDecodePlan(compress_ratio, plan)


def plan_prefill(
    compress_ratio, req_pool_indices, seq_lens, extend_lens, req_to_token, full_to_state,
    swa_page_size, ring_size, num_q_tokens, use_req_ring,
):  # fmt: skip
    """Prefill, and the verified blocks of a round; padded with invalid entries."""
    from sglang.kernels.ops.attention.dsv4.compress import CompressorPrefillPlan

    plans = tuple(torch.empty(num_q_tokens, size, dtype=torch.uint8) for size in (16, 8))
    tensors = (req_pool_indices.long(), req_to_token, full_to_state)
    tensors += (seq_lens.long(), extend_lens.long())
    sizes = (len(seq_lens), swa_page_size, ring_size, compress_ratio, use_req_ring, num_q_tokens)
    kept = library().pad_of(compress_ratio, ring_size) if KEPT is None else KEPT
    _call("plan_prefill", plans, tensors, req_to_token.stride(0), *sizes, kept)
    return CompressorPrefillPlan(compress_ratio, *plans)
