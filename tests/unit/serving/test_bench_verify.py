"""The benchmark of verification on a CPU: every contender runs, and what it times is checked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch

from sglang_hyperdflash.draft import propose
from sglang_hyperdflash.serving.verification import exact
from tests.gpu import bench_verify
from tests.gpu.bench_verify import FILTERS, check, run, table
from triton_ops import accept_kernel, finish_kernel, propose_kernel, rows_kernel, verification

NAMES = {"propose", "rows", "accept", "finish", "learn", "seeded", "unseeded", "softmax", "sglang"}


def test_every_contender_runs_and_the_table_has_its_time():
    rows = run((1, 3), 300, 1, "cpu")
    assert [(row["filters"], row["requests"]) for row in rows] == [
        (name, count) for name in FILTERS for count in (1, 3)
    ]
    assert all(set(row["median_ms"]) > NAMES for row in rows)
    lines = table(rows).splitlines()
    assert len(lines) == 1 + len(rows) and all(name in lines[0] for name in NAMES)


def checked(*kernels: tuple[Any, str, Callable], requests: int) -> dict[str, dict[str, int]]:
    """The check with ``kernels`` in place of operators, as if on the other device."""
    original, cases = bench_verify.outcomes, []

    def outcomes(case):
        cases.append(case)
        if len(cases) % 2:
            return original(case)
        with ExitStack() as stack:
            for module, name, kernel in kernels:
                stack.enter_context(mock.patch.object(module, name, kernel))
            return original(case)

    with mock.patch.object(bench_verify, "outcomes", outcomes):
        found = check("cpu", 300, requests)
    assert len(cases) == 2 * len(FILTERS)
    return found


def test_the_kernels_pass_the_check_that_comes_before_the_times():
    """Interpreted, without a GPU: a few requests."""
    torch.manual_seed(0)
    found = checked(
        (propose, "propose_op", propose_kernel.launch),
        (exact, "row_statistics", rows_kernel.launch),
        (exact, "accept", accept_kernel.launch),
        (exact, "finish", finish_kernel.launch),
        requests=3,
    )
    assert set(found) == set(FILTERS)


WRONG = {
    "finish": (exact, "finish", lambda *a: verification.finish_reference(*a) + 1),
    # Found as: the head of a new drafter, which adds nothing, was in no draft.
    "head": (
        *(propose, "propose_op"),
        lambda ids, scores, *a: propose.propose_reference(ids, scores, *(None,) * 3, *a[3:]),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_kernel_that_draws_something_else_does_not_pass_it(name):
    with pytest.raises(RuntimeError, match="differ"):
        checked(WRONG[name], requests=16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a GPU")
def test_without_a_gpu_it_says_so(tmp_path, capsys):
    assert bench_verify.main(["--out", str(tmp_path)]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
