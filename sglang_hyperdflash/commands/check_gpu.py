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
from itertools import product, starmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from sglang_hyperdflash.commands import check_attention
from sglang_hyperdflash.serving.verification.rehearsal import (
    BROKEN,
    RANDOM,
    REQUESTS,
    TIES,
    rehearse,
)
from sglang_hyperdflash.tools.atomic import write_json
from sglang_hyperdflash.tools.errors import HyperDFlashError
from sglang_hyperdflash.tools.provenance import provenance
from triton_ops import hc_gate_reduce
from triton_ops.comparison import (
    Comparison,
    Results,
    cloned,
    differing,
    largest_difference,
    mismatches,
    results_by_name,
    tensor_arguments,
)
from triton_ops.graph_timing import capture, events_ms, interleaved, replay_us
from triton_ops.operator import OPERATORS, OPERATORS_VARIABLE, Operator, reference_operators

EPSILONS = {"rms_eps": 1e-6, "hc_eps": 1e-6}
CALLS, ROUNDS = 10, 10


class Case(NamedTuple):
    """Rounds of one kind of numbers, with a dependency head or without; None: as in ``Sizes``."""

    kind: str
    head: bool
    requests: int = REQUESTS
    vocabulary: int | None = None
    widths: tuple[int, ...] | None = None


CASES = tuple(starmap(Case, product((RANDOM, TIES), (False, True))))
# Then rows that several programs share, and requests that one program adds up in turns.
CASES += (Case(BROKEN, True), Case(RANDOM, False, 65, None, (7,)))
CASES += (Case(RANDOM, True, 257, 5003, (7,)),)


@dataclass(frozen=True)
class Sizes:
    """Sizes of DeepSeek-V4-Flash, and the hidden size of DeepSeek-V4-Pro.

    Attributes:
        candidates: K of each draft. rank: of the dependency head. widths: of rounds.
        reducers: paths and hidden size. tokens: reduced in one call, few and many.
        heads: of the queries, of K/V, and their width. lengths: tokens of contexts.
    """

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    vocabulary: int = 129_280
    candidates: int = 64
    rank: int = 256
    widths: tuple[int, ...] = (7, 1)
    reducers: tuple[tuple[int, int], ...] = ((4, 4096), (4, 7168))
    tokens: tuple[int, ...] = (7, 1, 2048)
    heads: tuple[int, int, int] = check_attention.HEADS
    cases: tuple[Case, ...] = CASES
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
            return f"{self.subject:<38} WRONG  {self.wrong}"
        times = ", ".join(f"{name} {us:,.0f} us" for name, us in self.microseconds.items())
        counted = f"{self.batches} batches" if self.batches else ""
        state = "right" if self.batches else "  -  "
        return f"{self.subject:<38} {state}  " + "; ".join(
            filter(None, (counted, times, self.note))
        )


class GraphComparison(Comparison):
    """Compares each batch a second time, replayed from a CUDA graph; keeps the first to time."""

    def __init__(self, on_gpu: bool) -> None:
        super().__init__()
        self.on_gpu = on_gpu
        self.timed: dict[str, tuple[Operator, tuple]] = {}

    def difference(
        self, op: Operator, arguments: tuple, before: tuple, expected: Results
    ) -> str | None:
        difference = super().difference(op, arguments, before, expected)
        if difference is not None or not self.on_gpu:
            return difference
        if op.name not in self.timed:
            self.timed[op.name] = op, cloned(before)
        difference = _graph_mismatch(op, before)
        return difference and f"in a CUDA graph, {difference}"


def _graph_mismatch(op: Operator, before: tuple) -> str | None:
    """What differs between a launch and the replay of a captured one, from the same arguments."""
    given, static, graph = cloned(before), cloned(before), torch.cuda.CUDAGraph()
    expected = results_by_name(op.launch(*given), given)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        outputs = op.launch(*static)
    results = results_by_name(outputs, static)
    for name, result in results.items():
        if name.startswith("result"):
            result.fill_(-7)
    for argument, value in zip(tensor_arguments(static), tensor_arguments(before), strict=True):
        argument.copy_(value)
    graph.replay()
    for name, wrong in differing(op, before, results, expected).items():
        if wrong.any():
            return largest_difference(name, results[name], expected[name], wrong)
    return None


def operators(sizes: Sizes) -> list[Finding]:
    """Every operator of a round on every kind of batch and number; the reducer on random ones.

    Raises:
        HyperDFlashError: a kernel ended the use of the GPU.
    """
    comparison = GraphComparison(sizes.on_gpu)
    with torch.inference_mode(), comparison:
        for case in sizes.cases:
            comparison.exact = case.kind == TIES
            vocabulary = case.vocabulary or sizes.vocabulary
            head = _head(sizes, vocabulary) if case.head else None
            given = sizes.candidates, vocabulary, case.widths or sizes.widths, sizes.device
            rehearse(head, *given, case.kind, case.requests, max(sizes.widths) - 1)
        comparison.exact = False
        for m, d in sizes.reducers:
            for tokens in sizes.tokens:
                hc_gate_reduce(*_reduction(sizes, tokens, m, d), **EPSILONS)
    findings = []
    for name in OPERATORS:
        finding = Finding(name, comparison.wrong.get(name), comparison.batches[name])
        if name in comparison.timed and finding.wrong is None:
            op, arguments = comparison.timed[name]
            finding.note = f"of {list(tensor_arguments(arguments)[0].shape)}"
            with torch.inference_mode(), _caught(finding):
                finding.microseconds = _times(op, arguments)
        findings.append(finding)
    return findings


def _head(sizes: Sizes, vocabulary: int) -> Any:
    """What the operators read of a dependency head; sums of its numbers are exact in any order."""
    generator, shape = torch.Generator().manual_seed(1), (vocabulary, sizes.rank)
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
    if baseline := SGLANG_BASELINES.get(op.name):
        with suppress(Exception):  # another release's, or none
            call = baseline(*arguments)
            call()
            calls["SGLang"] = call
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
SGLANG_BASELINES = {"hc_gate_reduce": _fused_hc_head, "row_statistics": _sampler}


def sglangs_hc_head(sizes: Sizes) -> Finding:
    """The reducer without norms against the kernel of SGLang's ``hc_head``, which it inherits."""
    finding = Finding("hc_gate_reduce as hc_head")
    with torch.inference_mode(), _caught(finding):
        for m, d in sizes.reducers[:1]:  # without norms they are kernels of their own
            for tokens in sizes.tokens:
                arguments = _reduction(sizes, tokens, m, d, norms=False)
                expected = _fused_hc_head(*arguments)()
                result = OPERATORS["hc_gate_reduce"].launch(*arguments, *EPSILONS.values())
                wrong = mismatches(result, expected)
                if wrong.any():
                    finding.wrong = largest_difference(f"{tokens} tokens", result, expected, wrong)
                    return finding
                finding.batches += 1
    return finding


def attention(sizes: Sizes, name: str, layout: str) -> Finding:
    """One backend of a draft on one layout of slots, causal and not."""
    finding, kernel = Finding(f"draft attention, {name}, {layout}"), check_attention.BACKENDS[name]
    with torch.inference_mode(), _caught(finding):
        given = layout, sizes.device, sizes.dtype, sizes.heads, sizes.lengths
        batch = check_attention.new_batch(*given)
        for causal in (False, True):
            difference = check_attention.difference(kernel, batch, causal)
            if difference is not None:
                finding.wrong = f"{'causal' if causal else 'whole block'}: {difference}"
                return finding
            finding.batches += 1
        if sizes.on_gpu:
            call = partial(kernel, batch, True)
            times = interleaved([name], lambda _: events_ms(call), ROUNDS)
            finding.microseconds[name] = statistics.median(times[name]) * 1000
    return finding


@contextmanager
def _caught(finding: Finding) -> Iterator[None]:
    """What is not installed is absent; anything else that is raised is wrong."""
    try:
        yield
    except ImportError as error:
        finding.note = f"not here: {error}".splitlines()[0]
        finding.batches = 0
    except Exception as error:  # a compiler's or a launch's, of any kind
        finding.wrong = f"{type(error).__name__}: {str(error)[:500]}"


def flashinfer(missing: list[str]) -> Finding:
    """Which of FlashInfer's modules are not compiled: a first start compiles two, silently."""
    finding = Finding("FlashInfer's modules", note="compiled")
    if slow := ", ".join(name for name in missing if name != "attention"):
        finding.note = f"the first start compiles {slow}, for minutes"
    if "attention" in missing:
        finding.note += "; --all compiles attention and checks it, for minutes"
    return finding


def examine_gpu(sizes: Sizes, backends: list[str]) -> Iterator[Finding]:
    """Every finding as soon as it is there; raises as :func:`operators`."""
    yield from operators(sizes)
    yield sglangs_hc_head(sizes)
    for name in backends:
        for layout in check_attention.layouts(name):
            yield attention(sizes, name, layout)


def run_gpu(build: bool, report: Path | None) -> int:
    """Print the findings, and write them as JSON, each as soon as it is there; 1 if one is wrong.

    Args:
        build: whether FlashInfer may compile its attention first, for minutes.

    Raises:
        HyperDFlashError: there is no GPU, or not enough of its memory is free.
    """
    if not torch.cuda.is_available():
        raise HyperDFlashError("check --gpu needs a CUDA device; torch found none.")
    reference_operators.clear()  # every kernel is checked, whatever serves
    capability, name = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
    print(f"{name}, sm_{capability[0]}{capability[1]}: kernels are compiled, about a minute")
    missing = check_attention.uncompiled_flashinfer_modules()
    backends = check_attention.backends(capability)
    if "attention" not in missing or build:
        backends.append("flashinfer")
    findings: list[Finding] = []

    def add(finding: Finding) -> None:
        findings.append(finding)
        print(finding.line(), flush=True)
        if report is not None:
            results = {"findings": [asdict(each) for each in findings], "capability": capability}
            results["peak_bytes"] = torch.cuda.max_memory_allocated()
            write_json(report, results | {"provenance": provenance()}, indent=1)

    try:
        for finding in examine_gpu(Sizes(), backends):
            add(finding)
    except torch.OutOfMemoryError as error:
        raise HyperDFlashError(
            f"check --gpu needs some 10 GiB of free GPU memory: {error}"
        ) from error
    except HyperDFlashError as error:
        add(Finding("this GPU", str(error)))
    add(flashinfer(missing))
    print(f"peak memory: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    wrong = [finding.subject for finding in findings if finding.wrong is not None]
    if operators_wrong := [subject for subject in wrong if subject in OPERATORS]:
        print(f"Their torch references serve with {OPERATORS_VARIABLE}={','.join(operators_wrong)}")
    if any(subject.startswith("draft attention") for subject in wrong):
        print("Serve with --speculative-draft-attention-backend triton, or another that is right.")
    return int(bool(wrong))
