"""The visit to a GPU as far as a CPU can check it: its order, its readings, its report."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest

from tests.engine.conftest import Servers
from tests.gpu import readings, steps, visit
from tests.gpu.stage import CPU, GPU

CUDA_LOG = """
KV Cache is allocated. dtype: fp8, #tokens: 900, K size: 9.00 GB, V size: 9.00 GB
KV Cache is allocated. dtype: bf16, #tokens: 1000, K size: 1.50 GB, V size: 0.50 GB
[TP0] HYPERDFLASH: draft attention is fa3: the target's dsv4 serves no draft.
Capture target CUDA graph end. bs=[1, 2], elapsed=9.00 s, mem usage=2.25 GB, avail mem=9.00 GB.
Capture draft CUDA graph end. bs=[1, 2], elapsed=9.00 s, mem usage=0.75 GB, avail mem=8.00 GB.
"""


def test_the_largest_server_is_tried_first_and_the_tests_last():
    first, *_, last = steps.STEPS
    assert (first, last) == ("million", "tests")
    assert (GPU.context, GPU.requests) == (1 << 20, 256)
    assert [name for name, _ in steps.chosen(["trace", "million"])] == ["million", "trace"]


def test_a_log_s_pools_graphs_and_choice():
    assert readings.draft_pool(CUDA_LOG) == (1000, 2 * 2**30)
    assert readings.graph_gib(CUDA_LOG) == [2.25, 0.75]
    assert readings.draft_attention(CUDA_LOG).startswith("draft attention is fa3")
    assert readings.draft_attention("nothing") is None
    cpu = "Torch K/V pool: layers=5 heads=1 head_dim=512 slots=8\n"
    cpu += "Torch K/V pool: layers=2 heads=2 head_dim=32 slots=100\n"
    assert readings.draft_pool(cpu) == (100, 2 * 2 * 2 * 2 * 32 * 100)


def test_waits_of_a_trace(tmp_path):
    names = ["cudaStreamSynchronize", "cudaLaunchKernel", "cudaEventSynchronize"]
    events = [{"name": name, "ph": "X"} for name in [*names, "aten::nonzero", names[0]]]
    with gzip.open(tmp_path / "run-TP-0.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": [*events, {"ph": "M"}]}, file)
    found = readings.waits(readings.trace_events(tmp_path))
    assert found == {"cudaStreamSynchronize": 2, "cudaEventSynchronize": 1, "aten::nonzero": 1}


def test_blocks_are_compared_where_the_text_is_the_same():
    one = {("r0", 5): (7, [1, 2]), ("r0", 9): (8, [3, 4]), ("r1", 5): (1, [5])}
    other = {("r0", 5): (7, [1, 2]), ("r0", 9): (8, [3, 9]), ("r1", 5): (2, [5])}
    assert readings.same_drafts(one, other) == (2, 1)


def test_the_most_is_seen_while_work_runs():
    held = [3]

    def work() -> None:
        held[0] = 9
        time.sleep(0.1)
        held[0] = 4

    assert readings.most_while(lambda: held[0], work) == (3, 9)


def test_a_step_that_breaks_is_written_down_and_the_next_one_runs(tmp_path, monkeypatch):
    def breaks(v):
        """One that raises."""
        v.found["before"] = 1
        raise RuntimeError("no such kernel")

    def fails(v):
        """One whose check does not hold."""
        v.check(False, "too large")

    def works(v):
        """One that finds something."""
        v.found["number"] = 2

    every = {step.__name__: step for step in (breaks, fails, works)}
    monkeypatch.setattr(steps, "STEPS", every)
    nowhere = Path("nowhere")
    given = steps.Visit(CPU, Servers(), tmp_path, tmp_path / "out", nowhere, nowhere)
    visit.run(given, None)
    report = json.loads((tmp_path / "out" / "visit.json").read_text())
    found = {name: (step["failed"], step["found"]) for name, step in report["steps"].items()}
    assert found == {
        "breaks": (["RuntimeError: no such kernel"], {"before": 1}),
        "fails": (["too large"], {}),
        "works": ([], {"number": 2}),
    }
    assert report["small"] and report["provenance"]["sglang"] and not given.found


def test_its_command_names_the_steps_and_wants_a_gpu(capsys, monkeypatch):
    assert visit.main(["--list"]) == 0
    assert "million     A server of 1M context and 256 requests" in capsys.readouterr().out
    monkeypatch.setattr(visit.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        visit.main([])
    assert ended.value.code == 2


@pytest.mark.parametrize("stage", [GPU, CPU])
def test_a_stage_s_files_are_what_servers_read(stage, tmp_path):
    """The target's config, and a drafter of its widths; the GPU's weights would be gigabytes."""
    target = stage.write_target(tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    assert config["compress_ratios"][: config["num_hidden_layers"]].count(4) > 0
    if not stage.gpu:
        draft = stage.write_drafter(tmp_path / "drafter", stage.window)
        found = json.loads((draft / "config.json").read_text())
        assert found["hyperdflash_config"]["window"] == stage.window
    lengths = [len(prompt) for prompt in stage.prompts(4)]
    assert len(set(lengths)) == 4 and max(lengths) < stage.context
