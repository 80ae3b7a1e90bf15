"""What all tests share: paths, and kernels that run in Triton's interpreter without a GPU."""

import gc
import importlib
import os
import signal
import sys
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "tiny_deepseek_v4"


def import_kernels() -> None:
    """Every module with kernels, of the reducer (``hc_gate``) and of a round."""
    for path in sorted((ROOT / "triton_ops").glob("*_kernel*.py")):
        importlib.import_module(f"triton_ops.{path.stem}")


# Engines of tests run on any machine.
os.environ.setdefault("HYPERDFLASH_CPU", "1")
# The process that only says which of several workers runs what imports nothing; -n 0 has none.
if "PYTEST_XDIST_WORKER" in os.environ or "-n" not in sys.argv or "0" in sys.argv:
    gc.disable()  # until all is imported, most of which stays
    import torch

    if torch.cuda.is_available():
        import_kernels()
    else:
        # Without a GPU our kernels run in Triton's interpreter. Triton reads the variable while it
        # is imported and decorates a kernel; servers that tests start must not inherit it.
        with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
            # A launch would import it, too late.
            import triton.experimental.gluon  # noqa: F401

            import_kernels()

# A shell that runs the tests in its background, or nohup, has children that ignore Ctrl-C or a lost
# terminal; tests send both.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A folder with the benchmarks/*.jsonl of ``python -m eval fetch``; without it tests take prompts
# of this repository.
DATA = os.environ.get("HYPERDFLASH_TEST_DATA")
BENCHMARKS = Path(DATA) / "benchmarks" if DATA else None


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def target_dir() -> Path:
    return EXAMPLE / "target"


@pytest.fixture(scope="session")
def drafter_dir() -> Path:
    return EXAMPLE / "drafter"
