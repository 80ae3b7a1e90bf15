"""``python -m eval``: what a user is told, by ``--help`` and by one line for what is wrong."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import requests

from eval import __main__ as command
from eval import report, runner, serving_study
from eval.__main__ import main
from eval.errors import EvalError, one_line
from eval.options import parser
from eval.serving_study import Study, read_study, run_client
from sglang_hyperdflash.tools.atomic import write_json
from sglang_hyperdflash.tools.checksum import sealed
from sglang_hyperdflash.tools.errors import (
    HyperDFlashConfigError,
    SeamError,
    ServerFailed,
    UnsupportedTarget,
)
from sglang_hyperdflash.tools.ownership import lock
from tests.unit.eval.fake_server import run_command, run_options


@pytest.mark.parametrize(
    "options, message",
    [
        ("--methods target,magic --target any", "unknown method 'magic'; known are target, mtp3"),
        ("--methods hyperdflash6 --target any --hyperdflash-draft x", "must hold target"),
        ("--methods target,dflash6 --target any", "needs --dflash-draft"),
        ("--methods target", "--target is needed"),
        ("--methods target --target any --benchmarks nothing", "nothing.jsonl does not exist"),
        ("--methods target --target any --benchmarks hub:openai/gsm8k", "hub:OWNER/DATASET/FILE"),
        ("--methods target --target any --benchmarks hub:openai//f.jsonl", "hub:OWNER/DATASET/"),
        ("--methods target --target any --server ours", "takes name=url"),
        ("--methods target --target any --rounds 0", "--rounds must be at least 1, found 0"),
        ("--methods target --target any --concurrency 4 0", "--concurrency must be at least 1"),
        ("--methods target --target any --temperature -1", "--temperature must be at least 0"),
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
        subprocess.CalledProcessError(3, ["client"]),
        HyperDFlashConfigError("what"),
        UnsupportedTarget("what"),
        SeamError("what"),
        requests.ConnectionError("refused"),
        FileNotFoundError(2, "No such file", "x"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("name", ["run", "serving", "fetch", "report"])
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


def every_option() -> list[tuple[str, argparse.Action]]:
    (commands,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    found = []
    for name, sub in commands.choices.items():
        found += [(name, a) for a in sub._actions if not isinstance(a, argparse._HelpAction)]
    return found


def test_help_shows_the_default_of_every_option_of_every_command():
    options = every_option()
    assert {name for name, _ in options} == {"run", "serving", "fetch", "report"}
    assert len(options) > 30
    missing = [f"{n} {a.option_strings}" for n, a in options if "default" not in (a.help or "")]
    assert missing == []


@pytest.mark.parametrize(
    "name, words",
    [
        ("run", ("default: 3)", "default: target,mtp3,mtp6", 'default: {"thinking": true}')),
        ("serving", ("default: 1 4 16 64)", "default: 32)", "default: 1 4)")),
        ("fetch", ("default: the hub)",)),
        ("report", ("needed; no default",)),
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
    assert "Main results" in (out / "report.md").read_text()
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


@pytest.mark.parametrize("library", ["jinja2", "matplotlib"])
def test_a_missing_library_is_named_with_the_extra_that_brings_it(
    data, tmp_path, fake, capsys, monkeypatch, library
):
    out = tmp_path / "out"
    assert run_command(data, out, fake(4, []), fake(4, [1, 1])) == 0
    monkeypatch.setitem(sys.modules, library, None)
    assert main(["report", "--out", str(out)]) == 2
    assert f"need{'s' if library == 'jinja2' else ''} {library}: pip install" in (
        capsys.readouterr().err
    )


# --- serving


def study(out, **more) -> Study:
    settings = {"target": "any", "methods": (), "prompts": [["hi"]], "levels": (1,)}
    settings |= {"rates": (1.0,), "prompts_per_level": 4, "max_new_tokens": 4, "server_args": ()}
    return Study(**settings | {"out": out} | more)


def test_a_study_into_a_folder_without_a_run_is_refused_before_any_work(
    data, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(serving_study, "run", lambda *_: pytest.fail("work was done"))
    options = run_options(data, tmp_path / "out", "http://127.0.0.1:1", "http://127.0.0.1:1")
    options = [o for o in options if o not in ("--rounds", "2")]
    for name in ("target", "hyperdflash6"):
        at = options.index(f"{name}=http://127.0.0.1:1")
        del options[at - 1 : at + 1]
    options += ["--hyperdflash-draft", "x"]
    assert main(["serving", *options[1:]]) == 2
    assert "holds no run" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_load_client_that_fails_is_quoted_and_its_output_kept(tmp_path):
    log = tmp_path / "logs" / "client.log"
    source = "import sys; print('asking'); sys.exit('refused: port 9')"
    message = r"load client ended with code 1: refused: port 9; all it said is in .*client\.log"
    for _ in range(2):
        with pytest.raises(EvalError, match=message):
            run_client([sys.executable, "-c", source], log)
    assert sorted(log.read_text().splitlines()) == ["asking"] * 2 + ["refused: port 9"] * 2
    with pytest.raises(EvalError, match="code 3: it said nothing"):
        run_client([sys.executable, "-c", "import sys; sys.exit(3)"], log)


CLIENT_NUMBERS = {"output_throughput": 10.0} | dict.fromkeys(
    (name for pair in serving_study.LATENCIES.values() for name in pair), 1.0
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

    monkeypatch.setattr(serving_study, "run_client", run_client)
    return runs


def test_a_load_larger_than_the_prompts_asks_them_again(tmp_path, monkeypatch):
    """Found as: 256 requests were asked for, and as many were sent as there were prompts."""
    runs = answering(monkeypatch)
    few = study(tmp_path, prompts=[["one", "more"], ["two"], ["three"]])
    assert serving_study.load(few, "http://any", 8)["requests"] == 8
    assert runs == [["one", "two", "three", "one", "two", "three", "one", "two"]]
    serving_study.load(few, "http://any", 2)
    assert len((tmp_path / "prompts.jsonl").read_text().splitlines()) == 3


def test_a_load_that_was_not_answered_whole_is_refused(tmp_path, monkeypatch):
    answering(monkeypatch, lost=1)
    with pytest.raises(EvalError, match=r"expected 4 answered requests, found 3.*client\.log"):
        serving_study.load(study(tmp_path), "http://any", 4)


def test_a_server_that_does_not_start_names_its_log(tmp_path, monkeypatch):
    from eval.methods import Method

    def fail(*_):
        raise ServerFailed("server exited with code 1:\nno memory")

    monkeypatch.setattr(serving_study, "measure", fail)
    with pytest.raises(
        EvalError, match=r"target: server exited with code 1: no memory .*target\.log"
    ):
        serving_study.run(study(tmp_path, methods=(Method("target", (), 0),)), progress=str)


def test_a_study_goes_on_with_the_methods_that_it_lacks_and_notices_damage(tmp_path, monkeypatch):
    from eval.methods import Method

    asked = []

    def measure(_, method):
        asked.append(method.name)
        return {"concurrency": [], "poisson": [], "round_ms": None}

    monkeypatch.setattr(serving_study, "measure", measure)
    one, two = Method("target", (), 0), Method("mtp3", (), 3)
    folder = tmp_path / serving_study.FOLDER
    serving_study.run(study(folder, methods=(one,)), progress=str)
    serving_study.run(study(folder, methods=(one, two)), progress=str)
    assert asked == ["target", "mtp3"]
    assert set(read_study(tmp_path)["round_ms"]) == {"target", "mtp3"}
    path = folder / serving_study.RESULT
    path.write_text(path.read_text().replace("mtp3", "mtp6"))
    with pytest.raises(EvalError, match="is damaged"):
        read_study(tmp_path)
    serving_study.run(study(folder, methods=(one,)), progress=str)
    assert asked == ["target", "mtp3", "target"]
    assert read_study(tmp_path / "none") is None


def test_one_method_s_numbers_are_never_of_two_drafters(tmp_path, monkeypatch):
    """Found as: the second drafter's study showed the first one's numbers, and nothing said so."""
    from eval.methods import DRAFT_OPTION, Method

    def drafter(name: str) -> Method:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text(name)
        return Method("hyperdflash6", (DRAFT_OPTION, str(tmp_path / name)), 6)

    numbers = {"concurrency": [], "poisson": [], "round_ms": None}
    monkeypatch.setattr(serving_study, "measure", lambda *_: numbers)
    folder = tmp_path / "out" / serving_study.FOLDER
    first, second = drafter("first"), drafter("second")
    serving_study.run(study(folder, methods=(first,)), progress=str)
    with pytest.raises(EvalError, match=r"has hyperdflash6 with the draft .*/first; .*/second"):
        serving_study.run(study(folder, methods=(second,)), progress=str)
    monkeypatch.chdir(tmp_path)
    relative = Method("hyperdflash6", (DRAFT_OPTION, "first/"), 6)
    assert relative.identity() == first.identity()
    serving_study.run(study(folder, methods=(relative,)), progress=str)
    (tmp_path / "first" / "config.json").write_text("trained again")
    with pytest.raises(EvalError, match=r"with the draft files \w+; this command has \w+"):
        serving_study.run(study(folder, methods=(first,)), progress=str)


def test_a_study_of_another_draft_than_the_run_s_is_refused(data, tmp_path, fake, capsys):
    out = tmp_path / "out"
    assert run_command(data, out, fake(4, []), fake(4, [1, 1])) == 0
    found = json.loads((out / "run.json").read_text())
    found["identities"]["hyperdflash6"] |= {"draft": "/first", "draft files": "ab"}
    write_json(out / "run.json", sealed(found))
    options = ["--target", "any", "--data-dir", str(data), "--benchmarks", "gsm8k"]
    options += ["--methods", "target,hyperdflash6", "--hyperdflash-draft", "second"]
    assert main(["serving", *options, "--out", str(out)]) == 2
    assert "run.json has hyperdflash6 with the draft /first" in capsys.readouterr().err
    assert not (out / serving_study.FOLDER).exists()


def test_a_study_is_refused_while_its_run_s_folder_is_in_use(
    data, tmp_path, fake, capsys, monkeypatch
):
    out = tmp_path / "out"
    assert run_command(data, out, fake(4, []), fake(4, [1, 1])) == 0
    monkeypatch.setattr(serving_study, "run", lambda *_: pytest.fail("work was done"))
    options = ["--target", "any", "--data-dir", str(data), "--benchmarks", "gsm8k"]
    with lock(out, runner.KIND):
        assert main(["serving", *options, "--methods", "target", "--out", str(out)]) == 2
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

        def __enter__(self):
            return self

        def __exit__(self, *_) -> None:
            pass

    monkeypatch.setattr(runner, "Server", Slow)
    monkeypatch.setattr(serving_study, "Server", Slow)
    options = ["--target", "any", "--data-dir", str(data), "--benchmarks", "gsm8k"]
    options += ["--methods", "target", "--num-prompts", "1", "--start-minutes", "90"]
    out = tmp_path / "out"
    assert main(["run", *options, "--rounds", "1", "--out", str(out)]) == 1
    assert main(["serving", *options, "--out", str(out)]) == 2
    assert set(waited) == {90 * 60} and len(waited) == 3
    assert main(["run", *options[:-1], "0", "--out", str(out)]) == 2


def test_the_report_holds_the_study(data, tmp_path, fake):
    out = tmp_path / "out"
    assert run_command(data, out, fake(4, []), fake(4, [1, 1])) == 0
    level = {"requests": 4, "tokens_per_s": 10.0}
    latencies = {name: [1.0, 2.0] for name in serving_study.LATENCIES}
    content = {
        "provenance": {},
        "concurrency": {"target": [{"concurrency": c, **level, **latencies} for c in (1, 4)]},
        "poisson": {"target": [{"rate": 2.0, **level, **latencies}]},
        "round_ms": {"target": None},
    }
    write_json(out / serving_study.FOLDER / serving_study.RESULT, sealed(content))
    report.write(out)
    text = (out / "report.md").read_text()
    assert "| target only | 10 | 10 |" in text and "| target only | 1 / 2 | 1 / 2 | 1 / 2 |" in text
    assert "](throughput.svg)" in text
