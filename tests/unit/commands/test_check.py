"""``hyperdflash check`` says what is wrong before a server has to."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sglang_hyperdflash import seams
from sglang_hyperdflash.commands import check
from sglang_hyperdflash.tools.errors import SeamError
from tests.waiting import PATIENCE
from tests.warm_start.client import run_command


def test_a_sound_installation_is_told_in_five_lines():
    """With imports of its own: what they print a user would see."""
    command = [sys.executable, "-m", "sglang_hyperdflash.cli", "check"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
    lines = ended.stdout.splitlines()
    subjects = ["sglang", "seams", "platform", "kernels", "environment"]
    assert [line.split()[0] for line in lines] == subjects
    assert all(line.split()[1] == "ok" for line in lines)
    assert "each matching the source it was written for" in lines[1]
    assert "agrees with the reference (4 x 4096, 4 x 256)" in lines[3]


def test_a_plugin_that_is_switched_off_is_wrong(monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "no-such-plugin")
    ended = run_command("check", timeout=PATIENCE)
    found = {line.split()[0]: line.split(maxsplit=2)[1:] for line in ended.stdout.splitlines()}
    assert ended.returncode == 2
    assert [name for name, (state, _) in found.items() if state == "WRONG"] == ["seams"]
    assert "not in place: all of them. Check that SGLANG_PLUGINS" in found["seams"][1]
    assert found["environment"] == ["ok", "SGLANG_PLUGINS=no-such-plugin"]


def test_what_fails_is_named_and_the_rest_still_looked_at(monkeypatch):
    def broken() -> str:
        raise SeamError("SGLang seam a:b changed")

    monkeypatch.setattr(check, "CHECKS", {"seams": broken, "kernels": check.kernels})
    seams_line, kernels_line, _ = check.examine()
    assert (seams_line.ok, seams_line.found) == (False, "SGLang seam a:b changed")
    assert kernels_line.ok


def test_a_kernel_that_is_off_is_wrong(monkeypatch):
    from triton_ops import hc_gate_op

    def wrong(*args, **kwargs):
        return hc_gate_op.hc_gate_reduce_reference(*args, **kwargs) * 1.01

    monkeypatch.setattr("sglang_hyperdflash.draft.reducer.hc_gate_reduce", wrong)
    with pytest.raises(RuntimeError, match="the reducer's kernel is wrong"):
        check.kernels()


def test_another_sglang_is_wrong(monkeypatch):
    monkeypatch.setattr(seams.metadata, "version", lambda name: "0.6.0")
    with pytest.raises(SeamError, match=r"found 0\.6\.0"):
        check.sglang_version()
