"""``hyperdflash check`` says what is wrong before a server has to."""

import subprocess
import sys

import pytest
import torch

from sglang_hyperdflash import cli, plugin, seams
from sglang_hyperdflash.commands import check
from tests.waiting import PATIENCE
from tests.warm_start.client import run_command

pytestmark = pytest.mark.heavy


def states(said: str) -> dict[str, str]:
    """The state of every subject; no other line is printed."""
    return {line.split()[0]: line.split()[1] for line in said.splitlines()}


@pytest.mark.slow
def test_a_sound_installation_is_told():
    """With imports of its own: what they print a user would see."""
    command = [sys.executable, "-m", "sglang_hyperdflash", "check"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
    subjects = ["sglang", "hooks", "platform", "environment"]
    assert states(ended.stdout) == dict.fromkeys(subjects, "ok")


@pytest.mark.slow
def test_a_plugin_that_is_switched_off_is_wrong(monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "no-such-plugin")
    ended = run_command("check", timeout=PATIENCE)
    assert ended.returncode == 2 and "SGLANG_PLUGINS=no-such-plugin" in ended.stdout
    assert [name for name, state in states(ended.stdout).items() if state == "WRONG"] == ["hooks"]


@pytest.fixture
def another(monkeypatch) -> None:
    """An installation of another SGLang."""
    cli.build_parser()  # imports libraries that check their own versions
    monkeypatch.setattr(seams.metadata, "version", lambda name: "0.6.0")
    monkeypatch.setattr(check.logging, "disable", lambda level: None)  # of the whole process


def test_what_fails_is_named_and_the_rest_still_looked_at(another, monkeypatch, capsys):
    checks = {"sglang": check.sglang_version, "environment": check.environment}
    monkeypatch.setattr(check, "CHECKS", checks)
    monkeypatch.setenv("HYPERDFLASH_API_KEY", "secret")
    assert cli.main(["check"]) == 2
    said = capsys.readouterr().out
    assert states(said) == {"sglang": "WRONG", "environment": "ok"}
    assert "0.6.0" in said and "HYPERDFLASH_API_KEY=set" in said and "secret" not in said
    if not torch.cuda.is_available():
        assert cli.main(["check", "--gpu"]) == 2
        assert "CUDA" in capsys.readouterr().err
    assert cli.main(["check", "--all"]) == 2


def test_of_another_sglang_the_changed_functions_are_named(another, monkeypatch, capsys):
    monkeypatch.setattr(check, "CHECKS", {"hooks": check.hooks})
    kept, changed, gone = (
        f"tests.unit.commands.test_check:{name}" for name in ("one", "two", "no")
    )
    source = seams.source_hash(one)
    made = [seams.Seam(target, "after", one, source) for target in (kept, changed, gone)]
    monkeypatch.setattr(plugin, "ALL_SEAMS", made)
    assert cli.main(["check"]) == 2
    said = capsys.readouterr().out
    assert "2 of 3" in said and changed in said and gone in said and kept not in said
    monkeypatch.setattr(plugin, "ALL_SEAMS", made[:1])
    assert cli.main(["check"]) == 0


def one() -> int:
    return 1


def two() -> int:
    return 2
