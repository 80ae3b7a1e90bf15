"""Fixtures of the tests of ``python -m eval``."""

from __future__ import annotations

import json

import pytest

from tests.unit.eval.fake_server import FakeServer


@pytest.fixture
def fake():
    servers = []

    def start(*args, **kwargs) -> FakeServer:
        servers.append(FakeServer(*args, **kwargs))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def data(tmp_path):
    """A folder with six prompts of gsm8k."""
    folder = tmp_path / "data"
    folder.mkdir()
    lines = [json.dumps({"turns": ["q" * (i + 1), "more"]}) for i in range(6)]
    (folder / "gsm8k.jsonl").write_text("\n".join(lines) + "\n")
    return folder
