"""What a reader does: the documents' own commands, typed in order, in a copy of the checkout.

Every block of shell commands is run unless its mark says why not (``tests/documents.py``).
``test_docs.py`` holds that the marks are honest as far as a parser can tell.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from sglang_hyperdflash.tools.server_process import Server
from tests.conftest import ROOT
from tests.documents import Fence, commands, fences, shell_fences, split_environment

pytestmark = pytest.mark.slow

COPIED = ("sglang_hyperdflash", "triton_ops", "cpu_engine", "eval", "examples", "docs")
PRINTED_ADDRESS = "127.0.0.1:30000"
READ = ("install", "serving", "training", "benchmarking", "troubleshooting")
MODULE = ["python", "-m", "sglang.launch_server"]
SECONDS = 1800
SUM = "698"  # of what README and docs/serving.md ask
# A busy machine may take minutes to start a server.
START_SECONDS = 1200


class Reader:
    """Types one page's commands in a folder; a server runs while blocks name its address."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server: Server | None = None
        self.stack = ExitStack()
        self.answers: list[tuple[str, str]] = []
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {"PYTHONPATH": str(folder), "PATH": path, "OMP_NUM_THREADS": "1"}

    def read(self, fences: list[Fence]) -> None:
        """Run every unmarked block."""
        with self.stack:
            for fence in fences:
                if fence.kind == "background":
                    self.serve(fence)
                elif not fence.mark:
                    if PRINTED_ADDRESS not in fence.text:
                        self.stop()
                    self.type(fence)

    def stop(self) -> None:
        """End the server, if there is one."""
        self.stack.close()
        self.server = None

    def serve(self, fence: Fence) -> None:
        """Start the block's server on a free port, instead of the last one."""
        self.stop()
        (words,) = commands(fence)
        assert words[:3] == MODULE and words[3] == "--model-path", fence.where
        model = self.folder / words[4]
        arguments = [self.in_folder(word) for word in words[5:]]
        log = self.folder / "build" / f"server-{fence.line}.log"
        self.server = self.stack.enter_context(
            Server(model, *arguments, log=log, environment=self.environment)
        )
        self.server.wait(START_SECONDS)

    def in_folder(self, word: str) -> str:
        """A relative path of the checkout as an absolute one: the server runs elsewhere."""
        return str(self.folder / word) if (self.folder / word).exists() else word

    def type(self, fence: Fence) -> None:
        """Run the block's commands one after another, as printed but for the server's port."""
        for printed in commands(fence):
            own, words = split_environment(printed)
            if self.server is not None:
                address = self.server.url.removeprefix("http://")
                words = [word.replace(PRINTED_ADDRESS, address) for word in words]
            self.run(words, fence, own)

    def run(self, words: list[str], fence: Fence, own: dict[str, str] | None = None):
        """Run one command in the folder; it must end with 0 and without a traceback."""
        ended = subprocess.run(
            words,
            cwd=self.folder,
            env={**os.environ, **self.environment, **(own or {})},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        said = (ended.stdout + ended.stderr)[-3000:]
        assert ended.returncode == 0, f"{fence.where}: {shlex.join(words)}\n{said}"
        assert "Traceback" not in said, f"{fence.where}: {shlex.join(words)}\n{said}"
        self.answers.append((words[0], ended.stdout))


@pytest.fixture
def reader(tmp_path) -> Reader:
    """A reader in a copy of the checkout, without what its commands have built."""
    # The metadata of an editable install name the plugin's entry points.
    for name in (*COPIED, *(path.name for path in ROOT.glob("*.egg-info"))):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    (tmp_path / "build").mkdir()
    return Reader(tmp_path)


def page(name: str) -> list[Fence]:
    return shell_fences([ROOT / name])


def curled(reader: Reader) -> list[str]:
    return [answer for program, answer in reader.answers if program == "curl"]


def test_the_readme(reader):
    reader.read(page("README.md"))
    reader.stop()
    for number, fence in enumerate(fences(ROOT / "README.md")):
        if fence.language == "python":
            script = reader.folder / f"readme_{number}.py"
            script.write_text(fence.text)
            reader.run(["python", script.name], fence)
    (answer,) = curled(reader)
    assert SUM in json.loads(answer)["choices"][0]["message"]["content"]
    # Found as: a prompt without the chat template, answered by four other words.
    assert SUM in reader.answers[-1][1].splitlines()[-1]


def test_the_page_on_serving(reader):
    reader.read(page("docs/serving.md"))
    generated, metrics = curled(reader)
    assert SUM in json.loads(generated)["text"]
    assert json.loads(generated)["meta_info"]["spec_verify_ct"] > 0
    assert "hyperdflash:verify_rounds_total" in metrics
    prompts = (reader.folder / "examples/tiny_deepseek_v4/turns.jsonl").read_text().splitlines()
    answers = (reader.folder / "build/answers.jsonl").read_text().splitlines()
    assert len(answers) == len(prompts)


def test_the_page_on_training(reader):
    """Both ways of training; the last block serves the drafter that was trained."""
    reader.read(page("docs/training.md"))
    for name in ("drafter", "drafter_captured"):
        assert (reader.folder / "build" / "tiny" / name / "model.safetensors").is_file()


def test_the_page_on_troubleshooting(reader):
    reader.read(page("docs/troubleshooting.md"))
    assert "WRONG" not in "".join(said for _, said in reader.answers)


def test_the_page_on_installation(reader):
    reader.read(page("docs/install.md"))


def test_the_page_on_benchmarking(reader):
    reader.read(page("docs/benchmarking.md"))
    load = json.loads((reader.folder / "build" / "load.jsonl").read_text())
    assert load["completed"] == 8
    out = reader.folder / "build" / "comparison"
    assert (out / "report.md").is_file()
    rows = json.loads((out / "results.json").read_text())["rows"]
    ours = [row for row in rows if row["method"] == "hyperdflash2"]
    assert ours and all(row["identical_to_baseline"] for row in ours)


def test_no_other_page_has_commands_to_run():
    read = {"README.md"} | {f"docs/{name}.md" for name in READ}
    pages = [ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    pages += [ROOT / "examples" / "tiny_deepseek_v4" / "README.md"]
    others = [path for path in pages if str(path.relative_to(ROOT)) not in read]
    assert [fence.where for fence in shell_fences(others) if not fence.mark] == []
