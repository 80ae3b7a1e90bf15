"""The reducer: kernels against fp64, on a GPU or interpreted; operator and checks."""

import dataclasses

import pytest
import torch
from triton.language import float32
from triton.runtime.interpreter import InterpreterBuilder

from tests.unit.triton_ops.gate_help import (
    BF16,
    DEVICE,
    EPSILONS,
    FP16,
    FP32,
    TOLERANCE,
    random_arguments,
    relative_error,
    tensors_of,
)
from triton_ops import hc_gate_backward_kernels, hc_gate_reduce, hc_gate_row, hc_gate_tiles
from triton_ops.hc_gate import GateArguments, hc_gate_reduce_reference
from triton_ops.hc_gate_backward import backward_triton
from triton_ops.hc_gate_op import reduce_reference

kernels = pytest.mark.parametrize("kernel", ["row", "tile"])
# Tokens, paths, width, dtype; path norm, hidden norm. 130 tokens are three tiles of the forward.
CASES = pytest.mark.parametrize(
    ("n", "m", "d", "dtype", "norms"),
    [
        (1, 4, 64, BF16, (True, True)),
        (70, 4, 192, BF16, (True, False)),
        (130, 2, 320, FP16, (False, True)),
        (3, 8, 64, BF16, (True, True)),
        (65, 1, 128, FP32, (False, False)),
        (33, 4, 192, FP32, (True, True)),
    ],
)


@pytest.fixture(autouse=True)
def _bf16_dot_and_short_runs(monkeypatch):
    monkeypatch.setattr(hc_gate_backward_kernels, "RUN", 2)  # 130 tokens are three runs
    plain = InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest):
        """Triton's interpreter would multiply the 16-bit integers that it keeps bf16 in."""
        return plain(self, *(self.create_fp_ext(x, float32) for x in (a, b)), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def in_fp64(a: GateArguments) -> GateArguments:
    """The same arguments in fp64 on the CPU."""
    wide = (t if t is None else t.double().cpu() for t in tensors_of(a))
    return GateArguments(*wide, **EPSILONS)


def forward(kernel: str, a: GateArguments, columns: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one kernel into poisoned outputs: what it does not write stays NaN."""
    n, nan = len(a.hidden), float("nan")
    out = torch.full((n, a.d), nan, dtype=a.hidden.dtype, device=DEVICE)
    stats = torch.full((2 * a.m + 1, n), nan, device=DEVICE)
    if kernel == "row":
        hc_gate_row.launch(a, out, stats)
    else:
        chunk = hc_gate_tiles.TileShape.for_sizes(a.m, a.hidden.dtype).chunk
        shape = hc_gate_tiles.TileShape(columns=columns, chunk=chunk)
        hc_gate_tiles.launch(a, out, stats, shape, lag=1)
    return out, stats


def check_forward(kernel: str, a: GateArguments) -> torch.Tensor:
    exact = in_fp64(a)
    out, stats = forward(kernel, a)
    wanted, wanted_stats = reduce_reference(exact)
    assert relative_error(out, wanted) < TOLERANCE[a.hidden.dtype]
    # The gate products of 16-bit inputs go through two 16-bit terms of each weight.
    # On a GPU those of fp32 go through three TF32 products.
    limit = {"cpu": 1e-6, "cuda": 1e-5}[DEVICE] if a.hidden.dtype == FP32 else 5e-5
    for rows in (slice(0, a.m), slice(a.m, 2 * a.m), slice(2 * a.m, None)):
        assert relative_error(stats[rows], wanted_stats[rows]) < limit
    return out


@kernels
@CASES
def test_forward_is_the_reference(kernel, n, m, d, dtype, norms):
    tokens = min(n, 3) if kernel == "row" else n  # a program takes one token
    check_forward(kernel, random_arguments(tokens, m, d, dtype=dtype, norms=norms))


@kernels
def test_saturated_gates_zero_rows_and_one_huge_path(kernel):
    a = random_arguments(4, 4, 64)
    a.hidden[0] = 0
    a.hidden[1, :64] = 1e15
    a.hidden[2] *= 1e-12
    a.base[:] = torch.tensor([1e4, -1e4, 0.0, 50.0])
    out = check_forward(kernel, a)
    assert torch.isfinite(out).all()
    assert not out[0].any()


@kernels
def test_paths_that_cancel_keep_their_digits(kernel):
    """With y a thousandth of each path, the squares of y lose six digits as a Gram form."""
    a = random_arguments(3, 2, 128, norms=(False, True))
    first, second = a.hidden.view(3, 2, 128).unbind(1)
    second.copy_(-first * (1 + 1e-3 * torch.randn_like(first)))
    a.fn[:], a.base[:] = 0, 0
    out, _ = forward(kernel, a)
    expected = hc_gate_reduce_reference(*tensors_of(in_fp64(a)), **EPSILONS)
    # y itself holds only 1e-7 / 1e-3 of its size; its norm must not be worse than that.
    assert relative_error(out, expected) < 2e-4


@kernels
def test_row_stride_past_two_to_the_31(kernel):
    stride = 2**31 + 64
    a = random_arguments(2, 2, 64, dtype=BF16)
    memory = torch.empty(stride + 128, dtype=BF16, device=DEVICE)
    far = torch.as_strided(memory, (2, 128), (stride, 1))
    far.copy_(a.hidden)
    moved = GateArguments(far, *tensors_of(a)[1:], **EPSILONS).check()
    assert torch.equal(forward(kernel, moved)[0], forward(kernel, a)[0])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_more_than_two_to_the_31_elements():
    n, m, d = 2**31 // (4 * 4096) + 100, 4, 4096
    a = random_arguments(4, m, d, dtype=BF16)
    rows = a.hidden.repeat(n // 4, 1)
    out, _ = forward("tile", GateArguments(rows, *tensors_of(a)[1:], **EPSILONS).check(), 256)
    assert torch.equal(out[-4:], out[:4])
    assert relative_error(out[-4:], forward("row", a)[0]) < TOLERANCE[BF16]


def with_gradients(a: GateArguments) -> list[torch.Tensor | None]:
    return [t if t is None else t.clone().requires_grad_() for t in tensors_of(a)]


def check_backward(a: GateArguments) -> None:
    grad = torch.randn(len(a.hidden), a.d, generator=torch.Generator().manual_seed(1))
    grad = grad.to(a.hidden.dtype).to(DEVICE)
    stats = reduce_reference(in_fp64(a))[1].float().to(DEVICE)
    gradients = backward_triton(a, grad, stats, need_hidden=True)
    no_hidden, *others = backward_triton(a, grad, stats, need_hidden=False)
    assert no_hidden.numel() == 0 and all(map(torch.equal, others, gradients[1:]))
    exact = with_gradients(in_fp64(a))
    hc_gate_reduce_reference(*exact, **EPSILONS).backward(grad.double().cpu())
    expected = [torch.empty(0) if t is None else t.grad for t in exact]
    limits = TOLERANCE[a.hidden.dtype], *[2e-5] * 5
    for place, (ours, wanted, limit) in enumerate(zip(gradients, expected, limits, strict=True)):
        assert ours.shape == wanted.shape, place
        assert relative_error(ours, wanted) < limit, place


@pytest.mark.heavy
@CASES
def test_backward_is_autograds(n, m, d, dtype, norms):
    check_backward(random_arguments(n, m, d, dtype=dtype, norms=norms))


def test_backward_of_no_tokens_saturated_gates_and_a_zero_row():
    check_backward(random_arguments(0, 2, 64))
    a = random_arguments(6, 4, 64)
    a.hidden[0] = 0
    a.base[:] = torch.tensor([1e4, -1e4, 0.0, 1.0], device=DEVICE)
    check_backward(a)


@pytest.mark.parametrize("norms", [(True, True), (False, False)])
def test_compiled_or_of_a_frozen_target_it_gives_the_same_values_and_gradients(norms):
    a = random_arguments(9, 4, 64, norms=norms)
    eager, traced, graphs = with_gradients(a), with_gradients(a), []

    def reduced(*tensors):
        return hc_gate_reduce(*tensors, **EPSILONS).square()

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    # The CPU platform turns torch.compile off for SGLang in the whole process.
    with torch._dynamo.config.patch(disable=False):
        with torch.no_grad():
            torch.compile(reduced, backend=backend, fullgraph=True)(*traced)
        result = torch.compile(reduced, backend="aot_eager", fullgraph=True)(*traced)
    assert "hyperdflash.hc_gate_reduce" in graphs[0].code
    expected = reduced(*eager)
    torch.testing.assert_close(result, expected)
    frozen = with_gradients(a)
    frozen[0].requires_grad_(False)
    for values in (expected, result, reduced(*frozen)):
        values.sum().backward()
    assert frozen[0].grad is None
    for wanted, *ours in zip(eager, traced, [traced[0], *frozen[1:]], strict=True):
        for tensor in ours if wanted is not None else ():
            torch.testing.assert_close(tensor.grad, wanted.grad)


def test_wrong_dtypes_devices_and_strides_are_refused():
    a = random_arguments(3, 4, 64)
    for wrong, error, said in (
        ({"hidden": a.hidden.int()}, TypeError, "hidden"),
        ({"hidden": a.hidden.T.contiguous().T}, ValueError, "residual"),
        ({"fn": a.fn.to("meta")}, ValueError, "fn"),
        ({"fn": a.fn.T.contiguous().T}, ValueError, "fn"),
    ):
        with pytest.raises(error, match=said):
            hc_gate_reduce(*tensors_of(dataclasses.replace(a, **wrong)), **EPSILONS)


@pytest.mark.parametrize("m, d", [(3, 64), (16, 64), (4, 96), (1, 65536)])
def test_sizes_that_cuda_does_not_take_are_refused(m, d):
    shapes = (2, m * d), (m, m * d), (m,), (1,)
    tensors = (torch.empty(shape, device="meta") for shape in shapes)
    with pytest.raises(ValueError, match=rf"m={m}, d={d}"):
        GateArguments(*tensors, None, None, **EPSILONS).check_kernel_limits()
