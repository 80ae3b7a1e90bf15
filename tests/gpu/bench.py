"""``make bench``: the reducer and its alternatives on one GPU, compared with copy bandwidth.

For every size and number of tokens, the served kernel is checked against the fp32 reference on
fresh inputs; then each contender is captured in a CUDA graph of several calls over rotating inputs
and replayed in rounds that interleave all contenders with a plain copy of as many bytes. A time is
the median of the rounds, per call.

Contenders: ``triton`` (what is served); ``eager`` and ``compile`` (the torch reference);
``fused_hc_head`` (SGLang's kernel alone, no norms); ``fused_hc_head+norms`` (the same between the
per-path and the final RMSNorm of torch); ``fc`` (the generic projection, then a norm).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from sglang_hyperdflash.tools.atomic import write_json
from sglang_hyperdflash.tools.provenance import provenance
from triton_ops.graph_timing import Call, capture, interleaved, replay_us
from triton_ops.hc_gate import hc_gate_reduce_reference
from triton_ops.hc_gate_op import launch

TOKENS = (1, 7, 28, 112, 256, 448, 2048, 8192, 32768)
SIZES = ("4x4096", "4x7168")
EPSILONS = {"rms_eps": 1e-6, "hc_eps": 1e-6}
L2_BYTES = 128 << 20
MEMORY_BYTES = 24 << 30


def traffic_bytes(n: int, m: int, d: int, itemsize: int = 2) -> int:
    """Minimum DRAM traffic of ``n`` tokens: the residual read once, the feature written once."""
    return n * (m + 1) * d * itemsize


def load_fused_hc_head() -> Callable | None:
    try:
        from sglang.kernels.ops.layernorm.mhc_head import fused_hc_head
    except ImportError:
        return None
    return fused_hc_head


class Case:
    """One size and number of tokens: rotating inputs and a call for every contender."""

    def __init__(self, n: int, m: int, d: int, fused: Callable | None) -> None:
        self.n, self.m, self.d = n, m, d
        wanted = -(-2 * L2_BYTES // traffic_bytes(n, m, d))
        self.sets = max(1, min(wanted, 64, MEMORY_BYTES // traffic_bytes(n, m, d)))
        new = {"device": "cuda"}
        self.hidden = [torch.randn(n, m * d, **new).bfloat16() * 3 for _ in range(self.sets)]
        self.fn = torch.randn(m, m * d, **new) * (m * d) ** -0.5
        self.base, self.scale = torch.randn(m, **new), torch.ones(1, **new)
        self.path_norm, self.norm = torch.rand(m, d, **new) + 0.5, torch.ones(d, **new).bfloat16()
        self.weights = self.fn, self.base, self.scale, self.path_norm, self.norm
        self.fused = fused
        self.fc = torch.randn(d, m * d, **new).bfloat16() * (m * d) ** -0.5

    def reference(self, hidden: torch.Tensor) -> torch.Tensor:
        return hc_gate_reduce_reference(hidden, *self.weights, **EPSILONS)

    def triton(self, i: int) -> torch.Tensor:
        return launch(self.hidden[i % self.sets], *self.weights, *EPSILONS.values())

    def sglang(self, i: int) -> torch.Tensor:
        paths = self.hidden[i % self.sets].view(self.n, self.m, self.d)
        return self.fused(paths, self.fn, self.scale, self.base, 1e-6, 1e-6)

    def sglang_norms(self, i: int) -> torch.Tensor:
        paths = self.hidden[i % self.sets].view(self.n, self.m, self.d)
        paths = F.rms_norm(paths, (self.d,), eps=1e-6) * self.path_norm.bfloat16()
        y = self.fused(paths.contiguous(), self.fn, self.scale, self.base, 1e-6, 1e-6)
        return F.rms_norm(y, (self.d,), self.norm, 1e-6)

    def generic(self, i: int) -> torch.Tensor:
        y = F.linear(self.hidden[i % self.sets], self.fc)
        return F.rms_norm(y, (self.d,), self.norm, 1e-6)

    def copies(self) -> Call:
        """A copy that reads and writes as many bytes as the reducer must, half each."""
        elements = traffic_bytes(self.n, self.m, self.d) // 4
        source = [torch.randn(elements, device="cuda").bfloat16() for _ in range(self.sets)]
        target = [torch.empty_like(s) for s in source]
        return lambda i: target[i % self.sets].copy_(source[i % self.sets])

    def contenders(self) -> dict[str, Call]:
        compiled = torch.compile(self.reference, dynamic=False, fullgraph=True)
        calls = {
            "triton": self.triton,
            "eager": lambda i: self.reference(self.hidden[i % self.sets]),
            "compile": lambda i: compiled(self.hidden[i % self.sets]),
        }
        if self.fused is not None:
            calls |= {"fused_hc_head": self.sglang, "fused_hc_head+norms": self.sglang_norms}
        return calls | {"fc": self.generic, "copy": self.copies()}

    def error(self) -> float:
        """Relative error of the served kernel against the fp32 reference on the first inputs."""
        rows = slice(0, min(self.n, 4096))
        exact = self.reference(self.hidden[0][rows].float())
        result = self.triton(0)[rows].float()
        return ((result - exact).norm() / exact.norm()).item()


@torch.inference_mode()
def measure(case: Case, rounds: int) -> dict[str, Any]:
    """One row of the results: every contender's median time with its quartiles, and ratios."""
    error = case.error()
    calls = max(2, min(case.sets, 32))
    graphs = {name: capture(call, calls) for name, call in case.contenders().items()}
    times = interleaved(graphs, lambda name: replay_us(graphs[name], calls), rounds)
    moved = traffic_bytes(case.n, case.m, case.d)
    row: dict[str, Any] = {"m": case.m, "d": case.d, "tokens": case.n, "relative_error": error}
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        row[name] = {"median_us": median, "quartiles_us": [low, high]}
        row[name]["tb_per_s"] = moved / median / 1e6
    row["share_of_copy"] = row["copy"]["median_us"] / row["triton"]["median_us"]
    return row


def run(sizes: list[str], tokens: list[int], rounds: int, fused: Callable | None) -> list[dict]:
    rows = []
    for size in sizes:
        m, d = map(int, size.split("x"))
        for n in tokens:
            rows.append(measure(Case(n, m, d, fused), rounds))
            print(line(rows[-1]), flush=True)
            torch.compiler.reset()
            torch.cuda.empty_cache()
    return rows


def line(row: dict[str, Any]) -> str:
    """Median microseconds of every contender, and what the reducer does of a copy's bandwidth."""
    times = {name: f"{cell['median_us']:.1f}" for name, cell in row.items() if type(cell) is dict}
    head = f"{row['m']} x {row['d']}, {row['tokens']} tokens: {row['share_of_copy']:.0%} of a copy"
    return f"{head}, error {row['relative_error']:.1e}; us {times}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), metavar="MxD")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench needs a CUDA device; torch found none")
    fused = load_fused_hc_head()
    if fused is None:
        print("sglang is not installed: fused_hc_head is not measured")
    rows = run(options.sizes, options.tokens, options.rounds, fused)
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / "hc_gate.json", {"rows": rows, "provenance": provenance()}, indent=1)


if __name__ == "__main__":
    main()
