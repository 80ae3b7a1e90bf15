"""The documents' shell commands, typed in order, unless a mark says why not (``documents.py``)."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_hyperdflash import CPU_PLATFORM
from sglang_hyperdflash.tools.server_process import Server
from tests.conftest import ROOT
from tests.documents import PAGES, Fence, commands, fences, shell_fences, split_environment

pytestmark = pytest.mark.slow

COPIED = ("sglang_hyperdflash", "triton_ops", "eval", "examples", "docs")
PRINTED_ADDRESS = "127.0.0.1:30000"
READ = ("README.md", "docs/install.md", "docs/serving.md", "docs/training.md")
READ += ("docs/benchmarking.md", "docs/troubleshooting.md")
SUM = "698"  # of what README and docs/serving.md ask
# A busy machine may take minutes to start a server.
SECONDS, START_SECONDS = 1800, 1200


class Reader:
    """Types one page's commands in a folder; a server runs while blocks name its address."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.server = folder, None
        self.answers: list[tuple[str, str]] = []
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {"PYTHONPATH": str(folder), "PATH": path, "OMP_NUM_THREADS": "1"}

    def read(self, page: str) -> None:
        """Run every unmarked block."""
        try:
            for fence in shell_fences([ROOT / page]):
                if fence.kind == "background":
                    self.serve(fence)
                elif not fence.mark:
                    if PRINTED_ADDRESS not in fence.text:
                        self.stop()
                    for words in commands(fence):
                        variables, words = split_environment(words)
                        self.run(words, fence, variables)
        finally:
            self.stop()

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()
        self.server = None

    def serve(self, fence: Fence) -> None:
        """Start the block's server on a free port, instead of the last one."""
        self.stop()
        ((variables, words),) = map(split_environment, commands(fence))
        start = ["python", "-m", "sglang.launch_server", "--model-path"]
        assert words[:4] == start and CPU_PLATFORM in variables, fence.where
        # The server runs elsewhere: a relative path of the checkout becomes an absolute one.
        places = {word: self.folder / word for word in words[4:]}
        model, *arguments = [str(p) if p.exists() else word for word, p in places.items()]
        log = self.folder / "build" / f"server-{fence.line}.log"
        environment = self.environment | variables
        self.server = Server(model, *arguments, log=log, environment=environment)
        self.server.wait(START_SECONDS)

    def run(self, words: list[str], fence: Fence, variables: dict[str, str] | None = None) -> None:
        """Run one command as printed but for the server's port; it must end with 0."""
        if self.server is not None:
            address = self.server.url.removeprefix("http://")
            words = [word.replace(PRINTED_ADDRESS, address) for word in words]
        environment = {**os.environ, **self.environment}
        del environment[CPU_PLATFORM]  # of the tests; a command asks for it where it must
        environment |= variables or {}
        options = {"capture_output": True, "text": True, "timeout": SECONDS}
        ended = subprocess.run(words, cwd=self.folder, env=environment, **options)
        said = f"{fence.where}: {shlex.join(words)}\n{(ended.stdout + ended.stderr)[-3000:]}"
        assert ended.returncode == 0 and "Traceback" not in said, said
        self.answers.append((words[0], ended.stdout))

    def curled(self) -> list[str]:
        return [answer for program, answer in self.answers if program == "curl"]


@pytest.fixture
def reader(tmp_path) -> Reader:
    """In a copy of the checkout; the metadata of an editable install name our entry points."""
    for name in (*COPIED, *(path.name for path in ROOT.glob("*.egg-info"))):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    (tmp_path / "build").mkdir()
    return Reader(tmp_path)


def test_the_readme(reader):
    reader.read("README.md")
    for number, fence in enumerate(fences(ROOT / "README.md")):
        if fence.language == "python":
            script = reader.folder / f"readme_{number}.py"
            script.write_text(fence.text)
            reader.run(["python", script.name], fence)
    (answer,) = reader.curled()
    assert SUM in json.loads(answer)["choices"][0]["message"]["content"]
    # With the chat template; without it the answer is four other words.
    assert SUM in reader.answers[-1][1].splitlines()[-1]


def test_the_page_on_serving(reader):
    reader.read("docs/serving.md")
    generated, metrics = reader.curled()
    assert SUM in json.loads(generated)["text"]
    assert json.loads(generated)["meta_info"]["spec_verify_ct"] > 0
    assert "hyperdflash:verify_rounds_total" in metrics
    prompts = (reader.folder / "examples/tiny_deepseek_v4/turns.jsonl").read_text().splitlines()
    answers = (reader.folder / "build/answers.jsonl").read_text().splitlines()
    assert len(answers) == len(prompts)


def test_the_page_on_training(reader):
    """Trained twice, served in between; the drafter accepts more than three tokens a round."""
    reader.read("docs/training.md")
    tiny = reader.folder / "build" / "tiny"
    for name, work in (("drafter", "work"), ("drafter_captured", "work_captured")):
        assert (tiny / name / "model.safetensors").is_file()
        log = (tiny / work / "stage-1" / "training_log.jsonl").read_text().splitlines()
        assert max(json.loads(line)["held_out"]["problems"]["tau"] for line in log) > 3
    (answer,) = reader.curled()
    assert SUM in json.loads(answer)["choices"][0]["message"]["content"]
    rows = json.loads((tiny / "comparison" / "results.json").read_text())["rows"]
    (ours,) = (row for row in rows if row["method"] == "hyperdflash2")
    assert ours["identical_to_baseline"] and ours["tau"] > 3


@pytest.mark.parametrize("page", ["docs/install.md", "docs/troubleshooting.md"])
def test_the_pages_on_installation_and_troubleshooting(reader, page):
    reader.read(page)
    assert "WRONG" not in "".join(said for _, said in reader.answers)


def test_the_page_on_benchmarking(reader):
    reader.read("docs/benchmarking.md")
    load = json.loads((reader.folder / "build" / "load.jsonl").read_text())
    assert load["completed"] == 8
    results = json.loads((reader.folder / "build/comparison/results.json").read_text())
    ours = [row for row in results["rows"] if row["method"] == "hyperdflash2"]
    assert ours and all(row["identical_to_baseline"] for row in ours)


def test_no_other_page_has_commands_to_run():
    others = [page for page in PAGES if str(page.relative_to(ROOT)) not in READ]
    assert [fence.where for fence in shell_fences(others) if not fence.mark] == []
