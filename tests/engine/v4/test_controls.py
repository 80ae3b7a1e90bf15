"""What must break a V4 server breaks it."""

from __future__ import annotations

import pytest
import requests

from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from tests.engine.v4 import controls
from tests.engine.v4.findings import note
from tests.engine.v4.serve import ask, known, start

pytestmark = pytest.mark.v4


def test_the_poison_is_read_where_a_token_was_accepted(servers, target, drafter, texts, tmp_path):
    """So that rejected states may be NaN (a case of the matrix) is a finding."""
    batch, expected = texts.few()
    environment = known(tmp_path, batch, expected)
    environment[controls.FAULT] = controls.poison_an_accepted_state.__name__
    arguments = hyperdflash_arguments(drafter)
    server = start(servers, "fault", target, tmp_path, *arguments, **environment)
    with pytest.raises(requests.RequestException):
        ask(server, batch, len(expected[0]))
    servers.stop("v4-fault")
    assert "a compressed row that was never computed" in server.log.read_text(errors="replace")
    note("control: an accepted state overwritten with NaN", noticed=True)
