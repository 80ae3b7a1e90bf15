"""A server of answers, without a model."""

from __future__ import annotations

import pytest

from tests.unit.commands.native_server import Answers


@pytest.fixture
def server():
    server = Answers()
    yield server
    server.shutdown()
