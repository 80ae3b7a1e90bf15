"""The visit to a GPU as far as a CPU can check it: its order, its readings, its report."""

from __future__ import annotations

import gzip
import json
import re
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import ROOT
from tests.engine.conftest import Servers
from tests.engine.v4 import controls, drafts
from tests.gpu import readings, steps, visit
from tests.gpu.stage import CPU, GPU, WEIGHTS
from tests.waiting import PATIENCE

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


def test_it_runs_what_make_bench_and_make_gpu_test_run(tmp_path, monkeypatch):
    """Found as: it neither timed nor tested the kernels of a sampled round."""
    ran, makefile = [], (ROOT / "Makefile").read_text()

    def run(command, **options):
        ran.append(command[2:])
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    monkeypatch.setattr(steps.subprocess, "run", run)
    nowhere = Path("nowhere")
    on_gpu = steps.Visit(GPU, Servers(), tmp_path, tmp_path, nowhere, nowhere)
    steps.bench(on_gpu)
    steps.tests(on_gpu)
    expected = []
    for target in ("bench", "gpu-test"):
        recipe = re.search(rf"^{target}: setup\n((?:\t.*\n)+)", makefile, re.M)[1]
        for line in re.findall(r"python -m (.*)", recipe):
            words = line.replace("eval/results", str(tmp_path)).split()
            paths = [sorted(ROOT.glob(word)) if "*" in word else [word] for word in words]
            expected.append([str(p).removeprefix(f"{ROOT}/") for found in paths for p in found])
    assert ran == expected and len(ran) == 4
    assert "tests/unit/triton_ops/test_rows_kernel.py" in ran[-1]


def test_a_log_s_pools_graphs_and_choice():
    assert readings.draft_pool(CUDA_LOG) == (1000, 2 * 2**30)
    assert readings.graph_gib(CUDA_LOG) == [2.25, 0.75]
    assert readings.draft_attention(CUDA_LOG).startswith("draft attention is fa3")
    assert readings.draft_attention("nothing") is None
    cpu = "Torch K/V pool: layers=5 heads=1 head_dim=512 slots=8\n"
    cpu += "Torch K/V pool: layers=2 heads=2 head_dim=32 slots=100\n"
    assert readings.draft_pool(cpu) == (100, 2 * 2 * 2 * 2 * 32 * 100)


def event(name: str, at: int, thread: int = 1, kind: str = "cuda_runtime", took: int = 1) -> dict:
    return {"name": name, "ph": "X", "ts": at, "dur": took, "pid": 9, "tid": thread, "cat": kind}


def traced(folder: Path, stage: str, events: list[dict]) -> None:
    with gzip.open(folder / f"run-TP-0-{stage}.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": [*events, {"ph": "M"}]}, file)


def test_waits_are_those_between_the_rounds_of_a_decoding_trace(tmp_path):
    """Found as: prefills, and the profiler's own wait at its end, failed a product without any."""
    wait, span = "cudaStreamSynchronize", "user_annotation"
    traced(tmp_path, "prefill", [event(wait, 15)])
    rounds = [event(f"step[VERIFY bs={n}]", 10 * n, 1, span, 3) for n in (1, 2, 3)]
    # The same names are on the GPU's own time line.
    rounds.append(event("step[VERIFY bs=1]", 90, 7, "gpu_user_annotation"))
    inside = [event(wait, 16), event("cudaEventSynchronize", 17), event("cudaLaunchKernel", 18)]
    outside = [event(wait, 5), event("cudaDeviceSynchronize", 40), event(wait, 15, thread=2)]
    traced(tmp_path, "decode", rounds + inside + outside)
    count, events = readings.rounds_of(readings.trace_events(tmp_path))
    assert count == 3
    assert readings.waits(events) == {wait: 1, "cudaEventSynchronize": 1}
    assert readings.rounds_of(outside) == (0, [])


def test_values_read_on_the_host_are_no_waits(tmp_path):
    """Found as: ``aten::_local_scalar_dense`` of tensors that never left the host failed a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for name in ("step[VERIFY bs=1]", "step[VERIFY bs=1]"):
            with torch.profiler.record_function(name):
                torch.arange(4).max().item()
                torch.arange(4).nonzero()
    profile.export_chrome_trace(str(tmp_path / "run-decode.trace.json.gz"))
    count, events = readings.rounds_of(readings.trace_events(tmp_path))
    assert count == 2 and readings.waits(events) == {}
    assert "aten::_local_scalar_dense" in {found["name"] for found in events}


@pytest.mark.parametrize("variable", [None, drafts.OWN_DRAFTS, drafts.ANSWERS])
def test_a_server_reads_its_drafts_back_only_where_a_step_asks_for_them(
    tmp_path, monkeypatch, variable
):
    """Found as: every server of the visit read lengths and drafts back, once a round."""
    from sglang.srt.model_loader import loader
    from sglang.srt.speculative import eagle_utils, eagle_worker_common
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    for name in (drafts.OWN_DRAFTS, drafts.ANSWERS):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        (tmp_path / "file").write_text("[]")
        monkeypatch.setenv(variable, str(tmp_path / "file"))
    chain = eagle_utils.eagle_prepare_for_verify
    monkeypatch.setattr(loader, "initialize_dummy_weights", None)
    monkeypatch.setattr(eagle_worker_common, "eagle_prepare_for_verify", chain)
    monkeypatch.setattr(DFlashVerifyInput, "prepare_for_verify", lambda self, batch: "prepared")
    plugin: dict = {}
    exec(WEIGHTS, plugin)
    plugin["load"]()
    read, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: read.append(t) or tolist(t))
    request = SimpleNamespace(rid="r0", origin_input_ids=[1, 2])
    lengths = torch.tensor([9])
    batch = SimpleNamespace(reqs=[request], seq_lens=lengths, seq_lens_cpu=None)
    block = SimpleNamespace(draft_token=torch.arange(7))
    assert DFlashVerifyInput.prepare_for_verify(block, batch) == "prepared"
    assert bool(read) == (variable is not None)
    assert loader.initialize_dummy_weights is plugin["draw"]


@pytest.mark.parametrize(
    "line, ours",
    [
        ("DFLASH fused KV append-by-loc failed; falling back to sequential path: x", True),
        ("DFLASH fused KV initialization failed, falling back to sequential path: x", True),
        ("aiter wo_a batched_gemm_bf16 failed; falling back to einsum for the rest: x", False),
        ("HYPERDFLASH: reducer=hc_gate kernels=triton fused_kv=True", False),
    ],
)
def test_a_fall_back_of_the_target_s_own_is_not_ours(line, ours):
    log = f"[2026-01-01 TP0] started\n[2026-01-01 TP0] {line}\n"
    assert bool(readings.fell_back(log)) == ours


def test_the_lines_of_a_fall_back_are_sglang_s_own():
    import inspect

    from sglang.srt.speculative import dflash_worker_v2

    source = inspect.getsource(dflash_worker_v2)
    assert source.count("falling back") == len(re.findall(r'"DFLASH[^%]*?falling back', source)) > 4


def test_blocks_are_compared_where_the_text_is_the_same():
    one = {("r0", 5): (7, [1, 2]), ("r0", 9): (8, [3, 4]), ("r1", 5): (1, [5])}
    other = {("r0", 5): (7, [1, 2]), ("r0", 9): (8, [3, 9]), ("r1", 5): (2, [5])}
    assert readings.same_drafts(one, other) == (2, 1)
    narrow = {("r0", 5): (7, [1, 2]), ("r0", 9): (8, [3])}
    assert readings.same_drafts(one, narrow, 2) == (1, 1)


def test_rounds_by_width():
    caps = [[0, 2, 1], [0, 0, 3, 0, 1]]
    answers = [{"meta_info": {"spec_cap_lens_histogram": found}} for found in caps]
    assert readings.rounds_by_width(answers) == {1: 2, 2: 4, 4: 1}


@pytest.mark.parametrize("stage", [GPU, CPU])
def test_contexts_slide_a_window_and_pass_a_boundary(stage):
    """Found as: a window of 512 tokens, contexts that ended at 469."""
    for prompt in stage.prompts(4):
        assert len(prompt) + stage.tokens > 2 * stage.window
        assert stage.tokens > stage.window // 2
    # What the target keeps of 128 tokens at a time is read when they are full.
    passed = [p for p in stage.prompts(4, first=stage.boundary) if passes(p, stage.tokens, 128)]
    assert len(passed) >= 2


def passes(prompt: list[int], tokens: int, multiple: int) -> bool:
    return (len(prompt) + tokens - 1) // multiple > len(prompt) // multiple


def test_the_most_is_seen_while_work_runs():
    held, seen = [3], threading.Event()

    def read() -> int:
        if held[0] == 9:
            seen.set()
        return held[0]

    def work() -> None:
        held[0] = 9
        assert seen.wait(PATIENCE)
        held[0] = 4

    assert readings.most_while(read, work) == (3, 9)


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


def walked(step, tmp_path, monkeypatch, answer, blocks=None, stage=CPU) -> steps.Visit:
    """A step whose servers are ``answer(name, environment) -> tokens of each prompt``."""
    visit_ = steps.Visit(stage, Servers(), tmp_path, tmp_path, Path("t"), Path("d"))
    caps = {"spec_cap_lens_histogram": [0, 3, 3, 0, 3, 0, 0, 3]}
    caps["spec_correct_drafts_histogram"] = [1] * 7

    @contextmanager
    def server(self, name, *arguments, draft=None, **environment):
        yield SimpleNamespace(name=name, environment=environment)

    def asked(server, prompts, tokens, **sampling):
        found = answer(server.name, server.environment)
        return [{"output_ids": found[:tokens], "meta_info": caps} for _ in prompts]

    monkeypatch.setattr(steps.Visit, "server", server)
    monkeypatch.setattr(steps, "asked", asked)
    monkeypatch.setattr(steps, "own_blocks", lambda path: blocks(path.stem))
    step(visit_)
    return visit_


TEXT = list(range(200))
FAULTY = controls.poison_an_accepted_state.__name__


def test_poison_that_reaches_no_state_fails_its_step(tmp_path, monkeypatch):
    def answer(name, environment):
        return TEXT[::-1] if environment.get(controls.FAULT) == FAULTY else TEXT

    assert not walked(steps.poison, tmp_path, monkeypatch, answer).failed
    found = walked(steps.poison, tmp_path, monkeypatch, lambda *_: TEXT)
    assert found.failed == [
        "NaN in a state that is read changed nothing: the poison reaches no state"
    ]


def test_poison_that_is_read_fails_its_step(tmp_path, monkeypatch):
    def answer(name, environment):
        return TEXT[:9] if environment.get(controls.FAULT) else TEXT

    failed = walked(steps.poison, tmp_path, monkeypatch, answer).failed
    assert "an answer was cut short" in failed and "answers leave the target's at once" in failed


def test_narrow_widths_that_draft_otherwise_in_graphs_fail_their_step(tmp_path, monkeypatch):
    def blocks(name):
        wrong = int(name == "widths-graphs" and same is False)
        widths = (1, 3, 6)
        return {
            ("r0", 3 * at + i): (at, [at, *range(at, at + n)][:n] if n != 3 else [at + wrong] * 3)
            for at in range(12)
            for i, n in enumerate(widths)
        }

    for same in (True, False):
        failed = walked(steps.widths, tmp_path, monkeypatch, lambda *_: TEXT, blocks).failed
        wrong = ["graphs and eager rounds draft different blocks of width 4"]
        assert failed == ([] if same else wrong)
    settings = []
    walked(steps.widths, tmp_path, monkeypatch, lambda _, e: settings.append(e) or TEXT, blocks)
    assert [e.get("HYPERDFLASH_WIDTH") for e in settings] == [None, "random", "random"]
