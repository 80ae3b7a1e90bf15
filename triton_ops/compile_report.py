"""What the kernels cost on a Hopper GPU, compiled ahead of time: no GPU is needed.

``python -m triton_ops.compile_report`` prints registers, spills and shared memory of every kernel
for the DeepSeek-V4 widths; ``--json`` prints one JSON list instead. Spilled bytes come from ptxas,
the assembler that Triton itself uses and ships.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from triton_ops import gumbel_kernel, hc_gate_backward_kernels, hc_gate_row, hc_gate_tiles
from triton_ops.hc_gate import GateArguments

CAPABILITY = 90
_POINTER = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
_SCALAR = {"rms_eps": "fp32", "hc_eps": "fp32", "x_stride": "i64"}
_GUMBEL_TYPES = {
    "weights_ptr": "*fp32",
    "rows_ptr": "*i64",
    "seeds_ptr": "*i64",
    "positions_ptr": "*i64",
    "best_ptr": "*fp64",
    "ids_ptr": "*i32",
    "out_ptr": "*i64",
    "stride": "i64",
}
VOCABULARY = 129_280
_WEIGHTS = ("fn_ptr", "base_ptr", "scale_ptr", "path_ptr")


@dataclass(frozen=True)
class Usage:
    """Resources of one compiled kernel; bytes per thread for spills, per CTA for shared memory."""

    kernel: str
    m: int
    d: int
    dtype: str
    threads: int
    registers: int
    spilled_bytes: int
    shared_bytes: int


def meta_arguments(m: int, d: int, dtype: torch.dtype) -> GateArguments:
    """Arguments of the given sizes without storage; both norms present, weights as served."""

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    hidden, hidden_norm = new(1024, m * d, dtype=dtype), new(d, dtype=dtype)
    return GateArguments(hidden, new(m, m * d), new(m), new(1), new(m, d), hidden_norm, 1e-6, 1e-6)


def _type_of(name: str, dtype: torch.dtype) -> str:
    if name in _SCALAR:
        return _SCALAR[name]
    if not name.endswith("_ptr"):
        return "i32"
    if name in ("arrived_ptr", "ready_ptr"):
        return "*i32"
    activations = ("x_ptr", "out_ptr", "grad_ptr", "dx_ptr", "norm_ptr")
    return _POINTER[dtype] if name in activations else "*fp32"


def _spills(ptx: str) -> int:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [str(tool), "-v", f"--gpu-name=sm_{CAPABILITY}a", str(source), "-o", "/dev/null"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    words = log.replace(",", " ").split()
    found = [int(words[i - 2]) for i, word in enumerate(words) if word == "spill"]
    if not found:
        raise RuntimeError(f"ptxas reported no spill counts: {log}")
    return sum(found)


def compile_kernel(
    kernel: Any,
    constants: dict[str, Any],
    dtype: torch.dtype,
    options: dict[str, int],
    known: dict[str, str] | None = None,
) -> Any:
    """Compile one ``@triton.jit`` function for ``sm_90`` as serving on CUDA would specialise it.

    Args:
        known: types of arguments that the reducer does not have.
    """
    names = kernel.arg_names
    types = {n: (known or {}).get(n) or _type_of(n, dtype) for n in names}
    types |= dict.fromkeys(constants, "constexpr")
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if n.endswith("_ptr") or n == "x_stride"
    }
    source = ASTSource(kernel, signature=types, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)


def kernels(m: int, d: int, dtype: torch.dtype) -> list[tuple[str, Any, dict, dict]]:
    """``(name, kernel, constants, options)`` of every kernel at one size."""
    a = meta_arguments(m, d, dtype)
    shape = hc_gate_tiles.TileShape.for_sizes(m, dtype)
    tile_options = {"num_warps": shape.num_warps, "num_stages": shape.num_stages}
    back = hc_gate_backward_kernels
    warps = {"num_warps": back.WARPS}
    return [
        ("row", hc_gate_row._row_kernel, hc_gate_row.constants(a, False), {"num_warps": 16}),
        (
            "tile",
            hc_gate_tiles._tile_kernel,
            hc_gate_tiles.constants(a, shape, False),
            tile_options,
        ),
        ("token gradients", back._token_kernel, back.token_constants(a), warps),
        ("column gradients", back._column_kernel, back.column_constants(a, True), warps),
        ("gate gradients", back._gate_kernel, back.gate_constants(a), {"num_warps": 4}),
    ]


def gumbel_report() -> list[Usage]:
    """Resources of the seeded draw's two kernels; ``d`` is the vocabulary."""
    share, best = gumbel_kernel._share_kernel, gumbel_kernel._best_kernel
    cases = (
        ("gumbel share", share, {"HAS_ROWS": False, "BLOCK": gumbel_kernel.BLOCK}),
        ("gumbel best", best, {"PARTS": gumbel_kernel.MAX_SHARES}),
    )
    rows = []
    for name, kernel, constants in cases:
        options = {"num_warps": gumbel_kernel.WARPS if kernel is share else 1}
        compiled = compile_kernel(kernel, constants, torch.float32, options, _GUMBEL_TYPES)
        rows.append(
            Usage(
                name,
                1,
                VOCABULARY,
                "float32",
                32 * options["num_warps"],
                _registers(compiled.asm["cubin"]),
                _spills(compiled.asm["ptx"]),
                compiled.metadata.shared,
            )
        )
    return rows


def report(m: int, d: int, dtype: torch.dtype) -> list[Usage]:
    """Resources of every kernel at one size."""
    rows = []
    for name, kernel, constants, options in kernels(m, d, dtype):
        compiled = compile_kernel(kernel, constants, dtype, options)
        registers = _registers(compiled.asm["cubin"])
        shared = compiled.metadata.shared
        spilled = _spills(compiled.asm["ptx"])
        kind = str(dtype).removeprefix("torch.")
        threads = 32 * options["num_warps"]
        rows.append(Usage(name, m, d, kind, threads, registers, spilled, shared))
    return rows


def _registers(cubin: bytes) -> int:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(text.split("REG:")[1].split()[0])


def main(argv: list[str] | None = None) -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON list on stdout")
    parser.add_argument("--sizes", nargs="+", default=["4x4096", "4x7168"], metavar="MxD")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    options = parser.parse_args(argv)
    rows: list[Usage] = []
    for size in options.sizes:
        m, d = map(int, size.split("x"))
        for dtype in options.dtypes:
            rows += report(m, d, getattr(torch, dtype))
    rows += gumbel_report()
    if options.json:
        json.dump([asdict(row) for row in rows], sys.stdout, indent=1)
        return 0
    print(
        f"{'kernel':<18}{'m x d':>10}{'dtype':>10}{'threads':>9}{'regs':>6}{'spill':>7}{'smem':>8}"
    )
    for r in rows:
        print(
            f"{r.kernel:<18}{f'{r.m} x {r.d}':>10}{r.dtype:>10}{r.threads:>9}{r.registers:>6}"
            f"{r.spilled_bytes:>7}{r.shared_bytes:>8}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
