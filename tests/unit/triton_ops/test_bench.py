"""What of the kernels' benchmark needs no GPU: its traffic model, table, plot and refusals."""

from __future__ import annotations

import json

import pytest
import torch

from triton_ops import bench


def test_table_and_plot_are_made_again_from_the_results_file(tmp_path, capsys):
    assert bench.traffic_bytes(1, 4, 4096) == (32 + 8) * 1024
    times = {"median_us": 10.0, "quartiles_us": [1.0, 2.0], "tb_per_s": 0.5}
    sizes = {"m": 4, "d": 4096, "relative_error": 1e-3, "share_of_copy": 0.8}
    row = sizes | dict.fromkeys(("triton", "fused_hc_head", "copy"), times)
    rows = [row | {"tokens": 1}, row | {"tokens": 7}]
    del rows[1]["fused_hc_head"]
    (tmp_path / "hc_gate.json").write_text(json.dumps({"rows": rows}))
    assert bench.main(["--plot-only", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "hc_gate.png").read_bytes()[:4] == b"\x89PNG"
    head, *lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and "fused_hc_head" in head and "eager" not in head
    assert "80%" in lines[0]


@pytest.mark.parametrize("arguments", [["--plot-only"], []])
def test_without_results_or_a_gpu_it_fails(tmp_path, arguments):
    if not arguments and torch.cuda.is_available():
        pytest.skip("this is about machines without a GPU")
    assert bench.main([*arguments, "--out", str(tmp_path)]) == 2
    assert not list(tmp_path.iterdir())
