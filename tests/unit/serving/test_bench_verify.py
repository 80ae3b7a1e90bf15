"""The benchmark of verification on a CPU: every contender runs, and ours runs the served kernel."""

from __future__ import annotations

import pytest
import torch

from sglang_hyperdflash.serving.verification import exact
from tests.gpu import bench_verify
from tests.gpu.bench_verify import BLOCK, FILTERS, Case, run, table
from triton_ops.gumbel_kernel import launch


def kernel(weights, seeds, positions, rows=None):
    """The Triton kernel; without a GPU in Triton's interpreter."""
    return launch(weights, seeds, positions, rows)


def test_every_contender_runs_and_the_table_has_its_time():
    rows = run((1, 3), 300, 1, "cpu")
    assert [(row["filters"], row["requests"]) for row in rows] == [
        (name, count) for name in FILTERS for count in (1, 3)
    ]
    names = {"seeded", "unseeded", "sglang", "sglang one row"}
    assert all(set(row["median_ms"]) == names for row in rows)
    lines = table(rows).splitlines()
    assert len(lines) == 1 + len(rows) and all(name in lines[0] for name in names)


@pytest.mark.parametrize("name", FILTERS)
def test_what_is_timed_is_a_verification_by_the_kernel(name, monkeypatch):
    torch.manual_seed(0)
    case = Case(3, 300, FILTERS[name], "cpu")
    for seeded in (True, False):
        expected = case.ours(seeded)
        with monkeypatch.context() as patch:
            patch.setattr(exact, "gumbel_argmax", kernel)
            found = case.ours(seeded)
        assert torch.equal(found.correct_drafts, expected.correct_drafts)
        assert torch.equal(found.bonus, expected.bonus)
    assert len(case.sglang(False)) == 3 * BLOCK and len(case.sglang(False, 1)) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a GPU")
def test_without_a_gpu_it_says_so(tmp_path, capsys):
    assert bench_verify.main(["--out", str(tmp_path)]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
