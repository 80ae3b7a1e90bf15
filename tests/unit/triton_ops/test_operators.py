"""The operators of a round: what they run where, and with which arguments."""

import importlib
import inspect

import pytest

import triton_ops.verification  # noqa: F401  all of them register operators
from triton_ops.operator import OPERATORS

ROUND = sorted(OPERATORS.keys() - {"hc_gate_reduce"})  # whose arguments are checked as one


@pytest.mark.parametrize("name", ROUND)
def test_a_launch_takes_its_reference_s_arguments_in_their_order(name):
    """By position, as an operator calls them; the kernels' tests call some by name."""
    operator = OPERATORS[name]
    module, _, function = operator.kernel.partition(":")
    launch = getattr(importlib.import_module(module), function)
    given, expected = (inspect.signature(f).parameters for f in (launch, operator.reference))
    fixed = [p for p, value in expected.items() if value.kind is not value.VAR_POSITIONAL]
    assert list(given)[: len(fixed)] == fixed
    assert len(given) == len(fixed) or len(fixed) < len(expected)
