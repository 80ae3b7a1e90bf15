"""The inherited HC-gate reducer against its formula, and its contract."""

import pytest
import torch

from sglang_hyperdflash.draft.reducer import FcReducer, HCGateReducer
from tests.unit.triton_ops.gate_help import EPSILONS, random_arguments, tensors_of
from triton_ops import hc_gate_reduce

NORMS = [(True, True), (False, True), (False, False)]


def formula(hidden, fn, base, scale, path_norm, hidden_norm):
    """Eq. 1 in fp64."""
    x, m, d = hidden.double(), len(fn), fn.shape[1] // len(fn)

    def normed(v: torch.Tensor) -> torch.Tensor:
        return v / (v.square().mean(-1, keepdim=True) + EPSILONS["rms_eps"]).sqrt()

    gates = torch.sigmoid(normed(x) @ fn.double().T * scale + base) + EPSILONS["hc_eps"]
    paths = x.view(-1, m, d) if path_norm is None else normed(x.view(-1, m, d)) * path_norm
    y = sum(gates[:, j, None] * paths[:, j] for j in range(m))
    return y if hidden_norm is None else normed(y) * hidden_norm


def inputs_of(n, m, d, norms=(True, True)) -> list[torch.Tensor | None]:
    tensors = tensors_of(random_arguments(n, m, d, norms=norms))
    return [None if t is None else t.cpu() for t in tensors]


@pytest.mark.parametrize("n, m, d", [(0, 4, 16), (6, 1, 3), (6, 4, 16), (6, 8, 5)])
@pytest.mark.parametrize("norms", NORMS)
def test_it_is_the_formula_in_fp32_and_rounded_to_bf16(n, m, d, norms):
    inputs = inputs_of(n, m, d, norms)
    inputs[0] = torch.cat([inputs[0]] * 2, 1)[:, : m * d]  # rows of a wider tensor
    if n and m == 4:  # saturated gates, a row of zeros, one huge path
        inputs[2][:] = torch.tensor([1e4, -1e4, 0.0, 50.0])
        inputs[0][0], inputs[0][1, :16] = 0, 1e18
    expected = formula(*inputs)
    exact = hc_gate_reduce(*inputs, **EPSILONS)
    torch.testing.assert_close(exact.double(), expected, rtol=2e-5, atol=2e-5)
    inputs[0] = inputs[0].bfloat16()
    rounded = hc_gate_reduce(*inputs, **EPSILONS)
    exact = hc_gate_reduce(inputs[0].float(), *inputs[1:], **EPSILONS)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded, exact.bfloat16())


@pytest.mark.parametrize("norms", [*NORMS, (True, False)])
def test_gradients_in_fp64(norms):
    """The operator's own formulas, by finite differences."""
    tensors = [t if t is None else t.double().requires_grad_() for t in inputs_of(3, 2, 4, norms)]
    assert torch.autograd.gradcheck(
        lambda *t: hc_gate_reduce(*t, rms_eps=1e-3, hc_eps=1e-6), tensors
    )


def test_a_gate_is_inherited_exactly_or_refused():
    reducer = HCGateReducer(4, 16, **EPSILONS)
    _, *gate = inputs_of(7, 4, 16, (False, False))[:4]
    reducer.inherit(*gate)
    assert all(map(torch.equal, gate, (reducer.fn, reducer.base, reducer.scale)))
    with pytest.raises(ValueError, match="fn"):
        reducer.inherit(gate[0][:2], *gate[1:])


def test_fc_reducer_is_a_projection_then_the_norm():
    reducer, hidden = FcReducer(32, 8, rms_eps=1e-6), torch.randn(5, 32)
    expected = torch.nn.functional.rms_norm(hidden @ reducer.weight.T, (8,), eps=1e-6) * 2
    torch.testing.assert_close(reducer(hidden, torch.full((8,), 2.0)), expected)
