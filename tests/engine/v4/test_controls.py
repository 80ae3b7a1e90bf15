"""What must break a V4 server breaks it."""

from __future__ import annotations

import pytest
import requests

from sglang_hyperdflash.tools.server_process import ServerFailed, hyperdflash_arguments
from tests.engine.conftest import ids
from tests.engine.v4 import controls
from tests.engine.v4.findings import note
from tests.engine.v4.serve import ask, known, start

pytestmark = pytest.mark.v4


@pytest.fixture
def faulty(servers, target, drafter, texts, tmp_path):
    """Starts a server with a fault and an oracle; it is stopped afterwards."""

    def started(fault):
        environment = known(tmp_path, *texts.few()) | {controls.FAULT: fault.__name__}
        arguments = hyperdflash_arguments(drafter)
        return start(servers, "fault", target, tmp_path, *arguments, **environment)

    yield started
    servers.stop("v4-fault")


def test_a_ring_that_forgets_short_rounds_changes_the_tokens(faulty, texts):
    batch, expected = texts.few()
    answers = ids(ask(faulty(controls.keep_no_rows_for_a_short_round), batch, len(expected[0])))
    wrong = sum(a != b for a, b in zip(answers, expected, strict=True))
    note("control: rings forget short rounds", wrong=f"{wrong} of {len(answers)}")
    assert wrong == len(batch)


def test_rings_without_speculation_are_refused(faulty):
    with pytest.raises(ServerFailed):
        faulty(controls.rings_without_speculation)
    note("control: rings of no speculation", refused=True)


def test_the_poison_is_read_where_a_token_was_accepted(faulty, texts):
    """So that rejected states may be NaN (a case of the matrix) is a finding."""
    batch, expected = texts.few()
    server = faulty(controls.poison_an_accepted_state)
    with pytest.raises(requests.RequestException):
        ask(server, batch, len(expected[0]))
    assert "a compressed row that was never computed" in server.log.read_text(errors="replace")
    note("control: an accepted state overwritten with NaN", noticed=True)
