"""What the kernels cost on a GPU, compiled ahead of time for any: no GPU is needed.

``python -m tests.gpu.compile_report`` prints registers, stack (spills are there), shared memory,
programs that fit a multiprocessor and an instruction mix of every kernel at DeepSeek-V4's sizes;
``--json`` prints one JSON list instead. Kernels are compiled as their real launches bind them, by
the compiler and the assembler that Triton ships.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from triton_ops import (
    accept_kernel,
    adjust_kernel,
    copy_kernel,
    finish_kernel,
    hc_gate_op,
    propose_kernel,
    rows_kernel,
)
from triton_ops.copies import KINDS

# Threads, shared bytes and programs of a multiprocessor; each has 65,536 registers.
# Source: CUDA C++ Programming Guide, compute capabilities.
ARCHITECTURES = {
    80: (2048, 164 << 10, 32),
    90: (2048, 228 << 10, 32),
    100: (2048, 228 << 10, 32),
    120: (1536, 100 << 10, 24),
}
REGISTERS, RESERVED = 65_536, 1024
V, K, RANK, DRAFTS, REQUESTS = 129_280, 64, 256, 6, 64
# In PTX; a predicate or a width may come before or after.
MIX = {
    "fp64": r"\.f64\b",
    "memory": r"\b(ld|st)\.global",
    "barrier": r"\bbar\.sync",
    "branch": r"\bbra\b",
}


@dataclass(frozen=True)
class Usage:
    """Resources of one compiled kernel: bytes of stack a thread, of shared memory a program.

    Attributes:
        programs: that fit a multiprocessor at once; instructions: of PTX, by kind.
    """

    kernel: str
    architecture: int
    threads: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    programs: int
    instructions: dict[str, int]


def usage_of(name: str, compiled: Any, threads: int, architecture: int) -> Usage:
    """What the assembler made of a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{key}:(\d+)", text)[1]) for key in ("REG", "STACK"))
    most_threads, most_shared, most = ARCHITECTURES[architecture]
    shared = compiled.metadata.shared
    by_registers = REGISTERS // (-(-registers // 8) * 8 * threads)
    fit = min(most_threads // threads, by_registers, most_shared // (shared + RESERVED), most)
    mix = {kind: len(re.findall(form, compiled.asm["ptx"])) for kind, form in MIX.items()}
    return Usage(name, architecture, threads, registers, stack, shared, fit, mix)


@contextmanager
def recorded() -> Iterator[list[tuple[JITFunction, tuple, dict]]]:
    """Launches are kept, with their arguments, and not run."""
    found: list[tuple[JITFunction, tuple, dict]] = []
    original = JITFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        found.append((self, args, kwargs))

    JITFunction.run = run
    try:
        yield found
    finally:
        JITFunction.run = original


def compile_launch(kernel: JITFunction, args: tuple, kwargs: dict, architecture: int) -> Any:
    """Compile a recorded launch as ``JITFunction.run`` would, for another device's architecture."""
    target = GPUTarget("cuda", architecture, 32)
    backend = make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(*args, **kwargs)
    options, signature, constants, attributes = kernel._pack_args(
        backend, kwargs, bound, specialization, options
    )
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=options.__dict__)


def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of no storage, as well aligned as any."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def round_launches() -> Iterator[tuple[str, Callable[[], Any]]]:
    """A name and the launch of every operator of a round, plain and with everything."""
    bs, block, i64 = REQUESTS, DRAFTS + 1, torch.int64
    rows = bs * block
    logits, kept = new(rows, V), new(rows, V)
    positions, tokens, seeds = (new(*s, dtype=i64) for s in ((bs, block), (bs, block), (bs,)))
    limits = new(bs), new(bs, dtype=torch.int32)
    seeded = new(bs, dtype=torch.bool)
    requests = *limits, seeded, seeds, positions
    candidates = new(bs, DRAFTS, K, dtype=i64), new(bs, DRAFTS, K)
    choice = new(bs, DRAFTS, dtype=i64)
    tables = (new(V, RANK, dtype=torch.bfloat16),) * 2
    head, none = (new(bs, DRAFTS, RANK), *tables), (None,) * 3
    changes = (
        *(new(bs + 1, V, dtype=torch.int32), seeds, new(bs, 3), new(bs, 2, dtype=i64), seeds),
        new(bs, V),
    )
    drafting = tokens, seeds, seeded, positions, *limits, new(bs), new(bs), 0.5
    history = new(bs + 1, 1 << 15, dtype=torch.int32), seeds, seeds
    copies = new(bs + 1, 2 * DRAFTS + 1, dtype=i64), new(2, KINDS, 2, dtype=torch.int32)
    propose, greedy = propose_kernel.launch, propose_kernel.launch_greedy
    every = True, True, *copies, *changes
    yield "propose", lambda: propose(*candidates, *head, *drafting, False, False, *(None,) * 8)
    yield "propose, all", lambda: propose(*candidates, *head, *drafting, *every)
    yield "propose, no head", lambda: propose(*candidates, *none, *drafting, *every)
    yield "greedy", lambda: greedy(*candidates, *head, seeds)
    yield "greedy, copies", lambda: greedy(*candidates, *head, seeds, *copies)
    committed = tokens, limits[1], new(bs, DRAFTS, dtype=i64), limits[1]
    yield "copy", lambda: copy_kernel.launch(*history, *committed, *copies, V)
    yield "adjust", lambda: adjust_kernel.launch(new(bs, block, V), tokens, positions, *changes)
    for name, mask in (("", None), (", filters", kept)):
        target = logits, mask, new(rows, dtype=i64), new(rows), new(rows), tokens
        drafted = *target, *candidates
        weight = new(bs, dtype=torch.int32), new(bs, dtype=torch.float64)
        yield (
            f"rows{name}",
            lambda m=mask: rows_kernel.launch(logits, *requests, m, m is not None),
        )
        yield f"accept{name}", lambda d=drafted: accept_kernel.launch(*d, choice, *requests, V)
        yield (
            f"finish{name}",
            lambda d=drafted, w=weight: finish_kernel.launch(*d, *w, *requests, True, V),
        )


def round_report(architecture: int) -> list[Usage]:
    """Resources of every kernel of a round."""
    found = []
    for name, launch in round_launches():
        with recorded() as launches:
            launch()
        for kernel, args, kwargs in launches:
            compiled = compile_launch(kernel, args, kwargs, architecture)
            part = kernel.fn.__name__.strip("_").removesuffix("_kernel")
            called = f"{name}: {part}"
            found.append(usage_of(called, compiled, 32 * kwargs["num_warps"], architecture))
    return found


def gate_report(m: int, d: int, dtype: torch.dtype, architecture: int) -> list[Usage]:
    """Resources of the reducer's kernel; both norms present, weights as served."""
    weights = new(m, m * d), new(m), new(1), new(m, d), new(d, dtype=dtype)
    with recorded() as launches:
        hc_gate_op.launch(new(1024, m * d, dtype=dtype), *weights, 1e-6, 1e-6)
    called = f"gate {m} x {d} {str(dtype).removeprefix('torch.')}"
    return [
        usage_of(called, compile_launch(*launch, architecture), 512, architecture)
        for launch in launches
    ]


def table(rows: list[Usage]) -> str:
    """A line for every kernel."""
    head = (
        f"{'kernel':<44}{'sm':>5}{'threads':>9}{'regs':>6}{'stack':>7}{'smem':>8}{'programs':>10}"
    )
    lines = [head + "".join(f"{kind:>9}" for kind in MIX)]
    for r in rows:
        line = f"{r.kernel:<44}{r.architecture:>5}{r.threads:>9}{r.registers:>6}{r.stack_bytes:>7}"
        line += f"{r.shared_bytes:>8}{r.programs:>10}"
        lines.append(line + "".join(f"{r.instructions[kind]:>9}" for kind in MIX))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON list on stdout")
    parser.add_argument("--sizes", nargs="*", default=["4x4096", "4x7168"], metavar="MxD")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--architectures", nargs="*", type=int, default=list(ARCHITECTURES))
    parser.add_argument("--reducer-architectures", nargs="*", type=int, default=[90])
    options = parser.parse_args(argv)
    rows = [row for found in map(round_report, options.architectures) for row in found]
    for size in options.sizes:
        m, d = map(int, size.split("x"))
        for dtype in options.dtypes:
            for architecture in options.reducer_architectures:
                rows += gate_report(m, d, getattr(torch, dtype), architecture)
    if options.json:
        json.dump([asdict(row) for row in rows], sys.stdout, indent=1)
    else:
        print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
