"""The documents: commands parse, named options and files exist, numbers are the committed ones."""

import argparse
import importlib.util
import inspect
import json
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml

from docs.reference.variables import VARIABLES
from eval.options import parser as eval_parser
from sglang_hyperdflash.cli import build_parser
from tests import documents
from tests.conftest import EXAMPLE, ROOT
from tests.documents import PAGES, prose

README = ROOT / "README.md"
RECIPES = sorted((ROOT / "examples").rglob("*.toml"))
MARKS = {"", "untested", "elsewhere", "background", "file"}
VARIABLE = re.compile(r"HYPERDFLASH_[A-Z][A-Z_]*[A-Z]")


@cache
def server_parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def module_parser(name: str) -> argparse.ArgumentParser | None:
    """The parser of ``python -m NAME``, if it is ours or SGLang's."""
    known = {"sglang.launch_server": server_parser, "sglang_hyperdflash": build_parser}
    known["eval"] = eval_parser
    if name.startswith("eval."):
        known[name] = importlib.import_module(name).parser
    return known[name]() if name in known else None


def check_named(path: Path, words: list[str]) -> None:
    """The script exists and names every option."""
    text = path.read_text()
    missing = [word for word in words if word.startswith("--") and f'"{word}"' not in text]
    assert not missing, f"{path} does not name {missing}"


def check(words: list[str]) -> bool:
    """Parse one command, and whether anything can; a parser's refusal is a ``SystemExit``."""
    program, *rest = words
    if program == "torchrun":
        rest = rest[rest.index("-m") :]
    if rest[:2] == ["-m", "sglang.bench_serving"]:  # its parser is made where it runs
        client = importlib.util.find_spec("sglang.benchmark.serving")
        check_named(Path(client.origin), rest[2:])
    elif rest[0] == "-m":
        parser = module_parser(rest[1])
        return parser is not None and bool(parser.parse_args(rest[2:]))
    elif program == "python":
        (script,) = (base / rest[0] for base in (ROOT, EXAMPLE) if (base / rest[0]).is_file())
        check_named(script, rest[1:])
    elif program == "hyperdflash":
        build_parser().parse_args(rest)
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert all("=" in word or re.search(rf"^{word}:", makefile, re.M) for word in rest)
    elif program == "curl":
        json.loads(rest[rest.index("-d") + 1] if "-d" in rest else "{}")
    elif program == "cd":
        assert (ROOT / rest[0]).is_dir()
    else:
        return (program, rest[0]) == ("pip", "install")
    return True


@pytest.mark.parametrize("page", [*PAGES, *RECIPES], ids=lambda page: page.parent.name + page.stem)
def test_every_command_parses(page):
    shown = [(str(page), "", words) for words in documents.commands_in_comments(page.read_text())]
    if page in PAGES:
        blocks = documents.shell_fences([page])
        shown = [(f.where, f.kind, words) for f in blocks for words in documents.commands(f)]
    for where, kind, words in shown:
        try:
            assert check(documents.split_environment(words)[1]) or kind == "untested", (
                "nothing parses it"
            )
        except (SystemExit, Exception) as refusal:
            pytest.fail(f"{where}: {shlex.join(words)}: {refusal!r}")


def test_blocks_are_what_their_marks_say():
    blocks = [fence for page in PAGES for fence in documents.fences(page)]
    assert {"bash", "python"} <= {fence.language for fence in blocks}
    for fence in blocks:
        assert fence.kind in MARKS or fence.kind.startswith("output of"), fence.where
        assert fence.language, f"{fence.where}: name the block's language"
        detail = fence.mark.partition(": ")[2]
        assert fence.kind != "untested" or detail, f"{fence.where}: untested, and why?"
        if fence.language == "python":
            compile(fence.text, fence.where, "exec")
        if fence.kind in ("elsewhere", "file"):
            shown = (ROOT / detail).read_text()
            assert fence.kind == "elsewhere" or fence.text == shown, fence.where


def test_the_examples_data_are_what_the_commands_read():
    from eval.prompts import load
    from sglang_hyperdflash.commands import generate, regenerate
    from sglang_hyperdflash.training.recipe import read_schedule
    from sglang_hyperdflash.training.rows import LeftOut, read_rows

    turns, chats = EXAMPLE / "turns.jsonl", EXAMPLE / "prompts.jsonl"
    assert len(load(ROOT, [str(turns)], 4)["turns"]) == 4
    for path, parse in ((turns, generate.parse_prompt), (chats, regenerate.read_task)):
        assert sum(1 for _ in LeftOut(strict=True).usable(read_rows([path]), parse)) == 12
    for path in RECIPES:
        schedule = read_schedule(path)
        assert schedule.stage, path
        for stage in schedule.stage:
            stage.resolve([12] * len(stage.data), schedule.objective)


def options(parser: argparse.ArgumentParser) -> set[str]:
    """Of a parser and its commands, each of whose help can be printed."""
    parser.format_help()
    names = {name for action in parser._actions for name in action.option_strings}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            names |= set().union(*map(options, action.choices.values()))
    return names


def test_options_metrics_variables_and_links_of_the_pages_exist():
    from sglang.srt.observability import metrics_collector

    from sglang_hyperdflash.serving.scheduler.metrics import FAMILIES

    folders = ("examples", "triton_ops", "eval", "tests/gpu")
    scripts = [path.read_text() for name in folders for path in (ROOT / name).rglob("*.py")]
    flags = options(server_parser()) | options(build_parser()) | options(eval_parser())
    flags |= {flag for script in scripts for flag in re.findall(r'"(--[a-z][a-z0-9-]+)"', script)}
    metrics = set(re.findall(r'name="(sglang:\w+)"', inspect.getsource(metrics_collector)))
    metrics |= set(FAMILIES)
    for page in [*PAGES, ROOT / "docs" / "grafana_hyperdflash.json"]:
        text = page.read_text() if page in documents.GUIDES else prose(page)
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", prose(page))) <= flags, page
        samples = re.findall(r"\b(?:sglang|hyperdflash):\w+", text)
        assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in samples} <= metrics, page
        assert set(VARIABLE.findall(text)) <= {variable.name for variable in VARIABLES}, page
        for link in re.findall(r"\]\((?!http)([^)#]+)", prose(page)):
            assert (page.parent / link).exists(), f"{page}: {link}"


def test_every_file_names_the_same_repository():
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    files = [*PAGES, ROOT / "CITATION.cff", ROOT / "pyproject.toml"]
    named = {
        file: re.findall(r"https://[\w./-]+/sglang-hyperdflash", file.read_text()) for file in files
    }
    assert named[README] and named[ROOT / "CITATION.cff"]
    assert set().union(*named.values()) == {urls["Repository"]}


def test_every_variable_is_documented():
    folders = ("sglang_hyperdflash", "triton_ops", "eval", "examples", "tests")
    files = {file for name in folders for file in (ROOT / name).rglob("*.py")}
    files |= {ROOT / "Makefile", ROOT / ".ci" / "run"}
    files -= {ROOT / "sglang_hyperdflash" / "tools" / "environment.py"}
    texts = (file.read_text().replace("{RECORD}", "HYPERDFLASH_RECORD") for file in files)
    used = set().union(*map(VARIABLE.findall, texts))
    assert {variable.name for variable in VARIABLES} == used


def test_commands_and_probes_of_containers_exist():
    image = (ROOT / "Dockerfile.cpu").read_text()
    assert check(json.loads(re.search(r"^CMD (.*)$", image, re.M)[1]))
    manifest = (ROOT / "examples/kubernetes/hyperdflash.yaml").read_text()
    pods = [one["spec"].get("template") for one in yaml.safe_load_all(manifest)]
    lists = [pod["spec"][name] for pod in pods if pod for name in pod["spec"] if "tainers" in name]
    assert [check(one["command"]) for containers in lists for one in containers] == [True] * 3
    server = Path(importlib.util.find_spec("sglang.srt.entrypoints.http_server").origin).read_text()
    probes = re.findall(r"httpGet: {path: (.*?),", manifest)
    assert len(probes) == 3 and all(f'@app.get("{path}")' in server for path in probes)


def test_figures_and_readme_have_the_numbers_of_the_committed_results():
    pytest.importorskip("matplotlib")
    from docs.figures import draw

    data, readme = draw.numbers(), README.read_text()
    drawn = [(name, draw.HERE / f"{name}-{t}.svg") for name in draw.FIGURES for t in draw.THEMES]
    assert all(draw.digest(name, data) in file.read_text() for name, file in drawn), "make figures"
    assert draw.with_table(readme, data) == readme, "make figures"
    changed = data | {"learning": data["learning"] | {"turned_at_minute": 0.0}}
    assert draw.digest("learning", changed) != draw.digest("learning", data)
    row = {"method": "x", "temperature": 0, "thinking": "off", "concurrency": 1}
    rows = [{"tau": 3.0, "verify_rounds": 10}, {"tau": 2.0, "verify_rounds": 30}]
    rows = [row | counts | {"benchmark": "math"} for counts in rows]
    rows.append(rows[0] | {"benchmark": "gsm8k", "tau": 9.0})
    assert draw.pooled({"rows": rows}, "x", True, 0, "tau") == 1 + (20 + 30) / 40


def test_figures_hold_text_and_read_on_both_themes():
    """Readers can select and search the words; a screen reader has a title and a description."""
    from xml.etree import ElementTree

    tag = "{http://www.w3.org/2000/svg}"
    folder = ROOT / "docs" / "figures"
    for light in folder.glob("*-light.svg"):
        files = (light, folder / light.name.replace("-light", "-dark"))
        trees = [ElementTree.parse(file).getroot() for file in files]
        words = [[text.text for text in tree.iter(f"{tag}text")] for tree in trees]
        assert words[0] == words[1] and len(words[0]) > 10
        assert all(tree.find(f"{tag}{name}").text for tree in trees for name in ("title", "desc"))
