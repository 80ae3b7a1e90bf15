"""The draw's kernels are compiled once: batches of every size run what the start has compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys

# In a process of its own: in the tests' the kernels may be interpreted.
SPECIALISED = """
import json, torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from triton_ops import gumbel_kernel as g

backend, t = make_backend(GPUTarget("cuda", 90, 32)), torch.empty(64)
found = []
for kernel in (g._share_kernel, g._best_kernel):
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    kinds = set()
    for rows in (1, 7, 64, 100, 448, 700, 1024, 1792):
        parts, share = g.shares(rows, 129_280)
        if kernel is g._share_kernel:
            bound = binder(t, t, t, t, t, t, 129_280, 129_280, share, HAS_ROWS=False, BLOCK=g.BLOCK)
        else:
            bound = binder(t, t, t, parts, PARTS=g.MAX_SHARES)
        kinds.add(str(bound[1]))
    found.append(len(kinds))
print(json.dumps(found))
"""


def test_no_batch_size_needs_a_compilation_of_its_own():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    ended = subprocess.run(
        [sys.executable, "-c", SPECIALISED],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == [1, 1]
