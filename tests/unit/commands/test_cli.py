"""The command line before a command runs: help, version, wrong words, Ctrl-C."""

import os
import signal
import subprocess
import sys

import pytest

from sglang_hyperdflash import SGLANG_VERSION, __version__
from sglang_hyperdflash.commands.options import COMMANDS
from tests.conftest import ROOT
from tests.waiting import PATIENCE

COMMAND = [sys.executable, "-m", "sglang_hyperdflash"]
HELP = """
import sys
from sglang_hyperdflash.cli import main
for words in (["--help"], *([name, "--help"] for name in sys.argv[1:])):
    try:
        main(words)
    except SystemExit as ended:
        assert ended.code == 0
print("heavy:", *{"torch", "transformers", "sglang", "numpy"} & sys.modules.keys())
"""
# A library that catches whatever stops its import.
DEAF = """
import time
print("importing", flush=True)
try:
    time.sleep(3600)
except BaseException:
    pass
"""


@pytest.mark.heavy
def test_no_help_imports_torch_or_sglang():
    command = [sys.executable, "-c", HELP, *COMMANDS]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
    assert ended.returncode == 0 and ended.stdout.endswith("\nheavy:\n"), ended.stderr
    assert all(ended.stdout.count(f"usage: hyperdflash {name} ") == 1 for name in COMMANDS)


@pytest.mark.heavy
def test_the_version_is_ours_and_sglangs():
    command = [*COMMAND, "--version"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
    assert ended.returncode == 0
    assert __version__ in ended.stdout and SGLANG_VERSION in ended.stdout


@pytest.mark.heavy
def test_ctrl_c_during_imports_is_one_line(tmp_path):
    (tmp_path / "torch.py").write_text(DEAF)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*COMMAND, "check"], env=environment, cwd=tmp_path, **pipes)
    try:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert (process.returncode, said.count("\n")) == (130, 1) and "Traceback" not in said


@pytest.mark.parametrize(
    "words, meant",
    [
        ("plann", " plan?"),
        ("regenrate --server x", " regenerate?"),
        ("--versoin check", " --version?"),
        ("plan --tpp 4", " --tp?"),
        ("plan --gpu-gb=80", " --gpu-gib?"),
        ("init --target x --reducer hcgate", " hc_gate?"),
    ],
)
def test_what_was_meant(refused, words, meant):
    assert meant in refused(*words.split())


@pytest.mark.parametrize("words", ["xyz", "plan --zzz", "init --out x", "plan --tp none"])
def test_no_guess_where_nothing_is_close(refused, words):
    assert "?" not in refused(*words.split())
