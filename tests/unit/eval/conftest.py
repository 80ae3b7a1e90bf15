"""Fixtures of the tests of ``python -m eval``."""

import json
from collections import namedtuple
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.unit.eval.fake_server import FakeServer, run_command

Finished = namedtuple("Finished", "out target ours")  # a run's folder, the servers that it asked


@pytest.fixture
def fake():
    with ExitStack() as running:
        yield lambda *args, **kwargs: running.enter_context(FakeServer(*args, **kwargs))


@pytest.fixture
def data(tmp_path) -> Path:
    """A folder with six prompts of gsm8k."""
    folder = tmp_path / "data"
    folder.mkdir()
    lines = [json.dumps({"turns": ["q" * (i + 1), "more"]}) + "\n" for i in range(6)]
    (folder / "gsm8k.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture
def finished(data, tmp_path, fake) -> Finished:
    run = Finished(tmp_path / "finished", fake(4, []), fake(4, [1, 0, 2]))
    assert run_command(data, *run) == 0
    return run


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
