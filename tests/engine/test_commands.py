"""The commands: ``hyperdflash demo``, and ``hyperdflash generate`` killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from functools import partial

import psutil
import pytest

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands import demo
from tests.conftest import EXAMPLE
from tests.engine.conftest import greedy, install_plugin
from tests.waiting import PATIENCE, until
from tests.warm_start.client import COMMAND, finish, run_command, start, start_command


@pytest.mark.parametrize("warm", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_demo(tmp_path, monkeypatch, capsys, warm):
    out = tmp_path / "demo.json"
    if warm:
        monkeypatch.setattr(demo, "Server", partial(demo.Server, start=start))
    command = ["demo", "--rounds", "1", "--max-new-tokens", "48", "--out", str(out)]
    assert main(command) == 0
    report = json.loads(out.read_text())
    assert (report["outputs_identical"], report["dtype"]) == (True, "float32")
    assert len({p["kind"] for p in report["prompts"]}) == len(report["prompts"]) == 12
    assert report["answers_judged"] == 12
    assert report["answers_right"] > 6
    assert report["tau"] > 1.5
    assert report["speedup"] > 0
    assert report["provenance"]["sglang"] == "0.5.23"
    assert len(report["position_acceptance"]) == 6
    assert "acceptance by drafted position" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_demo_and_its_servers(tmp_path, number, code):
    """Found as: two servers of 2.4 GB were left spinning. Here while they still import."""
    process = subprocess.Popen(
        [*COMMAND, "demo", "--out", str(tmp_path / "demo.json")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    family = []

    def started() -> bool:
        assert process.poll() is None
        family[:] = psutil.Process(process.pid).children(recursive=True)
        return sum("spawn" in " ".join(child.cmdline()) for child in family) >= 4

    until(started)
    process.send_signal(number)
    assert process.wait(PATIENCE) == code
    assert not psutil.wait_procs(family, timeout=PATIENCE)[1]


# From the eighth answer on, the launch's own included, the server stands still: the batch cannot
# end before it is killed.
STANDS_STILL = """
ended = set()


def wait(result, self, batch, *_):
    import threading

    ended.update(req.rid for req in batch.reqs if req.finished())
    if len(ended) >= 8:
        threading.Event().wait()
    return result


def load():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    name = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"
    HookRegistry.register(name, wait, HookType.AFTER)
"""


def batch_command(source, output, drafter_dir, target_dir):
    engine = {"mem_fraction_static": 0.2, "max_total_tokens": 8192}
    return [
        "generate",
        *("--model", str(target_dir), "--draft", str(drafter_dir), "--dtype", "float32"),
        *("--input", str(source), "--output", str(output), "--max-new-tokens", "64"),
        *("--concurrency", "2", "--engine-args", json.dumps(engine)),
    ]


def test_generate_survives_a_kill(
    tmp_path, target_dir, drafter_dir, target_server, tokenizer, monkeypatch
):
    lines = [json.loads(x) for x in (EXAMPLE / "prompts.jsonl").read_text().splitlines()]
    records = [{"messages": line["messages"]} for line in lines]
    records += [{"prompt": "Tom has 3 apples."}, {"turns": ["one tea please", "thanks"]}]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    command = batch_command(source, output, drafter_dir, target_dir)

    with monkeypatch.context() as patch:
        for name, value in install_plugin(tmp_path, "stands_still", STANDS_STILL).items():
            patch.setenv(name, value)
        process = start_command(
            *command, "--verbose", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    until(
        lambda: (
            process.poll() is not None
            or (output.is_file() and output.read_bytes().count(b"\n") >= 5)
        )
    )
    assert process.poll() is None, "the batch ended before it could be killed"
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 3, "a server, its scheduler and its detokenizer"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not psutil.wait_procs(started, timeout=PATIENCE)[1], "processes of the server are left"
    with output.open("ab") as out:  # a line cut in the middle, as a crash leaves it
        out.write(b'{"index": 3')
    before = output.read_bytes().rsplit(b"\n", 1)[0]

    # With imports of its own: what they print a user would see.
    ended = subprocess.run([*COMMAND, *command], capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert output.read_bytes().startswith(before)
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted(a["index"] for a in answers) == list(range(len(records)))
    assert "tau" in ended.stdout
    assert "tokens/s" in ended.stdout
    for noise in ("Traceback", "Warning", "shards:"):
        assert noise not in ended.stderr
    by_index = {a["index"]: a for a in answers}
    assert len(by_index[len(records) - 1]["outputs"]) == 2
    prompt = tokenizer.encode("Tom has 3 apples.", add_special_tokens=True)
    expected = greedy(target_server, prompt, 64, sampling={"ignore_eos": False})["text"]
    assert by_index[len(records) - 2]["outputs"] == [expected]

    again = run_command(*command, timeout=PATIENCE)
    assert again.returncode == 0
    assert f"{len(records)} already answered" in again.stdout


@pytest.mark.parametrize(
    "begin, arguments, message",
    [
        # With imports of its own, whose noise would be lines.
        (subprocess.Popen, ("--input", "nowhere.jsonl", "--output", "o"), "does not exist"),
        (
            start,
            ("--input", "{broken}", "--output", "o", "--strict"),
            "broken:2: expected a JSON object",
        ),
        (start, ("--input", "{good}", "--output", "o", "--max-new-tokens", "0"), "at least 1"),
        (start, ("--input", "{good}", "--output", "o", "--engine-args", "[]"), "be a JSON object"),
    ],
)
def test_bad_batches_end_with_one_line(tmp_path, target_dir, begin, arguments, message):
    files = {"broken": '{"prompt": "a"}\nnot json\n', "good": '{"prompt": "a"}\n'}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    paths = {name: str(tmp_path / name) for name in files}
    filled = [argument.format(**paths) for argument in arguments]
    process = begin(
        [*COMMAND, "generate", "--model", str(target_dir), *filled],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
    )
    ended = finish(process, PATIENCE)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
