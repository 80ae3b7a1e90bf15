"""Spills and occupancy of the kernels, compiled ahead of time for any GPU: none is needed.

``python -m tests.gpu.compile_report`` prints a JSON list: every kernel at DeepSeek-V4's sizes with
its bytes of stack a thread (spills are there) and the programs that fit a multiprocessor. Kernels
are compiled as their launches bind them, by the compiler and the assembler that Triton ships.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

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
# What a report says of one compiled kernel.
Usage = dict[str, str | int]


def usage_of(name: str, compiled: Any, threads: int, architecture: int) -> Usage:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{key}:(\d+)", text)[1]) for key in ("REG", "STACK"))
    most_threads, most_shared, most = ARCHITECTURES[architecture]
    shared = compiled.metadata.shared + RESERVED
    by_registers = REGISTERS // (-(-registers // 8) * 8 * threads)
    fit = min(most_threads // threads, by_registers, most_shared // shared, most)
    usage = {"architecture": architecture, "stack_bytes": stack, "programs": fit}
    return {"kernel": name} | usage


@contextmanager
def recorded() -> Iterator[list[tuple[JITFunction, tuple, dict]]]:
    """Launches are kept, with their arguments, and not run."""
    launches: list[tuple[JITFunction, tuple, dict]] = []

    def run(self, *args, grid, warmup, **kwargs):
        launches.append((self, args, kwargs))

    with mock.patch.object(JITFunction, "run", run):
        yield launches


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
        rows_given = logits, *requests, mask, mask is not None
        accepted, given = (*drafted, choice, *requests, V), (*drafted, *weight, *requests, True, V)
        yield f"rows{name}", partial(rows_kernel.launch, *rows_given)
        yield f"accept{name}", partial(accept_kernel.launch, *accepted)
        yield f"finish{name}", partial(finish_kernel.launch, *given)


def round_report(architecture: int) -> list[Usage]:
    rows = []
    for name, launch in round_launches():
        with recorded() as launches:
            launch()
        for kernel, args, kwargs in launches:
            compiled = compile_launch(kernel, args, kwargs, architecture)
            called, threads = f"{name}: {kernel.fn.__name__}", 32 * kwargs["num_warps"]
            rows.append(usage_of(called, compiled, threads, architecture))
    return rows


def gate_report(m: int, d: int, dtype: torch.dtype) -> list[Usage]:
    """Resources of the reducer's kernel on Hopper; both norms present, weights as served."""
    weights = new(m, m * d), new(m), new(1), new(m, d), new(d, dtype=dtype)
    with recorded() as launches:
        hc_gate_op.launch(new(1024, m * d, dtype=dtype), *weights, 1e-6, 1e-6)
    called = f"gate {m} x {d} {dtype}"
    return [usage_of(called, compile_launch(*launch, 90), 512, 90) for launch in launches]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="*", default=["4x4096", "4x7168"], metavar="MxD")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--architectures", nargs="*", type=int, default=list(ARCHITECTURES))
    options = parser.parse_args()
    rows = [row for report in map(round_report, options.architectures) for row in report]
    for size, dtype in itertools.product(options.sizes, options.dtypes):
        rows += gate_report(*map(int, size.split("x")), getattr(torch, dtype))
    json.dump(rows, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
