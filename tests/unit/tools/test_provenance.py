"""Where a number came from, said so that another machine can read it."""

from __future__ import annotations

import subprocess

import pytest

from sglang_hyperdflash.tools.provenance import CHECKOUT, provenance, without_machine
from tests.conftest import ROOT

# Folders of one machine, or next to the checkout; a URL, a host or a relative path is none.
MACHINE = r"(^|[^A-Za-z0-9_./])/(work|tmp|root|home|Users)/|\.\./shared"


def test_the_checkout_is_where_the_tests_are():
    assert CHECKOUT == ROOT


@pytest.mark.parametrize(
    "text, shown",
    [
        (f"{ROOT}/examples/tiny_deepseek_v4/mtp", "examples/tiny_deepseek_v4/mtp"),
        (f"--out={ROOT}/build/x", "--out=build/x"),
        ("/data/of/somebody/train", ".../train"),
        ("~/drafts/mine/", ".../mine"),
        ("../elsewhere/data/benchmarks", ".../benchmarks"),
        ("/a/one.jsonl,/b/two.jsonl", ".../one.jsonl,.../two.jsonl"),
        ('{"path": "/a/b", "n": 1}', '{"path": ".../b", "n": 1}'),
        ("--log /var/log/x.log --tp 8", "--log .../x.log --tp 8"),
        ("build/eval-tiny", "build/eval-tiny"),
        ("deepseek-ai/DeepSeek-V4-Flash", "deepseek-ai/DeepSeek-V4-Flash"),
        ("mtp6=http://127.0.0.1:30000/v1", "mtp6=http://127.0.0.1:30000/v1"),
        ("1/2", "1/2"),
        ("a / b", "a / b"),
    ],
)
def test_a_path_says_nothing_of_the_machine(text, shown):
    assert without_machine(text) == shown


def test_the_command_line_is_stored_without_the_machine_s_folders(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/x/study.py", "serve", "--data-dir", "/of/mine/train"])
    assert provenance()["argv"] == "study.py serve --data-dir .../train"


def test_no_committed_file_names_a_folder_of_one_machine():
    """Found as: results with the full path of every drafter of the machine that measured them."""
    command = ["git", "-C", str(ROOT), "grep", "-nIE", MACHINE]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode in (0, 1), found.stderr
    # The folders inside a container are everybody's.
    assert [line for line in found.stdout.splitlines() if ":docker run " not in line] == []
