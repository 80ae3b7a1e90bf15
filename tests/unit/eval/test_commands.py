"""``python -m eval``: what a user is told, by ``--help`` and by one line for what is wrong."""

from __future__ import annotations

import argparse
import json
import os
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import requests

from eval import __main__ as command
from eval import report, runner, serving
from eval.__main__ import main
from eval.errors import EvalError, one_line
from eval.methods import DRAFT_OPTION, Method
from eval.runner import Plan, read_sealed, write_sealed
from eval.serving import Study, read_study, run_client
from sglang_hyperdflash.tools.errors import (
    HyperDFlashConfigError,
    SeamError,
    ServerFailed,
)
from sglang_hyperdflash.tools.ownership import lock
from tests.unit.eval.fake_server import run_command


@pytest.mark.parametrize(
    "options, message",
    [
        (
            "--methods baseline,magic --target any",
            "unknown method 'magic'; known are",
        ),
        ("--methods hyperdflash6 --target any --hyperdflash-draft x", "must include baseline"),
        ("--methods baseline,dflash6 --target any", "needs --dflash-draft"),
        ("--methods baseline", "--target is needed"),
        ("--methods baseline --target any --benchmarks nothing", "nothing.jsonl does not exist"),
        ("--methods baseline --target any --benchmarks hub:openai/gsm8k", "hub:OWNER/DATASET/FILE"),
        ("--methods baseline --target any --benchmarks hub:openai//f.jsonl", "hub:OWNER/DATASET/"),
        ("--methods baseline --target any --server ours", "takes name=url"),
        ("--methods baseline --target any --rounds 0", "--rounds must be at least 1, found 0"),
        ("--methods baseline --target any --concurrency 4 0", "--concurrency must be at least 1"),
        ("--methods baseline --target any --temperature -1", "--temperature must be at least 0"),
    ],
)
def test_bad_commands_say_what_to_do(tmp_path, capsys, options, message):
    assert main(["run", "--out", str(tmp_path / "out"), *options.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "error",
    [
        EvalError("what"),
        ServerFailed("server exited with code 1:\nTraceback\n  File\nOSError: port"),
        HyperDFlashConfigError("what"),
        SeamError("what"),
        requests.ConnectionError("refused"),
        FileNotFoundError(2, "No such file", "x"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("name", ["fetch", "report"])
def test_every_user_error_of_every_command_is_one_line(tmp_path, capsys, monkeypatch, error, name):
    def fail(args):
        raise error

    monkeypatch.setitem(command.COMMANDS, name, fail)
    assert main([name, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said == f"error: {one_line(error)}\n" and said.count("\n") == 1


def test_a_fault_of_ours_keeps_its_traceback(tmp_path, monkeypatch):
    def fail(args):
        raise KeyError("bug")

    monkeypatch.setitem(command.COMMANDS, "report", fail)
    with pytest.raises(KeyError):
        main(["report", "--out", str(tmp_path)])


def test_one_line_keeps_the_first_and_the_last_of_a_log():
    text = "server exited with code 1:\n\nTraceback\n  File\nOSError: port taken\n"
    assert one_line(ServerFailed(text)) == "server exited with code 1: OSError: port taken"
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt"


@pytest.mark.parametrize(
    "name, words",
    [
        ("run", ("default: 3)", "default: baseline,mtp3,mtp6", 'default: {"thinking": true}')),
        ("serving", ("default: 1 4 16 64)", "default: 32)", "default: 1.0 4.0)")),
        ("width", ("default: 1 2 4 8 16 32 64)", "default: 5)")),
        ("fetch", ("default: the hub)",)),
    ],
)
def test_help_prints(capsys, name, words):
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0 and all(word in said for word in words), said


# --- report


def test_a_report_of_nothing_says_what_is_missing(tmp_path, capsys):
    assert main(["report", "--out", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    (tmp_path / "results.json").write_text('{"rows": [')
    assert main(["report", "--out", str(tmp_path)]) == 2
    assert "results.json is damaged" in capsys.readouterr().err


def test_a_report_is_not_written_into_a_folder_in_use(data, tmp_path, fake, capsys):
    out = tmp_path / "out"
    assert run_command(data, out, fake(4, []), fake(4, [1, 1])) == 0
    (out / "report.md").write_text("as it was")
    with lock(out, runner.KIND):
        assert main(["report", "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert f"in use by process {os.getpid()}" in error and error.count("\n") == 1
        assert (out / "report.md").read_text() == "as it was"
    assert main(["report", "--out", str(out)]) == 0
    assert "Results over all benchmarks" in (out / "report.md").read_text()
    assert main(["report", "--out", str(tmp_path / "typo")]) == 2
    assert not (tmp_path / "typo").exists()


def test_a_report_without_units_is_of_the_stored_results_and_keeps_them(data, tmp_path, fake):
    out = tmp_path / "out"
    assert run_command(data, out, fake(4, []), fake(4, [1, 1])) == 0
    before = (out / "results.json").read_text(), (out / "report.md").read_text()
    for folder in ("units", "logs"):
        for path in sorted((out / folder).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    (out / "units").rmdir()
    assert main(["report", "--out", str(out)]) == 0
    assert ((out / "results.json").read_text(), (out / "report.md").read_text()) == before


def test_a_missing_library_is_named_with_the_extra_that_brings_it(
    data, tmp_path, fake, capsys, monkeypatch
):
    out = tmp_path / "out"
    assert run_command(data, out, fake(4, []), fake(4, [1, 1])) == 0
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", "--out", str(out)]) == 2
    assert "matplotlib: pip install" in capsys.readouterr().err


# --- serving


def study(out, methods=(), prompts=("hi",), minutes=15.0) -> Study:
    plan = Plan("any", methods, {}, (), 1, 4, out, together=False, start_minutes=minutes)
    return Study(plan, prompts, (1,), (1.0,), 4)


def serving_options(data, out, *more: str) -> list[str]:
    options = ["serving", "--target", "any", "--data-dir", str(data), "--benchmarks", "gsm8k"]
    return [*options, "--out", str(out), *(more or ("--methods", "baseline"))]


def no_work(*_) -> None:
    pytest.fail("work was done")


def test_a_study_into_a_folder_without_a_run_is_refused_before_any_work(
    data, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(serving, "run", no_work)
    assert main(serving_options(data, tmp_path / "out")) == 2
    assert "holds no run" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_load_client_that_fails_is_quoted_and_its_output_kept(tmp_path):
    log = tmp_path / "logs" / "client.log"
    source = "import sys; print('asking'); sys.exit('refused: port 9')"
    for _ in range(2):
        with pytest.raises(EvalError, match=r"code 1: refused: port 9; .*client\.log"):
            run_client([sys.executable, "-c", source], log)
    assert sorted(log.read_text().splitlines()) == ["asking"] * 2 + ["refused: port 9"] * 2
    with pytest.raises(EvalError, match="code 3: it said nothing"):
        run_client([sys.executable, "-c", "import sys; sys.exit(3)"], log)


def test_the_load_client_has_the_key_as_it_reads_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERDFLASH_API_KEY", "secret")
    source = "from sglang.benchmark.serving import get_auth_headers; print(get_auth_headers())"
    run_client([sys.executable, "-c", source], tmp_path / "client.log")
    assert "'Authorization': 'Bearer secret'" in (tmp_path / "client.log").read_text()


CLIENT_NUMBERS = {"output_throughput": 10.0} | dict.fromkeys(
    (name for pair in serving.LATENCIES.values() for name in pair), 1.0
)


def answering(monkeypatch, lost: int = 0) -> list[list[str]]:
    """A client that asks each prompt of its file once at most; returns what each run asked."""
    runs = []

    def run_client(command: list[str], log) -> None:
        options = dict(pairwise(command))
        lines = Path(options["--dataset-path"]).read_text().splitlines()
        asked = [json.loads(line)["conversations"][0]["content"] for line in lines]
        runs.append(asked[: int(options["--num-prompts"])])
        numbers = {**CLIENT_NUMBERS, "completed": len(runs[-1]) - lost}
        Path(options["--output-file"]).write_text(json.dumps(numbers) + "\n")

    monkeypatch.setattr(serving, "run_client", run_client)
    return runs


def test_a_load_larger_than_the_prompts_repeats_them(tmp_path, monkeypatch):
    """Found as: 256 requests were asked for, and as many were sent as there were prompts."""
    runs = answering(monkeypatch)
    few = study(tmp_path, prompts=("one", "two", "three"))
    assert serving.load(few, "http://any", 8)["requests"] == 8
    assert runs == [["one", "two", "three", "one", "two", "three", "one", "two"]]
    serving.load(few, "http://any", 2)
    assert len((tmp_path / "prompts.jsonl").read_text().splitlines()) == 3


def test_a_load_that_was_not_answered_whole_is_refused(tmp_path, monkeypatch):
    answering(monkeypatch, lost=1)
    with pytest.raises(EvalError, match=r"expected 4 answered requests, found 3.*client\.log"):
        serving.load(study(tmp_path), "http://any", 4)


ONE, TWO = Method("baseline", (), 0, "http://one"), Method("mtp3", (), 3, "http://two")


def test_a_study_goes_on_with_the_methods_that_it_lacks_and_notices_damage(tmp_path, monkeypatch):
    asked = []

    def measure(_, url):
        asked.append(url)
        if len(asked) == 2:
            raise ServerFailed("server exited with code 1:\nno memory")
        return {"concurrency": [], "poisson": []}

    monkeypatch.setattr(serving, "measure", measure)
    both = study(tmp_path / serving.FOLDER, (ONE, TWO))
    with pytest.raises(EvalError, match=r"mtp3: server exited with code 1: no memory .*logs"):
        serving.run(both)
    serving.run(both)
    assert asked == [ONE.url, TWO.url, TWO.url]
    assert set(read_study(tmp_path)["poisson"]) == {"baseline", "mtp3"}
    path = tmp_path / serving.FOLDER / serving.RESULT
    path.write_text(path.read_text().replace("mtp3", "mtp6"))
    with pytest.raises(EvalError, match="is damaged"):
        read_study(tmp_path)
    serving.run(both)
    assert asked[3:] == [ONE.url, TWO.url]
    assert read_study(tmp_path / "none") is None


def test_a_method_is_another_one_when_its_drafter_is(tmp_path, monkeypatch):
    def identity(name: str) -> dict:
        return Method("hyperdflash6", (DRAFT_OPTION, name), 6).identity()

    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    first = identity(str(tmp_path / "first"))
    assert first != identity(str(tmp_path / "second"))
    monkeypatch.chdir(tmp_path)
    assert identity("first/") == first
    (tmp_path / "first" / "config.json").write_text("retrained")
    assert identity("first")["draft"] == first["draft"] and identity("first") != first


def test_a_study_of_another_draft_than_the_run_s_is_refused(data, tmp_path, fake, capsys):
    """Found as: the second drafter's study was reported with the first one's run."""
    out = tmp_path / "out"
    assert run_command(data, out, fake(4, []), fake(4, [1, 1])) == 0
    found = read_sealed(out / "run.json")
    found["identities"]["hyperdflash6"] |= {"draft": "/first", "draft files": "ab"}
    write_sealed(out / "run.json", found)
    options = ("--methods", "baseline,hyperdflash6", "--hyperdflash-draft", "second")
    assert main(serving_options(data, out, *options)) == 2
    assert "has hyperdflash6 with the draft /first" in capsys.readouterr().err
    assert not (out / serving.FOLDER).exists()


def test_a_study_is_refused_while_its_run_s_folder_is_in_use(
    data, tmp_path, fake, capsys, monkeypatch
):
    out = tmp_path / "out"
    assert run_command(data, out, fake(4, []), fake(4, [1, 1])) == 0
    monkeypatch.setattr(serving, "run", no_work)
    with lock(out, runner.KIND):
        assert main(serving_options(data, out)) == 2
    assert "in use by process" in capsys.readouterr().err


def test_a_slow_target_is_given_the_minutes_that_were_asked_for(data, tmp_path, monkeypatch):
    """Found as: every server that loaded longer than five minutes was given up."""
    waited = []

    class Slow:
        def __init__(self, *_, **__) -> None:
            self.process = argparse.Namespace(poll=lambda: None)

        def wait(self, seconds: float) -> None:
            waited.append(seconds)
            raise ServerFailed("not ready")

        def stop(self) -> None:
            pass

    monkeypatch.setattr(runner, "Server", Slow)
    options = ["--target", "any", "--data-dir", str(data), "--benchmarks", "gsm8k"]
    options += ["--methods", "baseline", "--num-prompts", "1", "--start-minutes", "90"]
    out = tmp_path / "out"
    assert main(["run", *options, "--rounds", "1", "--out", str(out)]) == 1
    assert main(["serving", *options, "--out", str(out)]) == 2
    assert set(waited) == {90 * 60} and len(waited) == 3
    assert main(["run", *options[:-1], "0", "--out", str(out)]) == 2


def test_the_report_holds_the_study(data, tmp_path, fake):
    out = tmp_path / "out"
    assert run_command(data, out, fake(4, []), fake(4, [1, 1])) == 0
    level = {"requests": 4, "tokens_per_s": 10.0}
    latencies = {name: [1.0, 2.0] for name in serving.LATENCIES}
    content = {
        "provenance": {},
        "concurrency": {"baseline": [{"concurrency": c, **level, **latencies} for c in (1, 4)]},
        "poisson": {"baseline": [{"rate": 2.0, **level, **latencies}]},
    }
    write_sealed(out / serving.FOLDER / serving.RESULT, content)
    report.write(out)
    text = (out / "report.md").read_text()
    assert "| baseline | 10 | 10 |" in text and "| baseline | 1 / 2 | 1 / 2 | 1 / 2 |" in text
