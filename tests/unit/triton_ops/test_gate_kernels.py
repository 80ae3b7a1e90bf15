"""The Triton gate kernels against fp64: on a GPU where there is one, else interpreted."""

from __future__ import annotations

import pytest
import torch

from tests.unit.triton_ops.gate_help import (
    DEVICE,
    EPSILONS,
    TOLERANCE,
    bf16_dot_in_the_interpreter,
    in_fp64,
    random_arguments,
    relative_error,
    tensors_of,
)
from triton_ops import hc_gate_row, hc_gate_tiles
from triton_ops.hc_gate import GateArguments, hc_gate_reduce_reference
from triton_ops.hc_gate_backward import backward_triton
from triton_ops.hc_gate_op import reduce_reference

KERNELS = ("row", "tile")
# Sizes with every dtype: bf16 throughout, and each of the others once.
ODD_SIZES = [(1, 4, 64), (70, 4, 192), (33, 2, 320), (3, 8, 64)]
CASES = [(torch.bfloat16, *sizes) for sizes in ODD_SIZES]
CASES += [(torch.float32, *ODD_SIZES[1]), (torch.float16, *ODD_SIZES[2])]
NORMS = [(True, True), (True, False), (False, True), (False, False)]


@pytest.fixture(autouse=True)
def _bf16_dot():
    if DEVICE == "cuda":
        yield
    else:
        with bf16_dot_in_the_interpreter():
            yield


def forward(kernel: str, a: GateArguments, columns: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
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


def check_forward(kernel: str, a: GateArguments, columns: int = 128) -> None:
    exact = in_fp64(a)
    expected = hc_gate_reduce_reference(*tensors_of(exact), **EPSILONS)
    out, stats = forward(kernel, a, columns)
    assert relative_error(out, expected) < TOLERANCE[a.hidden.dtype]
    # The gate products of 16-bit inputs go through two 16-bit terms of each weight.
    limit = 1e-6 if a.hidden.dtype == torch.float32 else 5e-5
    wanted = reduce_reference(exact)[1]
    for rows in (slice(0, a.m), slice(a.m, 2 * a.m), slice(2 * a.m, None)):
        assert relative_error(stats[rows], wanted[rows]) < limit


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype, n, m, d", [*CASES, (torch.float32, 65, 1, 128)])
def test_forward_on_odd_sizes(kernel, dtype, n, m, d):
    check_forward(kernel, random_arguments(n, m, d, dtype=dtype, seed=n + d))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("norms", NORMS)
def test_forward_with_and_without_each_norm(kernel, norms):
    check_forward(kernel, random_arguments(67, 4, 192, norms=norms))


def test_many_tiles_and_slices_wait_for_each_other_in_order():
    check_forward("tile", random_arguments(1100, 2, 256), columns=64)


@pytest.mark.parametrize("kernel", KERNELS)
def test_saturated_gates_zero_rows_and_one_huge_path(kernel):
    a = random_arguments(6, 4, 64)
    a.hidden[0] = 0
    a.hidden[1, :64] = 1e15
    a.hidden[2] *= 1e-12
    a.base[:] = torch.tensor([1e4, -1e4, 0.0, 50.0])
    check_forward(kernel, a)
    out, _ = forward(kernel, a)
    assert torch.isfinite(out).all()
    assert not out[0].any()


@pytest.mark.parametrize("tokens", [1, 64, 65, 300])
def test_no_number_of_tokens_recompiles_the_tiles(tokens, monkeypatch):
    """Triton compiles again for a pointer that is not aligned to 16 bytes as the first one was."""
    given = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **constants: given.extend(arguments)

    monkeypatch.setattr(hc_gate_tiles, "_tile_kernel", Kernel())
    forward("tile", random_arguments(tokens, 4, 192))
    pointers = [x for x in given if isinstance(x, torch.Tensor)]
    assert len(pointers) == 12 and all(x.data_ptr() % 16 == 0 for x in pointers)


@pytest.mark.parametrize("kernel", KERNELS)
def test_paths_that_cancel_keep_their_digits(kernel):
    """With y a thousandth of each path, the squares of y lose six digits as a Gram form."""
    a = random_arguments(66, 2, 128, norms=(False, True))
    first, second = a.hidden.view(66, 2, 128).unbind(1)
    second.copy_(-first * (1 + 1e-3 * torch.randn_like(first)))
    a.fn[:], a.base[:] = 0, 0
    out, _ = forward(kernel, a)
    expected = hc_gate_reduce_reference(*tensors_of(in_fp64(a)), **EPSILONS)
    # y itself holds only 1e-7 / 1e-3 of its size; its norm must not be worse than that.
    assert relative_error(out, expected) < 2e-4


@pytest.mark.parametrize("kernel", KERNELS)
def test_row_stride_past_two_to_the_31(kernel):
    stride = 2**31 + 64
    a = random_arguments(2, 2, 64, dtype=torch.bfloat16)
    memory = torch.empty(stride + 128, dtype=torch.bfloat16, device=DEVICE)
    far = torch.as_strided(memory, (2, 128), (stride, 1))
    far.copy_(a.hidden)
    moved = GateArguments(far, *tensors_of(a)[1:], **EPSILONS).check()
    assert torch.equal(forward(kernel, moved)[0], forward(kernel, a)[0])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_more_than_two_to_the_31_elements():
    n, m, d = 2**31 // (4 * 4096) + 100, 4, 4096
    a = random_arguments(4, m, d, dtype=torch.bfloat16)
    rows = a.hidden.repeat(n // 4, 1)
    big = GateArguments(rows, *tensors_of(a)[1:], **EPSILONS).check()
    out, _ = forward("tile", big, columns=256)
    assert torch.equal(out[-4:], out[:4])
    assert relative_error(out[-4:], forward("row", a)[0]) < TOLERANCE[torch.bfloat16]


def autograd_reference(a: GateArguments, grad: torch.Tensor) -> list[torch.Tensor]:
    exact = [t if t is None else t.requires_grad_() for t in tensors_of(in_fp64(a))]
    out = hc_gate_reduce_reference(*exact, **EPSILONS)
    out.backward(grad.double().cpu())
    return [torch.empty(0) if t is None else t.grad for t in exact]


@pytest.mark.parametrize("dtype, n, m, d", CASES)
def test_backward_on_odd_sizes(dtype, n, m, d):
    check_backward(random_arguments(n, m, d, dtype=dtype, seed=n + d))


# One path under a hidden norm is left out: there the gate cancels, its gradient is rounding.
@pytest.mark.parametrize(
    "m, norms", [*((4, norms) for norms in NORMS), (1, (True, False)), (1, (False, False))]
)
def test_backward_with_and_without_each_norm(m, norms):
    check_backward(random_arguments(40, m, 128, norms=norms))


def test_backward_of_several_runs_of_tokens():
    check_backward(random_arguments(1100, 2, 64))


def test_backward_of_saturated_gates_and_zero_rows():
    a = random_arguments(6, 4, 64)
    a.hidden[0] = 0
    a.base[:] = torch.tensor([1e4, -1e4, 0.0, 1.0], device=DEVICE)
    check_backward(a)


def check_backward(a: GateArguments) -> None:
    grad = torch.randn(len(a.hidden), a.d, generator=torch.Generator().manual_seed(1))
    grad = grad.to(a.hidden.dtype).to(DEVICE)
    stats = reduce_reference(in_fp64(a))[1].float().to(DEVICE)
    found = backward_triton(a, grad, stats, need_hidden=True)
    expected = autograd_reference(a, grad)
    names = ("hidden", "fn", "base", "scale", "path_norm", "hidden_norm")
    for name, ours, wanted in zip(names, found, expected, strict=True):
        assert ours.shape == wanted.shape, name
        limit = TOLERANCE[a.hidden.dtype] if name == "hidden" else 2e-5
        assert relative_error(ours, wanted) < limit, name


def test_backward_leaves_out_the_residuals_gradient_unless_asked():
    a = random_arguments(5, 2, 64)
    stats = reduce_reference(a)[1]
    with_hidden = backward_triton(a, torch.ones(5, 64, device=DEVICE), stats, need_hidden=True)
    without = backward_triton(a, torch.ones(5, 64, device=DEVICE), stats, need_hidden=False)
    assert without[0].numel() == 0
    for ours, wanted in zip(without[1:], with_hidden[1:], strict=True):
        assert torch.equal(ours, wanted)


def test_no_tokens():
    a = random_arguments(0, 2, 64)
    gradients = backward_triton(a, torch.ones(0, 64, device=DEVICE), reduce_reference(a)[1], True)
    assert [g.shape for g in gradients] == [t.shape for t in tensors_of(a)]
    assert not any(g.any() for g in gradients)
