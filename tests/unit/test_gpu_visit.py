"""The visit to a GPU as far as a CPU can check it: each step runs against a server that is none."""

import gzip
import json
import re
import shlex
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tests.conftest import ROOT
from tests.engine.v4 import controls
from tests.gpu import kernels, readings, steps, visit
from tests.gpu.stage import CPU, GPU
from tests.waiting import PATIENCE

LOG = """
KV Cache is allocated. dtype: fp8, #tokens: 900, K size: 9.00 GB, V size: 9.00 GB
KV Cache is allocated. dtype: bf16, #tokens: 1000, K size: 0.006 GB, V size: 0.006 GB
[TP0] HYPERDFLASH: draft attention is fa3: the target's dsv4 serves no draft.
Capture target CUDA graph end. bs=[1, 2], elapsed=9.00 s, mem usage=2.25 GB, avail mem=9.00 GB.
Capture draft CUDA graph end. bs=[1, 2], elapsed=9.00 s, mem usage=0.75 GB, avail mem=8.00 GB.
HYPERDFLASH: reducer=hc_gate kernels=triton fused_kv=True
aiter wo_a batched_gemm_bf16 failed; falling back to einsum for the rest: of the target's own
"""
TEXT = list(range(400))


def event(name: str, ts: int, kind: str = "cuda_runtime", tid: int = 1, dur: int = 1) -> dict:
    return {"name": name, "ph": "X", "ts": ts, "dur": dur, "pid": 9, "tid": tid, "cat": kind}


ROUNDS = [event(f"step[VERIFY bs={n}]", 10 * n, "user_annotation", dur=3) for n in range(1, 9)]
# What only looks like a wait of a round: other times, threads, time lines, and values on the host.
OUTSIDE = [event("cudaDeviceSynchronize", ts) for ts in (5, 99)]
OUTSIDE += [event("cudaStreamSynchronize", 15, tid=2), event("step[VERIFY", 90, "gpu_annotation")]
OUTSIDE += [event("aten::_local_scalar_dense", 16)]


def answer(environment: dict) -> list[int]:
    """The target's, unless an accepted state is poisoned, as it should be."""
    fault = environment.get(controls.FAULT)
    return TEXT[::-1] if fault == controls.poison_an_accepted_state.__name__ else TEXT


def blocks(path: Path) -> dict:
    """Drafts of rounds of every width, as a server would have written them down."""
    return {("r0", n): (n, [(n + k) % 397 for k in range((1, 3, 6)[n % 3])]) for n in range(60)}


@pytest.fixture
def walk(tmp_path, monkeypatch):
    """Walks steps; ``text`` is what servers answer to their environment, ``events`` a trace."""

    def walked(stage, only, text=answer, events=(), drafts=blocks):
        most = (stage.most[0], 4)
        stage, log = replace(stage, requests=4, most=most, long_prompt=30), tmp_path / "log"
        log.write_text(LOG)
        trace = json.dumps({"traceEvents": [*ROUNDS, *OUTSIDE, *events, {"ph": "M"}]}).encode()

        @contextmanager
        def server(self, name, *arguments, draft=None, **environment):
            def generate(input_ids, sampling_params, **_):
                tokens = text(environment)[: sampling_params["max_new_tokens"]]
                meta = {"spec_cap_lens_histogram": [0, 3, 3, 0, 3, 0, 0, 3]}
                meta["spec_correct_drafts_histogram"] = [1] * 7
                one = {"output_ids": tokens, "meta_info": meta}
                return [one] * len(input_ids) if isinstance(input_ids[0], list) else one

            yield SimpleNamespace(generate=generate, log=log, url="", process=Mock(pid=1))

        def start_profile(url, json, timeout):
            Path(json["output_dir"], "decode.json.gz").write_bytes(gzip.compress(trace))
            return Mock()

        launch = Mock(return_value=Mock(returncode=0, stdout="", stderr=""))
        monkeypatch.setattr(steps.Visit, "server", server)
        stage = replace(stage, write_target=lambda _: tmp_path)
        monkeypatch.setattr(type(stage), "write_drafter", lambda *_: tmp_path)
        monkeypatch.setattr(steps, "own_blocks", drafts)
        monkeypatch.setattr(steps.requests, "post", start_profile)
        monkeypatch.setattr(kernels, "subprocess", Mock(run=launch))
        monkeypatch.setattr(readings, "used_bytes", lambda process: 1)
        monkeypatch.setattr(steps, "GPU" if stage.gpu else "CPU", stage)
        places = tmp_path, tmp_path / "out"
        report = steps.walk(only or list(visit.STEPS), *places, not stage.gpu, 10_000)
        written = json.loads((tmp_path / "out" / "visit.json").read_text())
        assert written == json.loads(json.dumps(report))
        failed = {name: step["failed"] for name, step in report["steps"].items()}
        return failed, [call.args[0][1:] for call in launch.call_args_list]

    return walked


@pytest.mark.parametrize("stage", [GPU, CPU], ids=["gpu", "small"])
def test_every_step_runs_and_the_makefiles_commands_are_among_them(walk, stage):
    failed, launched = walk(stage, None)
    assert list(failed) == list(visit.STEPS)
    assert not any(failed.values()), failed
    recipe = re.search(r"^bench: setup\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    named = set(re.findall(r"python -m (\S+)", recipe[1]))
    words = {word for command in launched for word in command}
    assert named and (named <= words if stage.gpu else not words)


def test_a_step_that_breaks_or_waits_is_written_down_and_the_next_one_runs(tmp_path, monkeypatch):
    def breaks(v):
        """One that raises."""
        raise RuntimeError("no such kernel")

    def waits(v):
        """One that waits for what never comes, and takes what ends it for another's error."""
        with suppress(Exception):
            Event().wait()

    def finds(v):
        """One that finds something."""
        v.measured["number"] = 1

    functions = {function.__name__: function for function in (breaks, waits, finds)}
    monkeypatch.setattr(visit, "function_of", functions.get)
    limits = {"breaks": 9, "waits": 0.1, "finds": 9}
    steps = {name: visit.Step("", seconds, "all else") for name, seconds in limits.items()}
    monkeypatch.setattr(visit, "STEPS", steps)
    walked = visit.run(list(steps), lambda _: visit.Notes(tmp_path), tmp_path)["steps"]
    assert walked["breaks"]["failed"] == ["RuntimeError: no such kernel"]
    assert "OutOfTime" in walked["waits"]["failed"][0] and not walked["finds"]["failed"]
    monkeypatch.setattr(visit.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        visit.main([])


def test_the_plan_s_commands_are_short_name_every_step_once_and_begin_without_sglang(capsys):
    assert visit.main(["--plan", "--out", "$OUT"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("python3")]
    assert [shlex.split(line, comments=True)[-1] for line in lines] == list(visit.STEPS)
    assert all(len(line) < 2000 for line in lines)
    assert all(step.seconds < 480 for step in visit.STEPS.values())
    absent = "import sys; sys.modules |= dict.fromkeys(('sglang', 'pydantic', 'transformers'));"
    absent += "from tests.gpu import kernels, visit; from sglang_hyperdflash.commands import"
    absent += f" check_gpu; list(map(visit.function_of, {visit.WITHOUT_SERVERS}))"
    subprocess.run([sys.executable, "-c", absent], cwd=ROOT, check=True, timeout=PATIENCE)


def eager_drafts_differ(path):
    one = blocks(path)
    return {key: (n, [0] * len(b)) for key, (n, b) in one.items()} if "eager" in path.stem else one


@pytest.mark.parametrize(
    "step, fault",
    [
        ("trace", {"events": [event("cudaStreamSynchronize", 16)]}),
        ("poison", {"text": lambda environment: TEXT}),
        ("residual", {"text": lambda e: TEXT[::-1] if "V4_ANSWERS" in e else TEXT}),
        ("widths", {"drafts": eager_drafts_differ}),
        ("million", {"text": lambda environment: TEXT[:3]}),
    ],
)
def test_a_faulty_server_fails_its_step(walk, step, fault):
    assert walk(GPU, [step], **fault)[0][step]
