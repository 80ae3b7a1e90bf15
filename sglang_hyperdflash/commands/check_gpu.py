"""``hyperdflash check --gpu``: every kernel of a server against its reference, on this GPU.

No checkpoint is needed: inputs are drawn at random, of the sizes of DeepSeek-V4-Flash, with ties,
with NaN and infinities. The operators need torch and Triton alone; what needs SGLang and is not
installed is said to be absent.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sglang_hyperdflash.commands import check_attention
from sglang_hyperdflash.serving.verification.rehearsal import BROKEN, RANDOM, TIES, rehearse
from sglang_hyperdflash.tools.atomic import write_json
from sglang_hyperdflash.tools.errors import HyperDFlashError
from sglang_hyperdflash.tools.provenance import provenance
from triton_ops import hc_gate_reduce
from triton_ops.comparison import (
    Comparison,
    Results,
    copied,
    described,
    differing,
    far,
    named,
    tensors,
)
from triton_ops.graph_timing import capture, events_ms, interleaved, replay_us
from triton_ops.hc_gate_op import ROW_KERNEL_TOKENS
from triton_ops.operator import OPERATORS, Operator

EPSILONS = {"rms_eps": 1e-6, "hc_eps": 1e-6}
CALLS, ROUNDS = 10, 10


# Kinds of numbers, without and with a dependency head.
CASES = tuple(product((RANDOM, TIES, BROKEN), (False, True)))


@dataclass(frozen=True)
class Sizes:
    """Of what is checked: DeepSeek-V4-Flash's, and the width of DeepSeek-V4-Pro.

    Attributes:
        reducers: paths and width of one. tokens: that it reduces at once; both kernels.
        heads: of attention, of its K/V, and their width; lengths: of contexts.
    """

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    vocabulary: int = 129_280
    candidates: int = 64
    rank: int = 256
    widths: tuple[int, ...] = (1, 7)
    reducers: tuple[tuple[int, int], ...] = ((4, 4096), (4, 7168))
    tokens: tuple[int, ...] = (1, 7, ROW_KERNEL_TOKENS, ROW_KERNEL_TOKENS + 1, 2048)
    heads: tuple[int, int, int] = (32, 8, 128)
    cases: tuple[tuple[str, bool], ...] = CASES
    lengths: tuple[int, ...] = check_attention.LENGTHS

    @property
    def on_gpu(self) -> bool:
        """Whether there are graphs and times."""
        return self.device == "cuda"


@dataclass
class Finding:
    """One line of the report.

    Attributes:
        wrong: the largest difference and where it is, or what was raised; None if right.
        batches: that were compared. microseconds: by implementation, medians.
    """

    subject: str
    wrong: str | None = None
    batches: int = 0
    microseconds: dict[str, float] = field(default_factory=dict)
    note: str = ""

    def line(self) -> str:
        """As it is printed."""
        if self.wrong is not None:
            return f"{self.subject:<32} WRONG  {self.wrong}"
        times = ", ".join(f"{name} {us:,.0f} us" for name, us in self.microseconds.items())
        counted = f"{self.batches} batches" if self.batches else ""
        state = "right" if self.batches else "  -  "
        return f"{self.subject:<32} {state}  " + "; ".join(
            filter(None, (counted, times, self.note))
        )


class GraphComparison(Comparison):
    """Compares each batch a second time, replayed from a CUDA graph; keeps one of each to time."""

    def __init__(self, on_gpu: bool) -> None:
        super().__init__()
        self.on_gpu = on_gpu
        self.last: dict[str, tuple[Operator, tuple]] = {}

    def difference(
        self, op: Operator, arguments: tuple, before: tuple, expected: Results
    ) -> str | None:
        found = super().difference(op, arguments, before, expected)
        if found is not None or not self.on_gpu:
            return found
        if not self.exact and not _broken(before):
            self.last[op.name] = op, copied(before)
        found = _in_graph(op, before)
        return found and f"in a CUDA graph, {found}"


def _broken(arguments: tuple) -> bool:
    return any(bool(t.isnan().any()) for t in tensors(arguments) if t.is_floating_point())


def _in_graph(op: Operator, before: tuple) -> str | None:
    """What differs between a launch and the replay of a captured one, from the same arguments."""
    given, static, graph = copied(before), copied(before), torch.cuda.CUDAGraph()
    expected = named(op.launch(*given), given)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        outputs = op.launch(*static)
    results = named(outputs, static)
    for name, result in results.items():
        if name.startswith("result"):
            result.fill_(-7)
    for argument, value in zip(tensors(static), tensors(before), strict=True):
        argument.copy_(value)
    graph.replay()
    for name, wrong in differing(op, before, results, expected).items():
        if wrong.any():
            return described(name, results[name], expected[name], wrong)
    return None


def operators(sizes: Sizes) -> list[Finding]:
    """Every operator of a round, and the reducer, on every kind of batch and of numbers."""
    comparison = GraphComparison(sizes.on_gpu)
    with torch.inference_mode(), comparison:
        for kind, headed in sizes.cases:
            comparison.exact = kind == TIES
            head = _head(sizes) if headed else None
            given = sizes.candidates, sizes.vocabulary, sizes.widths, sizes.device
            rehearse(head, *given, kind)
        comparison.exact = False
        for m, d in sizes.reducers:
            for tokens in sizes.tokens:
                hc_gate_reduce(*_reduction(sizes, tokens, m, d), **EPSILONS)
    findings = []
    for name in OPERATORS:
        found = Finding(name, comparison.wrong.get(name), comparison.batches[name])
        if name in comparison.last and found.wrong is None:
            with torch.inference_mode():
                found.microseconds = _times(*comparison.last[name])
        findings.append(found)
    return findings


def _head(sizes: Sizes) -> Any:
    """What the operators read of a dependency head; sums of its numbers are exact in any order."""
    generator, shape = torch.Generator().manual_seed(1), (sizes.vocabulary, sizes.rank)
    tables = (torch.randint(-2, 3, shape, generator=generator) / 8 for _ in range(2))
    predecessor, successor = (table.to(sizes.device, sizes.dtype) for table in tables)
    gate = SimpleNamespace(out_features=sizes.rank)
    return SimpleNamespace(gate=gate, predecessor=predecessor, successor=successor)


def _reduction(sizes: Sizes, tokens: int, m: int, d: int, norms: bool = True) -> tuple:
    """Random arguments of ``hc_gate_reduce``: residuals ``[tokens, m * d]`` in the dtype."""
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(sizes.device)

    hidden, fn = (normal(tokens, m * d) * 3).to(sizes.dtype), normal(m, m * d) * (m * d) ** -0.5
    weights = (1 + normal(m, d) / 8, (1 + normal(d) / 8).to(sizes.dtype)) if norms else (None, None)
    return hidden, fn, normal(m), normal(1).abs() + 0.5, *weights


def _times(op: Operator, arguments: tuple) -> dict[str, float]:
    """Median microseconds of a call: the kernel in a graph, torch and SGLang's own without."""
    calls = {"torch": partial(op.reference, *arguments)}
    if own := SGLANGS.get(op.name):
        with suppress(Exception):  # another release's, or none
            rival = own(*arguments)
            rival()
            calls["SGLang"] = rival
    graph = capture(lambda _: op.launch(*arguments), CALLS)

    def time_us(name: str) -> float:
        return replay_us(graph, CALLS) if name == "kernel" else events_ms(calls[name]) * 1000

    times = interleaved(["kernel", *calls], time_us, ROUNDS)
    return {name: statistics.median(values) for name, values in times.items()}


def _fused_hc_head(hidden, fn, base, scale, *_rest) -> Callable[[], Any]:
    from sglang.kernels.ops.layernorm.mhc_head import fused_hc_head

    m = len(fn)
    x = hidden.view(len(hidden), m, -1)
    return partial(fused_hc_head, x, fn, scale, base, EPSILONS["rms_eps"], EPSILONS["hc_eps"])


def _sampler(logits, temperatures, *rest) -> Callable[[], Any]:
    from sglang.srt.layers.sampler import sampling_from_probs_torch

    each = temperatures.repeat_interleave(rest[3].shape[1]).unsqueeze(-1)
    return lambda: sampling_from_probs_torch(torch.softmax(logits / each, -1), None, None)


# SGLang's own for the same work: its reducer without norms, its sampler without a seed.
SGLANGS = {"hc_gate_reduce": _fused_hc_head, "row_statistics": _sampler}


def sglangs_hc_head(sizes: Sizes) -> Finding:
    """The reducer without norms against the kernel of SGLang's ``hc_head``, which it inherits."""
    found = Finding("hc_gate_reduce as hc_head")
    with torch.inference_mode(), _caught(found):
        for m, d in sizes.reducers:
            for tokens in sizes.tokens:
                arguments = _reduction(sizes, tokens, m, d, norms=False)
                expected = _fused_hc_head(*arguments)()
                result = OPERATORS["hc_gate_reduce"].launch(*arguments, *EPSILONS.values())
                wrong = far(result, expected)
                if wrong.any():
                    found.wrong = described(f"{tokens} tokens", result, expected, wrong)
                    return found
                found.batches += 1
    return found


def attention(sizes: Sizes, name: str, build: bool) -> Finding:
    """One backend of a draft on every layout of slots that it can read, causal and not.

    Args:
        build: whether FlashInfer may compile its kernel first, for minutes.
    """
    found = Finding(f"draft attention, {name}")
    with torch.inference_mode(), _caught(found):
        if name == "flashinfer" and not build and not check_attention.flashinfer_is_built():
            found.note = "not compiled here; --all compiles and checks it, for minutes"
            return found
        for layout in check_attention.LAYOUTS:
            if layout == "window" and name in check_attention.PAGED:
                continue
            batch = check_attention.new_batch(
                layout, sizes.device, sizes.dtype, sizes.heads, sizes.lengths
            )
            kernel = check_attention.BACKENDS[name]
            for causal in (False, True):
                difference = check_attention.difference(kernel, batch, causal)
                if difference is not None:
                    rows = "causal" if causal else "whole block"
                    found.wrong = f"{layout}, {rows}: {difference}"
                    return found
                found.batches += 1
        if sizes.on_gpu:
            call = partial(check_attention.BACKENDS[name], batch, True)
            times = interleaved([name], lambda _: events_ms(call) * 1000, ROUNDS)
            found.microseconds = {f"with its launches, {layout}": statistics.median(times[name])}
    return found


@contextmanager
def _caught(found: Finding) -> Iterator[None]:
    """What is not installed is absent; anything else that is raised is wrong."""
    try:
        yield
    except ImportError as error:
        found.note = f"not here: {error}".splitlines()[0]
        found.batches = 0
    except Exception as error:  # a compiler's or a launch's, of any kind
        found.wrong = f"{type(error).__name__}: {str(error)[:500]}"


def flashinfers_kernels() -> Finding:
    """Which of FlashInfer's kernels a first start compiles, silently, for minutes."""
    found = Finding("FlashInfer's topk, sampling", note="whether they are compiled is unknown")
    with suppress(Exception):  # it looks for a GPU, too
        from flashinfer.jit.sampling import gen_sampling_module
        from flashinfer.jit.topk import gen_topk_module

        modules = {"topk": gen_topk_module, "sampling": gen_sampling_module}
        missing = [name for name, spec in modules.items() if not spec().is_compiled]
        found.note = "compiled"
        if missing:
            found.note = f"the first start compiles {' and '.join(missing)}, for minutes"
    return found


def examine_gpu(
    sizes: Sizes, backends: list[str], build: bool, show: Callable[[str], Any]
) -> list[Finding]:
    """Every finding, each shown as soon as it is there."""
    findings: list[Finding] = []
    parts: list[Callable[[], list[Finding] | Finding]] = [
        partial(operators, sizes),
        partial(sglangs_hc_head, sizes),
        *(partial(attention, sizes, name, build) for name in backends),
        flashinfers_kernels,
    ]
    for part in parts:
        several = part()
        for found in several if isinstance(several, list) else [several]:
            findings.append(found)
            show(found.line())
    return findings


def run_gpu(build: bool, report: Path | None) -> int:
    """Print the findings, write them as JSON; 1 if one is wrong.

    Raises:
        HyperDFlashError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise HyperDFlashError("check --gpu needs a CUDA device; torch found none.")
    capability = torch.cuda.get_device_capability()
    print(f"{torch.cuda.get_device_name()}, sm_{capability[0]}{capability[1]}; compiling...")
    torch.cuda.reset_peak_memory_stats()
    backends = check_attention.backends(capability)
    findings = examine_gpu(Sizes(), backends, build, partial(print, flush=True))
    peak = torch.cuda.max_memory_allocated()
    wrong = [found.subject for found in findings if found.wrong is not None]
    print(f"peak memory: {peak / 2**30:.1f} GiB; wrong: {', '.join(wrong) or 'nothing'}")
    if any(subject in OPERATORS for subject in wrong):
        print("A server runs the torch references of these operators instead, and says so.")
    if any(subject.startswith("draft attention") for subject in wrong):
        print("Serve with --speculative-draft-attention-backend triton, or another that is right.")
    if report is not None:
        results = {"findings": [asdict(found) for found in findings], "peak_bytes": peak}
        results |= {"capability": list(capability), "cuda": torch.version.cuda}
        write_json(report, results | {"provenance": provenance()}, indent=1)
    return int(bool(wrong))
