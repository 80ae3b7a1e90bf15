"""The reducer: its kernel against fp64, on a GPU or interpreted; gradients and checks."""

import dataclasses

import pytest
import torch

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
from triton_ops import hc_gate_kernel, hc_gate_reduce
from triton_ops.hc_gate import GateArguments, hc_gate_reduce_reference


def in_fp64(a: GateArguments) -> torch.Tensor:
    wide = (t if t is None else t.double().cpu() for t in tensors_of(a))
    return hc_gate_reduce_reference(*wide, **EPSILONS)


def reduced(a: GateArguments) -> torch.Tensor:
    """The kernel's result, poisoned before: what it does not write stays NaN."""
    out = torch.full((len(a.hidden), a.d), float("nan"), dtype=a.hidden.dtype, device=DEVICE)
    hc_gate_kernel.launch(a, out)
    return out


def check(a: GateArguments, limit: float | None = None) -> torch.Tensor:
    """The kernel's result, after the comparison with the reference's."""
    out = reduced(a)
    assert relative_error(out, in_fp64(a)) < (limit or TOLERANCE[a.hidden.dtype])
    return out


@pytest.mark.parametrize(
    ("n", "m", "d", "dtype", "norms"),  # tokens, paths, width; path norm, hidden norm
    [
        (1, 4, 64, BF16, (True, True)),
        (3, 4, 192, BF16, (True, False)),
        (2, 2, 320, FP16, (False, True)),
        (3, 8, 64, BF16, (True, True)),
        (2, 1, 128, FP32, (False, False)),
        (3, 4, 192, FP32, (True, True)),
    ],
)
def test_the_kernel_is_the_reference(n, m, d, dtype, norms):
    check(random_arguments(n, m, d, dtype=dtype, norms=norms))


def test_saturated_gates_zero_rows_and_one_huge_path():
    a = random_arguments(4, 4, 64)
    a.hidden[0] = 0
    a.hidden[1, :64] = 1e15
    a.hidden[2] *= 1e-12
    a.base[:] = torch.tensor([1e4, -1e4, 0.0, 50.0])
    out = check(a)
    assert torch.isfinite(out).all()
    assert not out[0].any()


def test_paths_that_cancel_keep_their_digits():
    """With y a thousandth of each path, the squares of y lose six digits as a Gram form."""
    a = random_arguments(3, 2, 128, norms=(False, True))
    first, second = a.hidden.view(3, 2, 128).unbind(1)
    second.copy_(-first * (1 + 1e-3 * torch.randn_like(first)))
    a.fn[:], a.base[:] = 0, 0
    # y itself holds only 1e-7 / 1e-3 of its size; its norm must not be worse than that.
    check(a, 2e-4)


def test_row_stride_past_two_to_the_31():
    stride = 2**31 + 64
    a = random_arguments(2, 2, 64, dtype=BF16)
    memory = torch.empty(stride + 128, dtype=BF16, device=DEVICE)
    far = torch.as_strided(memory, (2, 128), (stride, 1))
    far.copy_(a.hidden)
    moved = GateArguments(far, *tensors_of(a)[1:], **EPSILONS).check()
    assert torch.equal(reduced(moved), reduced(a))


def test_compiled_or_with_a_frozen_target_it_gives_the_same_values_and_gradients():
    a = random_arguments(9, 4, 64)
    eager, traced, frozen = ([t.clone().requires_grad_() for t in tensors_of(a)] for _ in range(3))

    def squares(*tensors):
        return hc_gate_reduce(*tensors, **EPSILONS).square()

    # The CPU platform turns torch.compile off for SGLang in the whole process.
    with torch._dynamo.config.patch(disable=False):
        result = torch.compile(squares, backend="aot_eager", fullgraph=True)(*traced)
    expected = squares(*eager)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(squares(*tensors_of(a)), expected)
    frozen[0].requires_grad_(False)
    for values in (expected, result, squares(*frozen)):
        values.sum().backward()
    assert frozen[0].grad is None
    for wanted, *ours in zip(eager, traced, [traced[0], *frozen[1:]], strict=True):
        for tensor in ours:
            torch.testing.assert_close(tensor.grad, wanted.grad)


def test_wrong_shapes_dtypes_devices_and_strides_are_named():
    a = random_arguments(3, 4, 64)
    shapes = {"fn": (4, 258), "base": (3,), "scale": (2,)}
    shapes |= {"path_norm": (4, 63), "hidden_norm": (63,)}
    for wrong, error, said in (
        ({"hidden": a.hidden.int()}, TypeError, "hidden"),
        ({"hidden": a.hidden.T.contiguous().T}, ValueError, "residual"),
        ({"hidden": a.hidden[:, 1:]}, ValueError, "residual"),
        ({"fn": a.fn.to("meta")}, ValueError, "fn"),
        ({"fn": a.fn.T.contiguous().T}, ValueError, "fn"),
        *(({name: a.fn.new_zeros(shape)}, ValueError, name) for name, shape in shapes.items()),
    ):
        with pytest.raises(error, match=said):
            hc_gate_reduce(*tensors_of(dataclasses.replace(a, **wrong)), **EPSILONS)


@pytest.mark.parametrize("m, d", [(3, 64), (16, 64), (4, 96), (1, 65536)])
def test_sizes_that_cuda_does_not_take_are_refused(m, d):
    shapes = (2, m * d), (m, m * d), (m,), (1,)
    tensors = (torch.empty(shape, device="meta") for shape in shapes)
    with pytest.raises(ValueError, match=rf"m={m}, d={d}"):
        GateArguments(*tensors, None, None, **EPSILONS).check_kernel_limits()
