"""``hyperdflash check`` says what is wrong before a server has to."""

import subprocess
import sys

import pytest
import torch

from sglang_hyperdflash import cli, seams
from sglang_hyperdflash.commands import check
from sglang_hyperdflash.tools.errors import SeamError
from tests.waiting import PATIENCE
from tests.warm_start.client import run_command

pytestmark = pytest.mark.heavy


def states(said: str) -> dict[str, str]:
    """The state of every subject; no other line is printed."""
    return {line.split()[0]: line.split()[1] for line in said.splitlines()}


@pytest.mark.slow
def test_a_sound_installation_is_told():
    """With imports of its own: what they print a user would see."""
    command = [sys.executable, "-m", "sglang_hyperdflash.cli", "check"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
    subjects = ["sglang", "seams", "platform", "environment"]
    assert states(ended.stdout) == dict.fromkeys(subjects, "ok")


@pytest.mark.slow
def test_a_plugin_that_is_switched_off_is_wrong(monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "no-such-plugin")
    ended = run_command("check", timeout=PATIENCE)
    assert ended.returncode == 2 and "SGLANG_PLUGINS=no-such-plugin" in ended.stdout
    assert [name for name, state in states(ended.stdout).items() if state == "WRONG"] == ["seams"]


def test_what_fails_is_named_and_the_rest_still_looked_at(monkeypatch, capsys):
    cli.build_parser()  # imports libraries that check their own versions
    monkeypatch.setattr(seams.metadata, "version", lambda name: "0.6.0")
    checks = {"sglang": check.sglang_version, "platform": check.platform}
    monkeypatch.setattr(check, "CHECKS", checks)
    monkeypatch.setenv("HYPERDFLASH_API_KEY", "secret")
    version, platform, environment = check.examine()
    assert "HYPERDFLASH_API_KEY=set" in environment.detail and "secret" not in environment.detail
    monkeypatch.setattr(check.logging, "disable", lambda level: None)  # of the whole process
    assert cli.main(["check"]) == 2
    assert list(states(capsys.readouterr().out).values()) == ["WRONG", "ok", "ok"]
    assert not version.ok and "0.6.0" in version.detail and platform.ok
    with pytest.raises(SeamError):
        check.sglang_version()
    if not torch.cuda.is_available():
        assert cli.main(["check", "--gpu"]) == 2
        assert "CUDA" in capsys.readouterr().err
    assert cli.main(["check", "--all"]) == 2
