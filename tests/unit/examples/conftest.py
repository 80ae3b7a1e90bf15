"""The scripts of the tiny target's folder, imported as they import each other."""

import importlib
import sys

import pytest
import torch

from tests.conftest import EXAMPLE


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return importlib.import_module


@pytest.fixture
def call(script, monkeypatch):
    """Run a script's ``main`` with these arguments."""

    def run(name: str, *arguments: object):
        monkeypatch.setattr(torch, "set_num_threads", int)  # the process is other tests', too
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        return script(name).main()

    return run
