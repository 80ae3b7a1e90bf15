"""What of the kernels' benchmark needs no GPU: its traffic model, table, plot and refusals."""

import json

import torch

from tests.gpu import bench


def test_table_and_plot_are_made_again_from_the_results_file(tmp_path, capsys):
    assert bench.traffic_bytes(1, 4, 4096) == (32 + 8) * 1024
    command = ["--plot-only", "--out", str(tmp_path)]
    assert bench.main(command) == 2
    assert torch.cuda.is_available() or bench.main(command[1:]) == 2
    assert not list(tmp_path.iterdir())
    times = {"median_us": 10.0, "quartiles_us": [1.0, 2.0], "tb_per_s": 0.5}
    row = {"m": 4, "d": 4096, "relative_error": 1e-3, "share_of_copy": 0.8}
    row |= dict.fromkeys(("triton", "copy"), times)
    rows = [row | {"tokens": 1, "fused_hc_head": times}, row | {"tokens": 7}]
    (tmp_path / "hc_gate.json").write_text(json.dumps({"rows": rows}))
    assert bench.main(command) == 0
    assert (tmp_path / "hc_gate.png").read_bytes()[:4] == b"\x89PNG"
    head, *lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and "fused_hc_head" in head and "eager" not in head
    assert "80%" in lines[0]
