"""Where a number came from, said so that another machine can read it."""

import subprocess

import pytest

from sglang_hyperdflash.tools.provenance import CHECKOUT, provenance, published, without_machine
from tests.conftest import ROOT

# Folders of one machine, or next to the checkout; a URL, a host or a relative path is none.
MACHINE = r"(^|[^A-Za-z0-9_./])/(work|tmp|root|home|Users)/|\.\./shared"
PLAIN = "build/a-b", "org/Model-1", "m=http://127.0.0.1:1/v1", "a / b"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"--out={ROOT}/build/x", "--out=build/x"),
        ("~/drafts/mine/", ".../mine"),
        ("../elsewhere/data/benchmarks", ".../benchmarks"),
        ("/a/one.jsonl,/b/two.jsonl", ".../one.jsonl,.../two.jsonl"),
        ('{"path": "/a/b", "n": 1}', '{"path": ".../b", "n": 1}'),
        ("--log /var/log/x.log --tp 8", "--log .../x.log --tp 8"),
        *((text, text) for text in PLAIN),
    ],
)
def test_a_path_says_nothing_of_the_machine(text, shown):
    assert without_machine(text) == shown


def test_a_command_line_and_committed_files_name_no_folder_of_one_machine(monkeypatch):
    assert CHECKOUT == ROOT
    monkeypatch.setattr("sys.argv", ["/x/study.py", "serve", "--data-dir", "/of/mine/train"])
    assert provenance()["argv"] == "study.py serve --data-dir .../train"
    keys = ["--api-key", "secret", "--server-args", "--tp 8 --api-key=secret"]
    monkeypatch.setattr("sys.argv", ["/x/eval", *keys])
    assert "secret" not in provenance()["argv"]
    words = ["--tp", "8", "--admin-api-key", "secret", "--api-key=secret", "--log", "/var/log/x"]
    shown = ["--tp", "8", "--admin-api-key", "KEY", "--api-key=KEY", "--log", ".../x"]
    assert published(words) == shown
    command = ["git", "-C", str(ROOT), "grep", "-nIE", MACHINE]
    matches = subprocess.run(command, capture_output=True, text=True)
    assert matches.returncode in (0, 1), matches.stderr
    # The folders inside a container are everybody's.
    assert [line for line in matches.stdout.splitlines() if ":docker run " not in line] == []
