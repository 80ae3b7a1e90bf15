"""The documents: commands parse, paths and links exist, quoted numbers are the committed ones."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import re
import shlex
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest

from sglang_hyperdflash.cli import build_parser
from sglang_hyperdflash.tools.environment import VARIABLES
from tests.conftest import EXAMPLE, ROOT
from tests.documents import (
    GUIDES,
    PAGES,
    Fence,
    commands,
    commands_in_comments,
    fences,
    prose,
    shell_fences,
    split_environment,
)
from tests.unit.serving.scheduler.test_metrics import metrics_in, sglang_metrics

README = ROOT / "README.md"
SERVING = ROOT / "docs" / "serving.md"
MARKS = {"", "untested", "elsewhere", "background", "file"}
VARIABLE = re.compile(r"HYPERDFLASH_[A-Z][A-Z_]*[A-Z]")

# --- commands ------------------------------------------------------------------------------------


class Unknown(Exception):
    """A program that no parser of ours or of SGLang's knows."""


class Loud(argparse.ArgumentParser):
    """Raises where argparse would end the process."""

    def error(self, message):
        raise ValueError(message)


@cache
def server_parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = Loud()
    ServerArgs.add_cli_args(parser)
    return parser


def parse(parser: argparse.ArgumentParser, words: list[str]) -> None:
    """``parse_args`` whose refusal is a ``ValueError``."""
    try:
        parser.parse_args(words)
    except SystemExit as ended:
        raise ValueError(f"the parser refuses {shlex.join(words)}") from ended


def module_parser(name: str) -> argparse.ArgumentParser:
    """The parser of ``python -m NAME``; raises ``Unknown`` where there is none."""
    if name == "sglang.launch_server":
        return server_parser()
    if name == "sglang_hyperdflash.cli":
        return build_parser()
    if name.partition(".")[0] != "eval":
        raise Unknown(f"python -m {name}")
    module = importlib.import_module("eval.options" if name == "eval" else name)
    return module.parser()


def parse_script(path: str, words: list[str]) -> None:
    """``python PATH ...``: the file exists and names every option."""
    found = [base / path for base in (ROOT, EXAMPLE) if (base / path).is_file()]
    if not found:
        raise ValueError(f"there is no {path}")
    check_named(found[0], words)


def check_named(path: Path, words: list[str]) -> None:
    """The file names every option."""
    text = path.read_text()
    missing = [word for word in words if word.startswith("--") and f'"{word}"' not in text]
    if missing:
        raise ValueError(f"{path} does not name {missing}")


def parse_make(words: list[str]) -> None:
    """Every target is in the Makefile."""
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        if "=" not in word and not re.search(rf"^{word}:", makefile, re.M):
            raise ValueError(f"the Makefile has no target {word}")


def check(words: list[str]) -> None:
    """Parse one command.

    Raises:
        ValueError: its parser refuses it. Unknown: there is no parser.
    """
    program, rest = words[0], words[1:]
    if program == "torchrun":
        at = rest.index("-m")
        return parse(module_parser(rest[at + 1]), rest[at + 2 :])
    if rest[:2] == ["-m", "sglang.bench_serving"]:  # its parser is made where it runs
        client = importlib.util.find_spec("sglang.benchmark.serving")
        return check_named(Path(client.origin), rest[2:])
    if program == "python" and rest[0] == "-m":
        return parse(module_parser(rest[1]), rest[2:])
    if program == "python":
        return parse_script(rest[0], rest[1:])
    if program == "hyperdflash":
        return parse(build_parser(), rest)
    if program == "make":
        return parse_make(rest)
    if program == "curl":
        return check_curl(rest)
    if program == "cd":
        return check_folder(rest[0])
    if (program, rest[0]) != ("pip", "install"):
        raise Unknown(program)
    return None


def check_folder(name: str) -> None:
    """A folder of the checkout."""
    if not (ROOT / name).is_dir():
        raise ValueError(f"there is no folder {name}")


def check_curl(words: list[str]) -> None:
    """A request's body is JSON."""
    if "-d" in words:
        json.loads(words[words.index("-d") + 1])


@pytest.mark.parametrize("fence", shell_fences(PAGES), ids=lambda fence: fence.where)
def test_every_command_parses(fence: Fence):
    for words in commands(fence):
        try:
            check(split_environment(words)[1])
        except Unknown as program:
            assert fence.kind == "untested", f"{fence.where}: nothing parses {program}"
        except ValueError as refused:
            pytest.fail(f"{fence.where}: {refused}")


RECIPES = sorted((ROOT / "examples").rglob("*.toml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_commands_in_the_comments_of_a_training_file_parse(recipe: Path):
    for words in commands_in_comments(recipe.read_text()):
        check(words)


def test_commands_in_comments_are_found():
    two_lines = "# Made by:\n#     hyperdflash init --out build \\\n#         --seed 1\n"
    assert commands_in_comments(two_lines) == [shlex.split("hyperdflash init --out build --seed 1")]
    assert any(commands_in_comments(recipe.read_text()) for recipe in RECIPES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_block_is_indented_where_no_test_looks(page):
    """Found as: commands that nothing parsed. A fence has a language, and a mark."""
    assert re.findall(r"\n\n( {4,}\S.*)", prose(page)) == []


@pytest.mark.parametrize(
    "command, message",
    [
        ("hyperdflash init --target T", "refuses"),
        ("hyperdflash train --config c --work w --steps 3", "refuses"),
        ("python -m eval run --outt o", "refuses"),
        ("python -m sglang.launch_server --model-path T --speculative-algorythm X", "algorythm"),
        ("python -m sglang.bench_serving --base-uri U", "does not name"),
        ("python docs/figures/draw.py --folder f", "does not name"),
        ("python docs/figures/drow.py", "there is no"),
        ("cd doc", "there is no folder"),
        ("make demonstration", "no target"),
        ("curl -d {broken http://h", "Expecting"),
    ],
)
def test_a_command_that_is_wrong_is_found(command, message):
    with pytest.raises(ValueError, match=message):
        check(shlex.split(command))


def test_comparisons_on_gpus_load_one_method_at_a_time_on_all_of_them():
    """Found as: five servers of the paper's comparison, all on GPU 0."""
    options = importlib.import_module("eval.options")
    page = [ROOT / "docs" / "benchmarking.md"]
    shown = [words for f in shell_fences(page) if "GPU node" in f.detail for words in commands(f)]
    asked = [options.parser().parse_args(words[3:]) for words in shown]
    assert [args.command for args in asked] == ["run", "serving"]
    assert asked[0].one_at_a_time and all("--tp-size" in args.server_args for args in asked)


def test_the_python_that_is_asked_for_is_sglang_s():
    """Found as: Python 3.10, for which there is no SGLang 0.5.23."""
    needed = importlib.metadata.metadata("sglang")["Requires-Python"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == needed
    pages = README.read_text() + (ROOT / "docs" / "install.md").read_text()
    named = set(re.findall(r"(?:Python |\| )(3\.\d+) or newer", pages))
    assert named == {needed.removeprefix(">=")}


def test_marks_are_known_and_say_why_or_where():
    for page in PAGES:
        for fence in fences(page):
            assert fence.kind in MARKS or fence.kind.startswith("output of"), fence.where
            assert fence.language, f"{fence.where}: name the block's language"
            if fence.kind == "untested":
                assert len(fence.detail.split()) >= 2, f"{fence.where}: untested, and why?"
            if fence.kind in ("elsewhere", "file"):
                assert (ROOT / fence.detail).is_file(), f"{fence.where}: {fence.detail}"


def test_python_in_the_pages_is_python():
    shown = [fence for page in PAGES for fence in fences(page) if fence.language == "python"]
    assert shown
    for fence in shown:
        compile(fence.text, fence.where, "exec")


def test_blocks_that_show_a_file_show_all_of_it():
    shown = [fence for page in PAGES for fence in fences(page) if fence.kind == "file"]
    assert shown
    for fence in shown:
        assert fence.text == (ROOT / fence.detail).read_text(), fence.where


def test_the_commands_read_the_examples_prompts():
    from eval.prompts import load
    from sglang_hyperdflash.commands import generate, regenerate
    from sglang_hyperdflash.training.rows import LeftOut, read_rows

    turns, chats = EXAMPLE / "turns.jsonl", EXAMPLE / "prompts.jsonl"
    assert len(load(ROOT, [str(turns)], 4)["turns"]) == 4
    for path, parse in ((turns, generate.parse_prompt), (chats, regenerate.read_task)):
        assert sum(1 for _ in LeftOut(strict=True).usable(read_rows([path]), parse)) == 12


# --- names in the prose --------------------------------------------------------------------------


def options(parser: argparse.ArgumentParser) -> set[str]:
    found = {name for action in parser._actions for name in action.option_strings}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= set().union(*(options(one) for one in action.choices.values()))
    return found


@cache
def known_options() -> set[str]:
    """Of SGLang's server, our commands, ``eval``, and the example scripts."""
    scripts = [
        s for name in ("examples", "triton_ops", "eval") for s in (ROOT / name).rglob("*.py")
    ]
    named = (re.findall(r'"(--[a-z][a-z0-9-]+)"', script.read_text()) for script in scripts)
    parsers = (server_parser(), build_parser(), module_parser("eval"))
    return set().union(*map(options, parsers), *named)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_metrics_and_variables_exist(page):
    from sglang_hyperdflash.serving.scheduler.metrics import FAMILIES

    text = page.read_text() if page in GUIDES else prose(page)
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", prose(page)))
    assert flags <= known_options()
    assert metrics_in(text) <= sglang_metrics() | set(FAMILIES)
    assert set(VARIABLE.findall(text)) <= {variable.name for variable in VARIABLES}


PATH = re.compile(r"`([\w.-]+(?:/[\w.*-]+)+/?|[\w-]+\.(?:py|toml|md))`")
# Written by commands, or of the reader's own folders.
NOT_OURS = ("build/", "WORK/", "DATA/", "OWNER/", "deepseek-ai/")
WRITTEN = {"report.md", "train/math.jsonl", "train/chat.jsonl", "benchmarks/*.jsonl"}
# These say that paths without a folder in front are the package's.
PACKAGE_PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "docs" / "how_it_works.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_in_the_prose_exist(page):
    bases = [ROOT, page.parent]
    if page in PACKAGE_PAGES:
        bases.append(ROOT / "sglang_hyperdflash")
    named = [name for name in PATH.findall(prose(page)) if not name.startswith(NOT_OURS)]
    missing = [name for name in named if not any(list(base.glob(name)) for base in bases)]
    assert [name for name in missing if name not in WRITTEN] == []


def slug(heading: str) -> str:
    """A heading's anchor as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(h) for h in re.findall(r"^#+ (.*)$", prose(page), re.M)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page):
    text = prose(page)
    links = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    for link in links:
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {link}"


def test_the_project_s_links_are_the_readme_s():
    section = (ROOT / "pyproject.toml").read_text().split("[project.urls]")[1].split("\n\n")[0]
    links = dict(re.findall(r'^(\w+) = "(https://\S+)"$', section, re.M))
    assert "Paper" in links
    assert [link for link in links.values() if link not in README.read_text()] == []


# --- tables --------------------------------------------------------------------------------------


def test_the_table_of_environment_variables_is_complete():
    folders = (
        "sglang_hyperdflash",
        "triton_ops",
        "cpu_engine",
        "eval",
        "examples",
        "tests",
        "docs/figures",
    )
    files = {file for folder in folders for file in (ROOT / folder).rglob("*.py")}
    files |= {ROOT / "Makefile", ROOT / ".ci" / "run"}
    files -= {ROOT / "sglang_hyperdflash" / "tools" / "environment.py"}
    used = set().union(*(VARIABLE.findall(file.read_text()) for file in files))
    assert {variable.name for variable in VARIABLES} == used


def test_the_gaps_of_a_tie_are_those_of_the_report():
    from eval.identity import TIE_GAPS

    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert [gap for gap in TIE_GAPS.values() if str(gap) not in text] == []


def test_every_refused_argument_is_listed():
    from sglang_hyperdflash.serving.startup.checks import UNSUPPORTED

    text = SERVING.read_text()
    missing = [name for name in UNSUPPORTED if f"--{name.replace('_', '-')}" not in text]
    assert missing == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_shipped_training_files_are_valid(path):
    from sglang_hyperdflash.training.recipe import read_schedule

    schedule = read_schedule(path)
    assert schedule.stage
    for stage in schedule.stage:
        stage.resolve(12, schedule.objective)


# --- results -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def draw():
    """``docs/figures/draw.py`` as a module."""
    pytest.importorskip("matplotlib")
    path = ROOT / "docs" / "figures" / "draw.py"
    spec = importlib.util.spec_from_file_location("draw", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_figures_were_drawn_from_the_committed_results(draw):
    digest = draw.digest(json.loads(draw.RESULTS.read_text()))
    for name in draw.FIGURES:
        for theme in draw.THEMES:
            drawn = (draw.HERE / f"{name}-{theme}.svg").read_text()
            assert digest in drawn, "run: python docs/figures/draw.py"


def test_the_table_of_results_is_the_committed_results(draw):
    content = json.loads(draw.RESULTS.read_text())
    text = README.read_text()
    assert draw.with_table(text, content) == text, "run: python docs/figures/draw.py"


def test_tau_is_over_all_rounds(draw):
    rows = [{"tau": 3.0, "verify_rounds": 10}, {"tau": 2.0, "verify_rounds": 30}]
    assert draw.tau(rows) == 1 + (20 + 30) / 40


def test_every_committed_result_is_named_and_no_other():
    command = ["git", "-C", str(ROOT), "ls-files", "eval/results"]
    files = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    committed = {file.split("/")[2] for file in files if file.count("/") > 2}
    named = set().union(
        *(re.findall(r"eval/results/(\w+)", page.read_text()) for page in [README, *GUIDES])
    )
    assert committed == named and len(committed) <= 8
