"""Fixtures of the tests of ``python -m eval``."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.unit.eval.fake_server import FakeServer, run_command


class Finished(NamedTuple):
    """A copy of a finished run's folder, and the two servers that it asked."""

    out: Path
    target: FakeServer
    ours: FakeServer


@pytest.fixture
def fake():
    with ExitStack() as running:
        yield lambda *args, **kwargs: running.enter_context(FakeServer(*args, **kwargs))


def write_prompts(folder: Path) -> Path:
    """A folder with six prompts of gsm8k."""
    folder.mkdir()
    lines = [json.dumps({"turns": ["q" * (i + 1), "more"]}) for i in range(6)]
    (folder / "gsm8k.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def data(tmp_path):
    return write_prompts(tmp_path / "data")


@pytest.fixture(scope="session")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    with FakeServer(4, []) as target, FakeServer(4, [1, 0, 2]) as ours:
        assert run_command(write_prompts(folder / "data"), folder / "out", target, ours) == 0
        yield Finished(folder / "out", target, ours)


@pytest.fixture
def finished(measured, tmp_path) -> Finished:
    return measured._replace(out=Path(shutil.copytree(measured.out, tmp_path / "finished")))


@pytest.fixture
def refused(capsys):
    """Run a command that must end with 2 and one line of error, and return that line."""
    from eval.__main__ import main

    def run(*command: object) -> str:
        capsys.readouterr()
        assert main(list(map(str, command))) == 2
        line = capsys.readouterr().err
        assert line.startswith("error: ") and line.count("\n") == 1
        return line

    return run
