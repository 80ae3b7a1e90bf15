"""The kernels compiled ahead of time: nothing spills, and no batch is compiled for while serving.

Both run in processes of their own: in the tests' the kernels may be interpreted.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.waiting import PATIENCE

pytestmark = pytest.mark.heavy


def output_of(*command: str) -> str:
    # FlashInfer names another assembler, where it finds one.
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    ended = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=PATIENCE, env=clean
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


# As in a server: SGLang replaces a function of Triton's while it is imported.
REPORT = "import sglang.srt.utils.common; from tests.gpu.compile_report import main; main()"
DTYPES = ["bfloat16", "float16", "float32"]
SIZES = ["4x4096", "4x7168", "1x4096", "2x4096", "8x4096"]


@pytest.mark.parametrize(
    ("architectures", "sizes", "dtypes"),
    [
        (["90"], ["4x4096"], DTYPES[:1]),
        pytest.param(["80", "100", "120"], SIZES, DTYPES, marks=pytest.mark.slow),
    ],
    ids=["served", "others"],
)
def test_every_kernel_compiles_and_nothing_spills(architectures, sizes, dtypes):
    """A round's kernels for the architectures, the reducer's of the sizes for Hopper."""
    options = "--sizes", *sizes, "--dtypes", *dtypes, "--architectures", *architectures
    usage = json.loads(output_of("-c", REPORT, *options))
    assert {row["architecture"] for row in usage} == {90, *map(int, architectures)}
    assert [row for row in usage if row["stack_bytes"] or row["programs"] < 1] == []


# A round's launches are recorded by what they would be compiled for. Per-batch tensors are views
# whose alignment and row stride are those of nothing; widths of a block share ``shared`` kernels.
LAUNCHES = """
import itertools, json, math, torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from tests.gpu import compile_report as report
from triton_ops import accept_kernel, finish_kernel, hc_gate_op

backend, kinds = make_backend(GPUTarget("cuda", 90, 32)), {}
shared = {"_adjust_kernel", "_share_kernel", "_best_kernel", "_reduce_kernel"}
report.V, report.RANK = 12_928, 16


def new(*shape, dtype=torch.float32):
    bs, rows = report.REQUESTS, report.REQUESTS * (report.DRAFTS + 1)
    if shape[0] not in (bs, rows) or shape[-1] == report.V:
        return torch.empty(*shape, dtype=dtype)
    if shape == (bs, 2):  # end tokens
        shape = bs, ends
    if len(shape) == 2:
        wide = torch.empty(bs, shape[1] + ends + skipped, dtype=dtype)
        return wide[:, skipped : shape[1] + skipped]
    return torch.empty(math.prod(shape) + skipped, dtype=dtype)[skipped:].view(shape)


def bare():
    i64, bs, block = torch.int64, report.REQUESTS, report.DRAFTS + 1
    requests = new(bs), new(bs, dtype=torch.int32), new(bs, dtype=torch.bool), new(bs, dtype=i64)
    requests += (new(bs, block, dtype=i64),)
    tokens = new(bs * block, dtype=i64), None, None, new(bs, block, dtype=i64), None, None
    lengths = new(bs, dtype=torch.int32), new(bs, dtype=torch.float64)
    for logits in new(bs * block, report.V), None:
        rows = logits, None, *tokens
        yield "bare", lambda r=rows: accept_kernel.launch(*r, None, *requests, report.V)
        yield "bare", lambda r=rows: finish_kernel.launch(*r, *lengths, *requests, False, report.V)
    shapes = (bs * block, 256), (4, 256), (4,), (1,), (4, 64), (64,)
    gate = [torch.empty(shape) for shape in shapes]
    yield "reducer", lambda: hc_gate_op.launch(*gate, 1e-6, 1e-6)


report.new = new
batches = itertools.product((1, 7, 16, 64, 100, 257), (0, 1), (1, 2, 16), (0, 6, 15))
for report.REQUESTS, skipped, ends, report.DRAFTS in batches:
    for case, launch in itertools.chain(report.round_launches(), bare()):
        with report.recorded() as launches:
            launch()
        for kernel, args, options in launches:
            name = kernel.fn.__name__
            width = 0 if name in shared and "finish" not in case else report.DRAFTS
            binder = create_function_from_signature(kernel.signature, kernel.params, backend)
            kind = str(binder(*args, **options)[1:])
            kinds.setdefault(f"{case}: {name}, {width}", set()).add(kind)
print(json.dumps({name: len(several) for name, several in kinds.items()}))
"""


def test_no_batch_needs_a_compilation_of_its_own():
    kinds = json.loads(output_of("-c", LAUNCHES))
    assert len(kinds) > 30
    assert {name: count for name, count in kinds.items() if count > 1} == {}
