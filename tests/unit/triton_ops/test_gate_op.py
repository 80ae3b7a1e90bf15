"""The operator torch.compile sees, and the checks in front of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.unit.triton_ops.gate_help import EPSILONS, random_arguments, relative_error, tensors_of
from triton_ops import hc_gate_reduce, hc_gate_reduce_reference
from triton_ops.hc_gate import GateArguments
from triton_ops.hc_gate_op import hc_gate_reduce_backward_op, hc_gate_reduce_op, reduce_reference

NORMS = [(True, True), (False, False)]


def with_gradients(a: GateArguments) -> list[torch.Tensor | None]:
    return [t if t is None else t.clone().requires_grad_() for t in tensors_of(a)]


@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operators_pass_torchs_own_checks(norms, dtype):
    a = random_arguments(5, 2, 64, dtype=dtype, norms=norms)
    torch.library.opcheck(hc_gate_reduce_op, (*with_gradients(a), 1e-6, 1e-6))
    grad = torch.ones(5, 64, dtype=dtype, device=a.hidden.device)
    arguments = (grad, *tensors_of(a), reduce_reference(a)[1], 1e-6, 1e-6)
    for need_hidden in (True, False):
        torch.library.opcheck(hc_gate_reduce_backward_op, (*arguments, need_hidden))


@pytest.fixture
def _dynamo():
    """The CPU platform turns torch.compile off for SGLang in the whole process."""
    with torch._dynamo.config.patch(disable=False):
        yield


@pytest.mark.usefixtures("_dynamo")
@pytest.mark.parametrize("norms", NORMS)
def test_compiled_whole_it_gives_the_same_values_and_gradients(norms):
    a = random_arguments(9, 4, 64, norms=norms)
    eager, traced = with_gradients(a), with_gradients(a)

    def reduced(*tensors):
        return hc_gate_reduce(*tensors, **EPSILONS).square()

    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        torch.compile(reduced, backend=backend, fullgraph=True)(*traced)
    assert "hyperdflash.hc_gate_reduce" in graphs[0].code
    compiled = torch.compile(reduced, backend="aot_eager", fullgraph=True)
    expected, found = reduced(*eager), compiled(*traced)
    torch.testing.assert_close(found, expected)
    expected.sum().backward()
    found.sum().backward()
    for ours, wanted in zip(traced, eager, strict=True):
        if wanted is not None:
            torch.testing.assert_close(ours.grad, wanted.grad)


def test_training_and_serving_take_the_same_values():
    a = random_arguments(9, 4, 64, dtype=torch.bfloat16)
    trained = hc_gate_reduce(*with_gradients(a), **EPSILONS)
    assert trained.requires_grad
    with torch.inference_mode():
        served = hc_gate_reduce(*tensors_of(a), **EPSILONS)
    assert torch.equal(trained, served)


def test_a_frozen_target_gets_no_gradient():
    a = random_arguments(9, 4, 64)
    hidden, *weights = with_gradients(a)
    hidden.requires_grad_(False)
    hc_gate_reduce(hidden, *weights, **EPSILONS).sum().backward()
    assert hidden.grad is None
    plain = with_gradients(a)
    hc_gate_reduce_reference(*plain, **EPSILONS).sum().backward()
    for ours, wanted in zip(weights, plain[1:], strict=True):
        assert relative_error(ours.grad, wanted.grad) < 1e-5


def replaced(**changes) -> GateArguments:
    return dataclasses.replace(random_arguments(3, 4, 64), **changes)


def test_wrong_dtypes_devices_and_strides_say_what_was_found():
    a = random_arguments(3, 4, 64)
    cases = [
        ({"hidden": a.hidden.int()}, TypeError, r"hidden must be one of .*; found torch.int32"),
        ({"fn": a.fn.to("meta")}, ValueError, "fn is on meta, the residual on"),
        ({"fn": a.fn.T.contiguous().T}, ValueError, "fn must be contiguous"),
        ({"hidden": a.hidden.T.contiguous().T}, ValueError, "unit stride along its columns"),
    ]
    for changes, error, message in cases:
        with pytest.raises(error, match=message):
            hc_gate_reduce(*tensors_of(replaced(**changes)), **EPSILONS)


def test_rows_of_a_wider_tensor_need_no_copy():
    a = random_arguments(3, 4, 64)
    wide = torch.cat([a.hidden, a.hidden], dim=1)[:, :256]
    assert not wide.is_contiguous()
    found = hc_gate_reduce(wide, *tensors_of(a)[1:], **EPSILONS)
    assert torch.equal(found, hc_gate_reduce(*tensors_of(a), **EPSILONS))


@pytest.mark.parametrize("m, d", [(3, 64), (16, 64), (4, 96), (1, 65536)])
def test_sizes_that_cuda_does_not_take_are_refused(m, d):
    sizes = GateArguments(
        torch.empty(2, m * d, device="meta"),
        torch.empty(m, m * d, device="meta"),
        torch.empty(m, device="meta"),
        torch.empty(1, device="meta"),
        None,
        None,
        **EPSILONS,
    )
    with pytest.raises(ValueError, match=rf"found m={m}, d={d}"):
        sizes.check_kernel_limits()
