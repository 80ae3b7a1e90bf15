"""What of the kernels' benchmark needs no GPU: its traffic model, table, plot and refusals."""

from __future__ import annotations

import json

import pytest
import torch

from triton_ops import bench
from triton_ops.bench_report import plot, table


def row(tokens: int, contenders=("triton", "copy")) -> dict:
    times = {"triton": 10.0, "copy": 8.0, "fused_hc_head": 20.0}
    cells = {
        name: {"median_us": times[name], "quartiles_us": [1.0, 2.0], "tb_per_s": 0.5}
        for name in contenders
    }
    sizes = {"m": 4, "d": 4096, "tokens": tokens, "relative_error": 1e-3, "share_of_copy": 0.8}
    return {**sizes, **cells}


def test_the_least_traffic_of_a_v4_flash_token():
    assert bench.traffic_bytes(1, 4, 4096) == (32 + 8) * 1024


def test_table_has_a_line_for_every_row_and_only_measured_columns():
    lines = table([row(1), row(7)]).splitlines()
    assert len(lines) == 3
    assert "fused_hc_head" not in lines[0]
    assert "80%" in lines[1]
    assert "fused_hc_head" in table([row(1, ("triton", "copy", "fused_hc_head"))])


def test_plot_is_redrawn_from_the_results_file(tmp_path, capsys):
    (tmp_path / "hc_gate.json").write_text(json.dumps({"rows": [row(1), row(7)]}))
    assert bench.main(["--plot-only", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "hc_gate.png").read_bytes()[:4] == b"\x89PNG"
    assert "4 x 4096" in capsys.readouterr().out


def test_nothing_to_plot_is_said(tmp_path, capsys):
    assert bench.main(["--plot-only", "--out", str(tmp_path)]) == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a GPU")
def test_without_a_gpu_it_says_so(tmp_path, capsys):
    assert bench.main(["--out", str(tmp_path)]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_plot_takes_every_contender(tmp_path):
    plot([row(1, ("triton", "copy", "fused_hc_head")), row(8)], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
