"""How often the launches of a script would be compiled: its kernels are recorded and not run."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.waiting import PATIENCE

BEFORE = """
import itertools, json, torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

backend, found = make_backend(GPUTarget("cuda", 90, 32)), {}


def record(name, kernel):
    binder, kinds = create_function_from_signature(kernel.signature, kernel.params, backend), set()
    found[name] = kinds

    def run(*args, grid, warmup, **options):
        kinds.add(str(binder(*args, **options)[1:]))

    kernel.run = run
"""
AFTER = """
print(json.dumps({name: len(kinds) for name, kinds in found.items()}))
"""


def compilations(script: str) -> dict[str, int]:
    """Kinds of launches of every kernel that ``script`` hands to ``record(name, kernel)``.

    It runs in a process of its own: in the tests' the kernels may be interpreted.
    """
    ended = subprocess.run(
        [sys.executable, "-c", BEFORE + script + AFTER],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)
