"""The steps of a visit that need no server: torch, Triton and pytest are enough."""

import importlib.util
import subprocess
import sys

from tests.gpu.visit import ROOT, Notes

CHECK = "import sys; from pathlib import Path; from sglang_hyperdflash.commands import check_gpu;"
CHECK += " sys.exit(check_gpu.run_gpu(False, Path(sys.argv[1])))"


def kernels(v: Notes) -> None:
    """``check --gpu``: every kernel against its reference."""
    run(v, "check_gpu", "-c", CHECK, str(v.out / "check_gpu.json"))


def kernel_tests(v: Notes) -> None:
    """The kernels' own tests."""
    options = ("-n", "8") if importlib.util.find_spec("xdist") else ()
    files = sorted(ROOT.glob("tests/unit/triton_ops/test_*_kernel*.py"))
    run(v, "tests", "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *map(str, files))


def bench(v: Notes) -> None:
    """``make bench``: the reducer and the operators of a sampled round against their rivals."""
    run(v, "bench", "-m", "tests.gpu.bench", "--out", str(v.out))
    if importlib.util.find_spec("sglang") is None:
        v.measured["a sampled round"] = "not here: SGLang is not installed"
        return
    run(v, "bench_verify", "-m", "tests.gpu.bench_verify", "--out", str(v.out))


def run(v: Notes, name: str, *arguments: str) -> None:
    """A command that needs a GPU, and must succeed; what it says stays in ``NAME.log``."""
    if not v.gpu:
        v.measured["not here"] = "it needs a GPU"
        return
    v.out.mkdir(parents=True, exist_ok=True)
    log, options = v.out / f"{name}.log", {"cwd": ROOT, "stderr": subprocess.STDOUT}
    with log.open("w") as out:
        ended = subprocess.run([sys.executable, "-u", *arguments], stdout=out, **options)
    lines = log.read_text(errors="replace").splitlines()
    v.measured[f"last lines, {name}"] = lines[-24:]
    v.check(ended.returncode == 0, f"{name} failed: {' '.join(lines[-3:])}")
