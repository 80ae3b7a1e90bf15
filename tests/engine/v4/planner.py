"""SGLang's own planner of compressor rings, without a GPU: ``c_plan.cuh`` of the installed wheel.

Its kernels compute with integers only, so the same source compiles for the host, with
``host_cuda.hpp`` in the place of threads, barriers and warp reductions. Left out is the code around
the kernels, which checks tensors and launches; of it, the line that derives ``mtp_pad`` is taken.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import torch

HOST = Path(__file__).with_name("host_cuda.hpp")
# What the launching code gives the kernels on a GPU whose lengths are there, as a verify's are.
CALLS = """
static Prefill0Params p0;
static Prefill1Params p1;

extern "C" int32_t pad_of(int32_t compress_ratio, int32_t ring_size) {{
  const bool is_overlap = (compress_ratio == 4);
  const int32_t window_size = compress_ratio * (is_overlap ? 2 : 1);
  {pad}
  return mtp_pad;
}}

extern "C" void plan_prefill(
    PlanC* c, PlanW* w, const RID_T* rid, const R2T_T* r2t, int64_t stride, const F2S_T* f2s,
    const IDX_T* seq, const IDX_T* extend, uint32_t batch, uint32_t rows, int32_t ratio,
    int32_t page, int32_t ring, bool req_ring) {{
  p0 = {{c, w, seq, extend, batch, rows, ratio, page, pad_of(ratio, ring), req_ring}};
  threads::run(kMaxPrefillBatchSize, [] {{ plan_compress_prefill_kernel0(p0); }});
  p1 = {{c, w, rid, r2t, f2s, stride, rows, rows, rows, rows, rows, page, ring, ratio, req_ring}};
  blockDim.x = 1;
  threadIdx.x = 0;
  for (blockIdx.x = 0; blockIdx.x < rows; ++blockIdx.x) plan_compress_prefill_kernel_1(p1);
}}

extern "C" void plan_decode(
    PlanD* d, const RID_T* rid, const R2T_T* r2t, int64_t stride, const F2S_T* f2s,
    const IDX_T* seq, uint32_t batch, int32_t page, int32_t ring, int32_t ratio, bool req_ring) {{
  const DecodeParams p = {{d, rid, r2t, f2s, seq, stride, batch, page, ring, ratio, req_ring}};
  blockDim.x = 1;
  threadIdx.x = 0;
  for (blockIdx.x = 0; blockIdx.x < batch; ++blockIdx.x) plan_compress_decode_kernel(p);
}}
"""


def _between(text: str, first: str, last: str) -> str:
    return first + text.split(first, 1)[1].split(last, 1)[0]


def source() -> str:
    """A translation unit for the host."""
    root = Path(str(find_spec("sglang").origin)).parent / "kernels/jit"
    plans = (root / "csrc/deepseek_v4/c_plan.cuh").read_text()
    structs = (root / "include/sgl_kernel/deepseek_v4/compress_v2.cuh").read_text()
    name, last = "namespace device::compress", "__global__ void plan_compress_prefill_legacy_kernel"
    pad = re.search(r"const auto mtp_pad = [^;]+;", plans)[0]
    parts = (HOST.read_text(), _between(structs, f"{name} {{", f"}}  // {name}"), "}")
    parts += ("using namespace device::compress;", _between(plans, "using PlanC", last))
    return "\n".join((*parts, CALLS.format(pad=pad)))


class Planner:
    """The compiled planner; arguments are those of ``tests.engine.v4.plans``."""

    def __init__(self, folder: Path, compiler: str) -> None:
        written, library = folder / "planner.cpp", folder / "planner.so"
        written.write_text(source())
        flags = ("-std=c++20", "-O1", "-w", "-shared", "-fPIC")
        subprocess.run([compiler, *flags, written, "-o", library], check=True)
        self.library = ctypes.CDLL(str(library))

    def pad(self, ratio: int, ring: int) -> int:
        """Rows of a block that are kept however few of them are accepted."""
        return self.library.pad_of(ratio, ring)

    def prefill(self, ratio, request, seq, extend, table, windows, page, ring, rows, by_request):
        """Compressions ``[rows, 4]`` and writes ``[rows, 2]`` int32, in no order."""
        c, w = torch.empty(rows, 4, dtype=torch.int32), torch.empty(rows, 2, dtype=torch.int32)
        given = (c, w, request, table, ctypes.c_int64(table.stride(0)), windows, seq, extend)
        numbers = (len(request), rows, ratio, page, ring, ctypes.c_bool(by_request))
        self.library.plan_prefill(*map(_pointer, given), *numbers)
        return c, w

    def decode(self, ratio, request, table, windows, seq, page, ring, by_request):
        """``[batch, 4]`` int32: length, ring row to write, two ring pages to read."""
        d = torch.empty(len(request), 4, dtype=torch.int32)
        given = (d, request, table, ctypes.c_int64(table.stride(0)), windows, seq)
        numbers = (len(request), page, ring, ratio, ctypes.c_bool(by_request))
        self.library.plan_decode(*map(_pointer, given), *numbers)
        return d


def _pointer(value: torch.Tensor | ctypes.c_int64) -> ctypes.c_void_p | ctypes.c_int64:
    return ctypes.c_void_p(value.data_ptr()) if isinstance(value, torch.Tensor) else value
