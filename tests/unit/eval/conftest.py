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


@pytest.fixture
def serving_study() -> dict:
    """What a study under load leaves in a run's results."""
    load = {"requests": 8, "ttft_ms": [1, 2], "tpot_ms": [3, 4], "e2e_ms": [5, 6]}
    return {
        "concurrency": {
            "baseline": [
                {"concurrency": 1, "tokens_per_s": 100.0, **load},
                {"concurrency": 4, "tokens_per_s": 300.0, **load},
            ],
            "hyperdflash6": [{"concurrency": 1, "tokens_per_s": 180.0, **load}],
        },
        "poisson": {"baseline": [{"rate": 2.0, "tokens_per_s": 90.0, **load}], "hyperdflash6": []},
    }
