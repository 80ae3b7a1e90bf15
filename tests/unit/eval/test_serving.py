"""Servers of a run, which of them methods share; the serving study and its load client."""

import importlib.util
import json
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from eval import report, runner, serving
from eval.__main__ import main
from eval.client import Answer
from eval.errors import EvalError
from eval.methods import Method, resolve
from eval.runner import Plan, Servers, with_noise_floor, write_run, write_sealed
from eval.serving import Study, read_study, run_client
from sglang_hyperdflash.tools.errors import ServerFailed

METHODS = ["baseline", "hyperdflash6", "hyperdflash-adaptive"]


@pytest.fixture
def started(monkeypatch) -> SimpleNamespace:
    """Servers that are there without a process, and the mock that starts them in turn."""
    servers = [Mock(url=f"http://127.0.0.1:{i}") for i in range(1, 4)]
    for server in servers:
        server.process.poll.return_value = None
    start = Mock(side_effect=servers)
    monkeypatch.setattr(runner, "Server", start)
    monkeypatch.setattr(runner, "converse", lambda *_: Answer())
    return SimpleNamespace(servers=servers, start=start)


def plan(tmp_path, methods, **more) -> Plan:
    settings = {"target": "any", "prompts": {}, "cells": (), "rounds": 1, "max_new_tokens": 4}
    return Plan(methods=with_noise_floor(methods), out=tmp_path, **settings, **more)


@pytest.mark.parametrize("together", [True, False])
def test_methods_share_a_server_where_arguments_and_environment_are_equal(
    tmp_path, started, together
):
    asked = plan(tmp_path, resolve(METHODS, {"hyperdflash_draft": "d"}, {}), together=together)
    by_name = {m.name: m for m in asked.methods}
    assert by_name["hyperdflash6"].arguments == by_name["hyperdflash-adaptive"].arguments
    with Servers(asked) as servers:
        urls = {name: servers.url(by_name[name]) for name in METHODS}
        assert len(set(urls.values())) == 3
        given = [call.kwargs["environment"] for call in started.start.call_args_list]
        assert given == [dict(by_name[name].environment) for name in METHODS]
        last = by_name["hyperdflash-adaptive"]
        assert servers.url(last) == urls[last.name] and started.start.call_count == 3
        assert len(servers.running) == (3 if together else 1)
        if together:  # the noise floor is of the baseline's server
            assert servers.url(by_name["baseline-again"]) == urls["baseline"]


def test_a_slow_target_is_given_the_minutes_that_were_asked_for(data, tmp_path, started):
    for server in started.servers:
        server.wait.side_effect = ServerFailed("not ready")
    options = ["--target", "any", "--data-dir", str(data), "--benchmarks", "gsm8k"]
    options += ["--methods", "baseline", "--num-prompts", "1", "--start-minutes", "90"]
    options += ["--out", str(tmp_path / "out")]
    assert main(["run", *options, "--rounds", "1"]) == 1
    assert main(["serving", *options]) == 2
    assert [server.wait.call_args.args for server in started.servers] == [(90 * 60,)] * 3


def test_a_run_s_file_names_no_folder_of_the_machine(tmp_path):
    (tmp_path / "drafter").mkdir()
    methods = resolve(("baseline", "hyperdflash6"), {"hyperdflash_draft": tmp_path / "drafter"}, {})
    write_run(plan(tmp_path, methods, server_args=("--log", str(tmp_path / "x.log"))))
    text = (tmp_path / "run.json").read_text()
    assert str(tmp_path) not in text
    assert text.count('".../drafter"') == 2 and '".../x.log"' in text


ONE, TWO = Method("baseline", (), 0, "http://one"), Method("mtp3", (), 3, "http://two")


def study(out, methods=(), prompts=("hi",)) -> Study:
    return Study(Plan("any", methods, {}, (), 1, 4, out, together=False), prompts, (1,), (1.0,), 4)


def test_the_load_client_has_the_key_and_its_failure_is_quoted(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERDFLASH_API_KEY", "secret")
    log, name = tmp_path / "logs" / "client.log", "OPENAI_API_KEY"
    source = f"import os, sys; print(os.environ['{name}'], flush=True); sys.exit('refused: port 9')"
    for _ in range(2):
        with pytest.raises(EvalError, match=r"code 1: refused: port 9; .*client\.log"):
            run_client([sys.executable, "-c", source], log)
    assert log.read_text().splitlines() == ["secret", "refused: port 9"] * 2
    with pytest.raises(EvalError, match="code 3"):
        run_client([sys.executable, "-c", "import sys; sys.exit(3)"], log)
    client = importlib.util.find_spec("sglang.benchmark.serving")
    assert f'os.environ.get("{name}")' in Path(client.origin).read_text()


def test_a_load_repeats_its_prompts_and_must_be_answered_whole(tmp_path, monkeypatch):
    runs, lost = [], 0
    latencies = [name for pair in serving.LATENCIES.values() for name in pair]

    def client(command: list[str], log) -> None:
        options = dict(pairwise(command))
        lines = Path(options["--dataset-path"]).read_text().splitlines()
        asked = [json.loads(line)["conversations"][0]["content"] for line in lines]
        runs.append("".join(asked[: int(options["--num-prompts"])]))
        numbers = {"output_throughput": 10.0, "completed": len(runs[-1]) - lost}
        numbers |= dict.fromkeys(latencies, 1.0)
        Path(options["--output-file"]).write_text(json.dumps(numbers) + "\n")

    monkeypatch.setattr(serving, "run_client", client)
    few = study(tmp_path, prompts=("a", "b", "c"))
    assert serving.load(few, "http://any", 8)["requests"] == 8
    assert serving.load(few, "http://any", 2)["tokens_per_s"] == 10.0
    assert runs == ["abcabcab", "ab"]
    lost = 1
    with pytest.raises(EvalError, match=r"expected 4 .* found 3.*client\.log"):
        serving.load(few, "http://any", 4)


def test_a_study_goes_on_with_the_methods_that_it_lacks_and_notices_damage(tmp_path, monkeypatch):
    none, failed = {"concurrency": [], "poisson": []}, ServerFailed("exited:\nno memory")
    measure = Mock(side_effect=[none, failed, none, none, none])
    monkeypatch.setattr(serving, "measure", measure)
    both = study(tmp_path / serving.FOLDER, (ONE, TWO))
    with pytest.raises(EvalError, match=r"mtp3: .* no memory .*logs"):
        serving.run(both)
    serving.run(both)
    assert set(read_study(tmp_path)["poisson"]) == {"baseline", "mtp3"}
    path = tmp_path / serving.FOLDER / serving.RESULT
    path.write_text(path.read_text().replace("mtp3", "mtp6"))
    with pytest.raises(EvalError, match=serving.RESULT):
        read_study(tmp_path)
    serving.run(both)
    asked = [call.args[1] for call in measure.call_args_list]
    assert asked == [ONE.url, TWO.url, TWO.url, ONE.url, TWO.url]
    assert read_study(tmp_path / "none") is None


def test_the_report_holds_the_study(finished):
    level = {"requests": 4, "tokens_per_s": 10.0}
    latencies = {name: [1.0, 2.0] for name in serving.LATENCIES}
    levels = [{"concurrency": c, **level, **latencies} for c in (1, 4)]
    content = {
        "provenance": {},
        "concurrency": {"baseline": levels, "hyperdflash6": levels[:1]},
        "poisson": {"baseline": [{"rate": 2.0, **level, **latencies}], "hyperdflash6": []},
    }
    write_sealed(finished.out / serving.FOLDER / serving.RESULT, content)
    report.write(finished.out)
    text = (finished.out / "report.md").read_text()
    assert "| baseline | 10 | 10 |" in text and "| baseline | 1 / 2 | 1 / 2 | 1 / 2 |" in text
    assert "| HyperDFlash (6) | 10 | not measured |" in text
