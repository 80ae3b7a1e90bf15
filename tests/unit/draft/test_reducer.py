"""The inherited HC-gate reducer against its formula, and its contract."""

from __future__ import annotations

import pytest
import torch

from sglang_hyperdflash.draft import reducer as reducer_module
from sglang_hyperdflash.draft.reducer import FcReducer, HCGateReducer, check_kernels
from triton_ops import hc_gate_reduce

EPSILONS = {"rms_eps": 1e-6, "hc_eps": 1e-6}
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


def random_inputs(n, m, d, norms=(True, True)):
    g = torch.Generator().manual_seed(0)
    hidden, fn, base = (torch.randn(*s, generator=g) for s in ((n, m * d), (m, m * d), (m,)))
    scale, *weights = (torch.rand(*s, generator=g) + 0.5 for s in ((1,), (m, d), (d,)))
    chosen = (norm if wanted else None for norm, wanted in zip(weights, norms, strict=True))
    return [hidden * 3, fn * 0.1, base, scale, *chosen]


@pytest.mark.parametrize("n, m, d", [(0, 4, 16), (6, 1, 3), (6, 4, 16), (6, 8, 5)])
@pytest.mark.parametrize("norms", NORMS)
def test_it_is_the_formula_in_fp32_and_rounded_to_bf16(n, m, d, norms):
    inputs = random_inputs(n, m, d, norms)
    expected = formula(*inputs)
    exact = hc_gate_reduce(*inputs, **EPSILONS)
    torch.testing.assert_close(exact.double(), expected, rtol=2e-5, atol=2e-5)
    inputs[0] = inputs[0].bfloat16()
    rounded = hc_gate_reduce(*inputs, **EPSILONS)
    exact = hc_gate_reduce(inputs[0].float(), *inputs[1:], **EPSILONS)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded, exact.bfloat16())


def test_saturated_gates_zero_rows_and_one_huge_path_stay_finite():
    inputs = random_inputs(4, 4, 16)
    hidden, base = inputs[0], inputs[2]
    hidden[0] = 0
    hidden[1, :16] = 1e18
    base[:] = torch.tensor([1e4, -1e4, 0.0, 50.0])
    reduced = hc_gate_reduce(*inputs, **EPSILONS)
    assert torch.isfinite(reduced).all()
    assert not reduced[0].any()


@pytest.mark.parametrize("norms", [*NORMS, (True, False)])
def test_gradients_in_fp64(norms):
    """The operator's own formulas, by finite differences."""
    tensors = [
        t if t is None else t.double().requires_grad_() for t in random_inputs(3, 2, 4, norms)
    ]
    assert torch.autograd.gradcheck(
        lambda *t: hc_gate_reduce(*t, rms_eps=1e-3, hc_eps=1e-6), tensors
    )


def test_wrong_shapes_are_named():
    shapes = {"residual": (3, 60), "fn": (4, 66), "base": (3,), "scale": (2,)}
    shapes |= {"path_norm": (4, 15), "hidden_norm": (15,)}
    for place, (name, shape) in enumerate(shapes.items()):
        arguments = random_inputs(3, 4, 16)
        arguments[place] = torch.zeros(shape)
        with pytest.raises(ValueError, match=f"{name} must be"):
            hc_gate_reduce(*arguments, **EPSILONS)


def test_a_gate_is_inherited_exactly_or_refused():
    reducer = HCGateReducer(4, 16, **EPSILONS)
    _, fn, base, scale, *_ = random_inputs(7, 4, 16)
    reducer.inherit(fn, base, scale)
    for name, value in (("fn", fn), ("base", base), ("scale", scale)):
        assert torch.equal(getattr(reducer, name), value), name
    with pytest.raises(ValueError, match="fn"):
        reducer.inherit(fn[:2], base, scale)


def test_fc_reducer_is_a_projection_then_the_norm():
    reducer, hidden = FcReducer(32, 8, rms_eps=1e-6), torch.randn(5, 32)
    expected = torch.nn.functional.rms_norm(hidden @ reducer.weight.T, (8,), eps=1e-6) * 2
    torch.testing.assert_close(reducer(hidden, torch.full((8,), 2.0)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_kernel_is_seen_before_it_serves(monkeypatch, dtype):
    reducer, norm = HCGateReducer(4, 64, **EPSILONS), torch.ones(64, dtype=dtype)
    check_kernels(reducer, norm)
    check_kernels(FcReducer(256, 64, rms_eps=1e-6), norm)
    plain = reducer_module.hc_gate_reduce
    wrong = lambda *args, **kwargs: plain(*args, **kwargs) * 1.02  # noqa: E731
    monkeypatch.setattr(reducer_module, "hc_gate_reduce", wrong)
    with pytest.raises(RuntimeError, match="kernel"):
        check_kernels(reducer, norm)
