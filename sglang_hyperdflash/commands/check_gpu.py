"""``hyperdflash check --gpu``: every kernel of a server against its reference, on this GPU.

No checkpoint is needed: inputs are random, in the sizes of DeepSeek-V4-Flash, some with ties, or
with NaN and infinities. The operators need only torch and Triton; checks that need a package that
is not installed are reported as absent.
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
from sglang_hyperdflash.serving.draft_kv.attention import chosen
from sglang_hyperdflash.serving.verification import rehearsal
from sglang_hyperdflash.serving.verification.rehearsal import BROKEN, RANDOM, TIES
from sglang_hyperdflash.tools.atomic import write_json
from sglang_hyperdflash.tools.errors import HyperDFlashError
from sglang_hyperdflash.tools.provenance import provenance
from triton_ops import comparison, hc_gate_reduce
from triton_ops.graph_timing import capture, events_ms, interleaved, replay_us
from triton_ops.operator import OPERATORS, OPERATORS_VARIABLE, Operator, reference_operators

EPSILONS = {"rms_eps": 1e-6, "hc_eps": 1e-6}
CALLS, ROUNDS = 10, 10  # calls in a timed graph, rounds of timing


class Case(NamedTuple):
    """Rounds with one kind of numbers (see ``rehearsal``), with a dependency head or without.

    A vocabulary or widths that are None are those of :class:`Sizes`.
    """

    kind: str
    head: bool
    requests: int = rehearsal.REQUESTS
    vocabulary: int | None = None
    widths: tuple[int, ...] | None = None


CASES = (
    *starmap(Case, product((RANDOM, TIES), (False, True))),
    Case(BROKEN, True),
    Case(RANDOM, False, 65, None, (7,)),  # several programs share a row
    Case(RANDOM, True, 257, 5003, (7,)),  # one program sums several requests in turn
)


@dataclass(frozen=True)
class Sizes:
    """Sizes of DeepSeek-V4-Flash, and the hidden size of DeepSeek-V4-Pro.

    Attributes:
        candidates: K, the candidates of each draft.
        rank: of the dependency head.
        widths: of the rounds.
        reducers: residual paths and hidden size of each reducer.
        tokens: the numbers of tokens that one call reduces.
        heads: query heads, K/V heads, and their width.
        lengths: the tokens of each context.
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


@dataclass
class Finding:
    """One line of the report.

    Attributes:
        wrong: the largest difference and its place, or the exception; None if there is neither.
        batches: the number of compared batches.
        microseconds: the median time of each implementation.
    """

    subject: str
    wrong: str | None = None
    batches: int = 0
    microseconds: dict[str, float] = field(default_factory=dict)
    note: str = ""

    def line(self) -> str:
        """Return the printed line."""
        if self.wrong is not None:
            return f"{self.subject:<38} WRONG  {self.wrong}"
        batches = f"{self.batches} batches" if self.batches else ""
        times = ", ".join(f"{name} {us:,.0f} us" for name, us in self.microseconds.items())
        state = "right" if self.batches else "  -  "
        details = "; ".join(filter(None, (batches, times, self.note)))
        return f"{self.subject:<38} {state}  {details}"


class GraphComparison(comparison.Comparison):
    """Compares each batch a second time on a GPU, replayed from a CUDA graph.

    Attributes:
        timed: each operator with the arguments of its first batch, which are timed later.
    """

    def __init__(self, on_gpu: bool) -> None:
        super().__init__()
        self.on_gpu = on_gpu
        self.timed: dict[str, tuple[Operator, tuple]] = {}

    def difference(
        self, op: Operator, arguments: tuple, before: tuple, expected: comparison.Results
    ) -> str | None:
        difference = super().difference(op, arguments, before, expected)
        if difference is not None or not self.on_gpu:
            return difference
        if op.name not in self.timed:
            self.timed[op.name] = op, comparison.cloned(before)
        difference = _graph_mismatch(op, before)
        return difference and f"in a CUDA graph, {difference}"


def _graph_mismatch(op: Operator, arguments: tuple) -> str | None:
    """Describe how a replay in a CUDA graph differs from a launch with the same arguments."""
    launched, static = comparison.cloned(arguments), comparison.cloned(arguments)
    expected = comparison.results_by_name(op.launch(*launched), launched)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        outputs = op.launch(*static)
    results = comparison.results_by_name(outputs, static)
    for name, result in results.items():
        if name.startswith("result"):
            result.fill_(-7)
    tensors = map(comparison.tensor_arguments, (static, arguments))
    for captured, tensor in zip(*tensors, strict=True):
        captured.copy_(tensor)
    graph.replay()
    for name, wrong in comparison.differing(op, arguments, results, expected).items():
        if wrong.any():
            return comparison.largest_difference(name, results[name], expected[name], wrong)
    return None


def operators(sizes: Sizes) -> list[Finding]:
    """Check the operators of a round on every case, and the reducer on random numbers.

    Raises:
        HyperDFlashError: a kernel ended the use of the GPU.
    """
    graphs = GraphComparison(sizes.device == "cuda")
    with torch.inference_mode(), graphs:
        for case in sizes.cases:
            graphs.exact = case.kind == TIES
            vocabulary = case.vocabulary or sizes.vocabulary
            head = _head(sizes, vocabulary) if case.head else None
            shape = sizes.candidates, vocabulary, case.widths or sizes.widths, sizes.device
            copied = max(sizes.widths) - 1
            rehearsal.rehearse(head, *shape, case.kind, case.requests, copied)
        graphs.exact = False
        for m, d in sizes.reducers:
            for tokens in sizes.tokens:
                hc_gate_reduce(*_reduction(sizes, tokens, m, d), **EPSILONS)
    findings = []
    for name in OPERATORS:
        finding = Finding(name, graphs.wrong.get(name), graphs.batches[name])
        if name in graphs.timed and finding.wrong is None:
            op, arguments = graphs.timed[name]
            finding.note = f"of {list(comparison.tensor_arguments(arguments)[0].shape)}"
            with torch.inference_mode(), _caught(finding):
                finding.microseconds = _times(op, arguments)
        findings.append(finding)
    return findings


def _head(sizes: Sizes, vocabulary: int) -> Any:
    """Return what operators read of a dependency head, whose numbers have exact sums."""
    generator, shape = torch.Generator().manual_seed(1), (vocabulary, sizes.rank)
    tables = (torch.randint(-2, 3, shape, generator=generator) / 8 for _ in range(2))
    predecessor, successor = (table.to(sizes.device, sizes.dtype) for table in tables)
    gate = SimpleNamespace(out_features=sizes.rank)
    return SimpleNamespace(gate=gate, predecessor=predecessor, successor=successor)


def _reduction(sizes: Sizes, tokens: int, m: int, d: int, norms: bool = True) -> tuple:
    """Return random arguments of ``hc_gate_reduce``, of residuals ``[tokens, m * d]``."""
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(sizes.device)

    hidden, fn = (normal(tokens, m * d) * 3).to(sizes.dtype), normal(m, m * d) * (m * d) ** -0.5
    weights = (1 + normal(m, d) / 8, (1 + normal(d) / 8).to(sizes.dtype)) if norms else (None, None)
    return hidden, fn, normal(m), normal(1).abs() + 0.5, *weights


def _times(op: Operator, arguments: tuple) -> dict[str, float]:
    """Return the median microseconds of a call: the kernel in a graph, the others without."""
    calls = {"torch": partial(op.reference, *arguments)}
    if baseline := SGLANG_BASELINES.get(op.name):
        with suppress(Exception):  # another release of SGLang, or none
            call = baseline(*arguments)
            call()
            calls["SGLang"] = call
    graph = capture(lambda _: op.launch(*arguments), CALLS)

    def time_us(name: str) -> float:
        return replay_us(graph, CALLS) if name == "kernel" else events_ms(calls[name]) * 1000

    times = interleaved(["kernel", *calls], time_us, ROUNDS)
    return {name: statistics.median(values) for name, values in times.items()}


def _fused_hc_head(hidden, fn, base, scale, *_) -> Callable[[], Any]:
    from sglang.kernels.ops.layernorm.mhc_head import fused_hc_head

    m = len(fn)
    x = hidden.view(len(hidden), m, -1)
    return partial(fused_hc_head, x, fn, scale, base, EPSILONS["rms_eps"], EPSILONS["hc_eps"])


def _sampler(logits, temperatures, top_ks, seeded, seeds, positions, *_) -> Callable[[], Any]:
    from sglang.srt.layers.sampler import sampling_from_probs_torch

    by_row = temperatures.repeat_interleave(positions.shape[1]).unsqueeze(-1)
    return lambda: sampling_from_probs_torch(torch.softmax(logits / by_row, -1), None, None)


# SGLang's implementations of the same work: the reducer without norms, the sampler without a seed.
SGLANG_BASELINES = {"hc_gate_reduce": _fused_hc_head, "row_statistics": _sampler}


def sglangs_hc_head(sizes: Sizes) -> Finding:
    """Check the reducer without norms against SGLang's kernel of the ``hc_head`` it inherits."""
    finding = Finding("hc_gate_reduce as hc_head")
    with torch.inference_mode(), _caught(finding):
        m, d = sizes.reducers[0]  # one size: without norms every size compiles another kernel
        for tokens in sizes.tokens:
            arguments = _reduction(sizes, tokens, m, d, norms=False)
            expected = _fused_hc_head(*arguments)()
            result = OPERATORS["hc_gate_reduce"].launch(*arguments, *EPSILONS.values())
            wrong = comparison.mismatches(result, expected)
            if wrong.any():
                name = f"{tokens} tokens"
                finding.wrong = comparison.largest_difference(name, result, expected, wrong)
                break
            finding.batches += 1
    return finding


def attention(sizes: Sizes, name: str, layout: str) -> Finding:
    """Check one backend of a draft on one layout of slots, causal and not."""
    finding, kernel = Finding(f"draft attention, {name}, {layout}"), check_attention.BACKENDS[name]
    with torch.inference_mode(), _caught(finding):
        shape = sizes.device, sizes.dtype, sizes.heads, sizes.lengths
        batch = check_attention.new_batch(layout, *shape)
        for causal in (False, True):
            difference = check_attention.difference(kernel, batch, causal)
            if difference is not None:
                finding.wrong = f"{'causal' if causal else 'whole block'}: {difference}"
                return finding
            finding.batches += 1
        if sizes.device == "cuda":
            call = partial(kernel, batch, True)
            times = interleaved([name], lambda _: events_ms(call), ROUNDS)
            finding.microseconds[name] = statistics.median(times[name]) * 1000
    return finding


@contextmanager
def _caught(finding: Finding) -> Iterator[None]:
    """Note a missing package as absent, and any other exception as wrong."""
    try:
        yield
    except ImportError as error:
        finding.note = f"not here: {error}".splitlines()[0]
        finding.batches = 0
    except torch.OutOfMemoryError:  # says nothing about the kernel
        raise
    except Exception as error:  # of the compiler or the launch, of any kind
        finding.wrong = f"{type(error).__name__}: {str(error)[:500]}"


def flashinfer(missing: list[str]) -> Finding:
    """Return the finding about ``missing`` modules; a first start compiles two of them silently."""
    finding = Finding("FlashInfer's modules", note="compiled")
    if slow := ", ".join(name for name in missing if name != "attention"):
        finding.note = f"the first start compiles {slow}, for minutes"
    if "attention" in missing:
        finding.note += "; --all compiles attention and checks it, for minutes"
    return finding


def examine_gpu(sizes: Sizes, backends: list[str]) -> Iterator[Finding]:
    """Yield every finding as soon as it is known; raises as :func:`operators` does."""
    yield from operators(sizes)
    yield sglangs_hc_head(sizes)
    for name in backends:
        for layout in check_attention.layouts(name):
            yield attention(sizes, name, layout)


def run_gpu(build: bool, report: Path | None) -> int:
    """Print each finding as soon as it is known; return 1 if one is wrong, otherwise 0.

    Args:
        build: whether FlashInfer may compile its attention first, for minutes.
        report: the file of the findings as JSON, or None.

    Raises:
        HyperDFlashError: there is no GPU, or not enough of its memory is free.
    """
    if not torch.cuda.is_available():
        raise HyperDFlashError("check --gpu needs a CUDA device; torch found none.")
    reference_operators.clear()  # every kernel is checked, whatever serves
    capability, name = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
    major, minor = capability
    print(f"{name}, sm_{major}{minor}: kernels are compiled, about a minute")
    missing = check_attention.uncompiled_flashinfer_modules()
    default, _ = chosen("dsv4", None, (), sm90=major == 9, sm100=major == 10)
    backends = list(dict.fromkeys([default, "triton"]))  # which do not compile for minutes
    if "attention" not in missing or build:
        backends.append("flashinfer")
    findings: list[Finding] = []

    def add(finding: Finding) -> None:
        findings.append(finding)
        print(finding.line(), flush=True)
        if report is not None:
            content = {"findings": list(map(asdict, findings)), "capability": capability}
            content |= {"peak_bytes": torch.cuda.max_memory_allocated(), "provenance": provenance()}
            write_json(report, content, indent=1)

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
