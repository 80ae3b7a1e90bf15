"""The inherited HC-gate reducer against a per-token Python loop, and its contract."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_hyperdflash.draft import reducer as reducer_module
from sglang_hyperdflash.draft.hc_head import HcHead
from sglang_hyperdflash.draft.reducer import FcReducer, HCGateReducer, check_kernels
from triton_ops import hc_gate_reduce, hc_gate_reduce_reference


def loop_reference(hidden, fn, base, scale, path_norm, hidden_norm, rms_eps, hc_eps):
    """Eq. 1 one number at a time, in Python floats."""
    m, width = fn.shape
    d = width // m
    rows = []
    for x in hidden.double().tolist():
        r = 1 / math.sqrt(sum(v * v for v in x) / width + rms_eps)
        y = [0.0] * d
        for j in range(m):
            z = sum(w * v for w, v in zip(fn[j].double().tolist(), x, strict=True)) * r
            gate = 1 / (1 + math.exp(-(z * scale.item() + base[j].item()))) + hc_eps
            path = x[j * d : (j + 1) * d]
            if path_norm is not None:
                rp = 1 / math.sqrt(sum(v * v for v in path) / d + rms_eps)
                path = [v * rp * w for v, w in zip(path, path_norm[j].tolist(), strict=True)]
            y = [a + gate * v for a, v in zip(y, path, strict=True)]
        if hidden_norm is not None:
            ry = 1 / math.sqrt(sum(v * v for v in y) / d + rms_eps)
            y = [v * ry * w for v, w in zip(y, hidden_norm.tolist(), strict=True)]
        rows.append(y)
    return torch.tensor(rows, dtype=torch.float64)


def random_inputs(n, m, d, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(n, m * d, generator=g) * 3).to(dtype)
    fn = torch.randn(m, m * d, generator=g) * 0.1
    base, scale = torch.randn(m, generator=g), torch.rand(1, generator=g) + 0.5
    path_norm = torch.rand(m, d, generator=g) + 0.5
    hidden_norm = torch.rand(d, generator=g) + 0.5
    return hidden, fn, base, scale, path_norm, hidden_norm


@pytest.mark.parametrize("m, d", [(1, 3), (2, 8), (4, 16), (8, 5)])
@pytest.mark.parametrize("norms", [(True, True), (False, True), (False, False)])
def test_matches_the_loop(m, d, norms):
    hidden, fn, base, scale, path_norm, hidden_norm = random_inputs(6, m, d)
    path_norm = path_norm if norms[0] else None
    hidden_norm = hidden_norm if norms[1] else None
    expected = loop_reference(hidden, fn, base, scale, path_norm, hidden_norm, 1e-6, 1e-6)
    found = hc_gate_reduce(
        hidden, fn, base, scale, path_norm, hidden_norm, rms_eps=1e-6, hc_eps=1e-6
    )
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)


def test_without_norms_it_is_the_targets_own_collapse():
    hidden, fn, base, scale, _, _ = random_inputs(9, 4, 32)
    # DeepSeek-V4's own order of operations: gate the streams, then one product.
    inverse_rms = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)
    gates = torch.sigmoid((hidden @ fn.T) * inverse_rms * scale + base) + 1e-6
    expected = torch.bmm(gates.unsqueeze(1), hidden.view(9, 4, 32)).squeeze(1)
    own = HcHead(fn, base, scale).collapse(hidden, rms_eps=1e-6, hc_eps=1e-6)
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)
    found = hc_gate_reduce(hidden, fn, base, scale, None, None, rms_eps=1e-6, hc_eps=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_bf16_output_is_the_rounded_fp32_result():
    hidden, *rest = random_inputs(5, 4, 64, dtype=torch.bfloat16)
    found = hc_gate_reduce(hidden, *rest, rms_eps=1e-6, hc_eps=1e-6)
    exact = hc_gate_reduce(hidden.float(), *rest, rms_eps=1e-6, hc_eps=1e-6)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, exact.to(torch.bfloat16))


def test_saturated_gates_zero_rows_and_one_huge_path_stay_finite():
    hidden, fn, base, scale, path_norm, hidden_norm = random_inputs(4, 4, 16)
    hidden[0] = 0
    hidden[1, :16] = 1e18
    base[:] = torch.tensor([1e4, -1e4, 0.0, 50.0])
    found = hc_gate_reduce(
        hidden, fn, base, scale, path_norm, hidden_norm, rms_eps=1e-6, hc_eps=1e-6
    )
    assert torch.isfinite(found).all()
    assert not found[0].any()


@pytest.mark.parametrize("function", [hc_gate_reduce, hc_gate_reduce_reference])
@pytest.mark.parametrize("norms", [(True, True), (False, True), (True, False), (False, False)])
def test_gradients_in_fp64(function, norms):
    """By finite differences: torch's autograd, and the operator's own formulas."""
    tensors = [t.double().requires_grad_() for t in random_inputs(3, 2, 4)]
    tensors = [*tensors[:4], *(t if n else None for t, n in zip(tensors[4:], norms, strict=True))]

    def reduced(*args):
        return function(*args, rms_eps=1e-3, hc_eps=1e-6)

    assert torch.autograd.gradcheck(reduced, tensors)


def test_empty_batch():
    hidden, *rest = random_inputs(0, 4, 16)
    assert hc_gate_reduce(hidden, *rest, rms_eps=1e-6, hc_eps=1e-6).shape == (0, 16)


@pytest.mark.parametrize(
    "place, shape, message",
    [
        (0, (3, 60), r"must be \[N, 64\]"),
        (1, (4, 66), r"must be \[m, m\*d\]"),
        (2, (3,), "base must be"),
        (3, (2,), "scale must be"),
        (4, (4, 15), "path_norm must be"),
        (5, (15,), "hidden_norm must be"),
    ],
)
def test_wrong_shapes_say_what_was_expected(place, shape, message):
    arguments = list(random_inputs(3, 4, 16))
    arguments[place] = torch.zeros(shape)
    with pytest.raises(ValueError, match=message):
        hc_gate_reduce(*arguments, rms_eps=1e-6, hc_eps=1e-6)


def test_inherits_the_hc_head_exactly_and_refuses_another_shape():
    reducer = HCGateReducer(4, 16, rms_eps=1e-6, hc_eps=1e-6)
    _, fn, base, scale, _, _ = random_inputs(7, 4, 16)
    reducer.inherit(fn, base, scale)
    for name, value in (("fn", fn), ("base", base), ("scale", scale)):
        assert torch.equal(getattr(reducer, name), value), name
    with pytest.raises(ValueError, match="cannot inherit hc_head fn"):
        reducer.inherit(fn[:2], base, scale)


def test_parameter_count_is_the_papers():
    reducer = HCGateReducer(4, 4096, rms_eps=1e-6, hc_eps=1e-6)
    assert reducer.fn.numel() == 65536  # paper, table 1
    assert FcReducer(256, 64, rms_eps=1e-6).weight.shape == (64, 256)


def test_fc_reducer_is_a_projection_then_the_norm():
    reducer = FcReducer(32, 8, rms_eps=1e-6)
    hidden = torch.randn(5, 32)
    y = hidden @ reducer.weight.T
    expected = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * 2
    torch.testing.assert_close(reducer(hidden, torch.full((8,), 2.0)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_kernel_is_found_before_it_serves(monkeypatch, dtype):
    reducer = HCGateReducer(4, 64, rms_eps=1e-6, hc_eps=1e-6)
    hidden_norm = torch.ones(64, dtype=dtype)
    check_kernels(reducer, hidden_norm)
    check_kernels(FcReducer(256, 64, rms_eps=1e-6), hidden_norm)
    plain = reducer_module.hc_gate_reduce

    def off_by_two_percent(*args, **kwargs):
        return plain(*args, **kwargs) * 1.02

    monkeypatch.setattr(reducer_module, "hc_gate_reduce", off_by_two_percent)
    with pytest.raises(RuntimeError, match="kernel is wrong on cpu for 1 tokens"):
        check_kernels(reducer, hidden_norm)
