"""What ``python -m eval`` refuses, and what it reads: prompts, methods, folders of runs."""

import json
import os
import shutil
import sys
from unittest.mock import Mock

import pytest
import requests

from eval import __main__ as command
from eval import runner, serving
from eval.__main__ import main
from eval.errors import EvalError
from eval.methods import DRAFT_OPTION, Method, parse_urls, resolve
from eval.prompts import load
from sglang_hyperdflash.tools.errors import HyperDFlashError, SeamError, ServerFailed
from sglang_hyperdflash.tools.ownership import lock
from tests.conftest import ROOT

RUN = "run --target any --methods baseline"
REFUSED = [
    (f"{RUN},magic", "'magic'"),
    ("run --target any --methods hyperdflash6 --hyperdflash-draft x", "--methods"),
    (f"{RUN},dflash6", "--dflash-draft"),
    ("run --methods baseline", "--target"),
    (f"{RUN} --benchmarks nothing", "nothing.jsonl"),
    (f"{RUN} --benchmarks hub:openai/gsm8k", "hub:openai/gsm8k"),
    (f"{RUN} --benchmarks hub:openai//f.jsonl", "hub:openai//f.jsonl"),
    (f"{RUN} --server ours", "--server"),
    (f"{RUN} --rounds 0", "--rounds"),
    (f"{RUN} --concurrency 4 0", "--concurrency"),
    (f"{RUN} --temperature -1", "--temperature"),
    (f"{RUN} --start-minutes 0", "--start-minutes"),
    ("fetch --benchmarks nothing", "'nothing'"),
    ("report", "run.json"),
]


@pytest.mark.parametrize("options, name", REFUSED, ids=[options for options, _ in REFUSED])
def test_a_bad_command_names_what_is_wrong_before_any_work(tmp_path, refused, options, name):
    out = tmp_path / "out"
    assert name in refused(*options.split(), "--out", out)
    assert not list(out.glob("[!.]*"))


@pytest.mark.parametrize(
    "error, line",
    [
        (EvalError("what"), "what"),
        (SeamError("what"), "what"),
        (ServerFailed("code 1:\n\nTraceback\n  File\nOSError: port\n"), "code 1: OSError: port"),
        (FileNotFoundError(2, "no", "x"), "[Errno 2] no: 'x'"),
        (requests.ConnectionError(), "ConnectionError"),
    ],
)
def test_an_error_that_the_user_can_fix_is_one_line(tmp_path, refused, monkeypatch, error, line):
    monkeypatch.setitem(command.COMMANDS, "report", Mock(side_effect=error))
    assert refused("report", "--out", tmp_path) == f"error: {line}\n"


def test_a_fault_of_ours_keeps_its_traceback(tmp_path, monkeypatch):
    monkeypatch.setitem(command.COMMANDS, "report", Mock(side_effect=KeyError("bug")))
    with pytest.raises(KeyError):
        main(["report", "--out", str(tmp_path)])


def test_a_report_is_made_of_units_or_of_the_stored_results(finished, refused, monkeypatch):
    out = finished.out
    before = (out / "results.json").read_text(), (out / "report.md").read_text()
    (out / "report.md").write_text("as it was")
    with lock(out, runner.KIND):
        assert str(os.getpid()) in refused("report", "--out", out)
        assert (out / "report.md").read_text() == "as it was"
    for has_units in (True, False):
        if not has_units:
            shutil.rmtree(out / "units")
        assert main(["report", "--out", str(out)]) == 0
        assert ((out / "results.json").read_text(), (out / "report.md").read_text()) == before
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "sglang-hyperdflash[eval]" in refused("report", "--out", out)
    (out / "results.json").write_text('{"rows": [')
    assert "results.json" in refused("report", "--out", out)


def test_a_study_needs_a_free_folder_of_a_run_with_its_drafts(
    data, finished, refused, tmp_path, monkeypatch
):
    def study(out, *more):
        options = ["--target", "any", "--data-dir", data, "--benchmarks", "gsm8k", "--out", out]
        return refused("serving", *options, *(more or ("--methods", "baseline")))

    monkeypatch.setattr(serving, "run", lambda *_: pytest.fail("work was done"))
    assert str(tmp_path / "none") in study(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with lock(finished.out, runner.KIND):
        assert str(os.getpid()) in study(finished.out)
    run = runner.read_sealed(finished.out / "run.json")
    run["identities"]["hyperdflash6"] |= {"draft": "/first", "draft files": "ab"}
    runner.write_sealed(finished.out / "run.json", run)
    drafts = ("--methods", "baseline,hyperdflash6", "--hyperdflash-draft", "second")
    assert "/first" in study(finished.out, *drafts)


@pytest.mark.parametrize("line", ["{", '{"turns": "x"}', '{"text": "x"}', "[]"])
def test_a_bad_line_of_a_benchmark_is_named(tmp_path, line):
    (tmp_path / "b.jsonl").write_text('{"turns": ["ok"]}\n' + line + "\n")
    with pytest.raises(HyperDFlashError, match=r"b\.jsonl:2: "):
        load(tmp_path, ["b"], 10)
    (tmp_path / "b.jsonl").write_text("\n")
    with pytest.raises(HyperDFlashError, match=r"b\.jsonl"):
        load(tmp_path, ["b"], 10)


def test_prompts_are_drawn_from_the_whole_file(tmp_path):
    """Families come in turn: even distances would leave most of them out."""
    lines = [json.dumps({"turns": [str(i)]}) for i in range(48)]
    (tmp_path / "all.jsonl").write_text("\n".join(lines))
    chosen = [int(turn) for (turn,) in load(tmp_path, ["all"], 8)["all"]]
    assert chosen == [int(turn) for (turn,) in load(tmp_path, ["all"], 8)["all"]]
    assert sorted(set(chosen)) == chosen and len(chosen) == 8
    assert chosen[0] < 12 and chosen[-1] >= 36 and len({turn % 12 for turn in chosen}) > 4
    assert len(load(tmp_path, ["all"], 50)["all"]) == 48


def test_two_benchmarks_of_one_name_are_refused_by_both_paths(tmp_path):
    paths = [tmp_path / folder / "test.jsonl" for folder in ("one", "two")]
    for path in paths:
        path.parent.mkdir()
        path.write_text('{"turns": ["x"]}\n')
    for names in (list(map(str, paths)), ["test", str(paths[1])]):
        with pytest.raises(EvalError, match=rf"{names[0]} and {names[1]} "):
            load(tmp_path / "one", names, 10)


def test_methods_become_server_arguments():
    drafts = {"mtp_draft": None, "hyperdflash_draft": "d"}
    names = ["hyperdflash6", "mtp3", "dspark", "baseline"]
    methods = {m.name: m for m in resolve(names, drafts, {})}
    assert list(methods) == ["baseline", "mtp3", "hyperdflash6", "dspark"]
    assert methods["baseline"].arguments == ()
    steps = "EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1"
    mtp = f"{steps} --speculative-num-draft-tokens 4"
    assert " ".join(methods["mtp3"].arguments).endswith(mtp)
    assert methods["hyperdflash6"].arguments[-1] == "d"
    assert parse_urls(["baseline=http://a:1/"]) == {"baseline": "http://a:1"}
    # V4-Flash bundles DSPARK's draft, whose config says how many tokens it drafts.
    assert methods["dspark"].arguments == ("--speculative-algorithm", "DSPARK")
    config = ROOT / "examples" / "deepseek_v4_flash_config" / "dspark" / "config.json"
    assert methods["dspark"].num_drafts == json.loads(config.read_text())["dspark_block_size"]
    (_, named) = resolve(["baseline", "dspark"], {"dspark_draft": "owner/draft"}, {})
    assert named.arguments == (*methods["dspark"].arguments, DRAFT_OPTION, "owner/draft")


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
