"""Paths shared by all tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch

if torch.cuda.is_available():
    import triton_ops.gumbel_kernel
    import triton_ops.hc_gate_backward_kernels
else:
    # Without a GPU our kernels run in Triton's interpreter. Triton reads the variable while it is
    # imported and while it decorates a kernel; servers that tests start must not inherit it.
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        # A launch would import it, too late.
        import triton.experimental.gluon  # noqa: F401

        import triton_ops.gumbel_kernel
        import triton_ops.hc_gate_backward_kernels  # noqa: F401

# A shell that runs the tests in its background, or nohup, has children that ignore Ctrl-C or a lost
# terminal; tests send both.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "tiny_deepseek_v4"
# A folder with the benchmarks/*.jsonl of ``python -m eval fetch``; without it tests take prompts
# of this repository.
DATA = os.environ.get("HYPERDFLASH_TEST_DATA")
BENCHMARKS = Path(DATA) / "benchmarks" if DATA else None


@pytest.fixture(scope="session")
def target_dir() -> Path:
    return EXAMPLE / "target"


@pytest.fixture(scope="session")
def drafter_dir() -> Path:
    return EXAMPLE / "drafter"
