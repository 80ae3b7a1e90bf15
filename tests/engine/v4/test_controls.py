"""What must break a V4 server breaks it; and what nothing may read is never read."""

from __future__ import annotations

from pathlib import Path

import pytest
import requests

from sglang_hyperdflash.tools.server_process import ServerFailed, hyperdflash_arguments
from tests.engine.conftest import ids
from tests.engine.v4 import controls
from tests.engine.v4.conftest import NEW_TOKENS, Reference
from tests.engine.v4.findings import note
from tests.engine.v4.serve import accepted, ask, known, start

pytestmark = pytest.mark.v4


def faulty(servers, fault, target, drafter, reference: Reference, folder: Path):
    environment = known(folder, reference.prompts, reference.answers)
    environment[controls.FAULT] = fault.__name__
    arguments = hyperdflash_arguments(drafter)
    return start(servers, "fault", target, folder, *arguments, **environment)


def test_a_ring_that_forgets_short_rounds_changes_the_tokens(
    servers, target, drafter, reference, tmp_path
):
    fault = controls.keep_no_rows_for_a_short_round
    server = faulty(servers, fault, target, drafter, reference, tmp_path)
    answers = ids(ask(server, reference.prompts, NEW_TOKENS))
    servers.stop("v4-fault")
    different = sum(a != b for a, b in zip(answers, reference.answers, strict=True))
    assert different == len(reference.prompts)
    note("control: rings forget short rounds", wrong=f"{different} of {len(answers)}")


def test_rings_without_speculation_are_refused(servers, target, drafter, reference, tmp_path):
    fault = controls.rings_without_speculation
    with pytest.raises(ServerFailed):
        faulty(servers, fault, target, drafter, reference, tmp_path)
    servers.stop("v4-fault")
    note("control: rings of no speculation", refused=True)


def test_nothing_reads_what_rejected_drafts_left(servers, target, drafter, reference, tmp_path):
    """Every round overwrites the rows of the round before, so a chain needs no clearing."""
    fault = controls.poison_rejected_states
    server = faulty(servers, fault, target, drafter, reference, tmp_path)
    answers = ask(server, reference.prompts, NEW_TOKENS)
    servers.stop("v4-fault")
    assert ids(answers) == reference.answers
    assert min(accepted(answers)) > 0
    note("rejected states overwritten with NaN", answers="6 of 6", rounds=accepted(answers))


def test_the_poison_is_read_where_a_token_was_accepted(
    servers, target, drafter, reference, tmp_path
):
    fault = controls.poison_an_accepted_state
    server = faulty(servers, fault, target, drafter, reference, tmp_path)
    with pytest.raises(requests.RequestException):
        ask(server, reference.prompts, NEW_TOKENS)
    log = server.log.read_text(errors="replace")
    servers.stop("v4-fault")
    assert "a compressed row that was never computed" in log
    note("control: an accepted state overwritten with NaN", noticed=True)
