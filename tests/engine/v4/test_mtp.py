"""EAGLE with the target's own multi-token-prediction layer: the rival, on the same target."""

from __future__ import annotations

import pytest

from eval.methods import resolve
from tests.engine.conftest import ids
from tests.engine.drafters import assert_varied
from tests.engine.v4 import drafts
from tests.engine.v4.conftest import NEW_TOKENS, Reference
from tests.engine.v4.findings import note
from tests.engine.v4.serve import accepted, ask, known, own_blocks, start
from tests.engine.v4.test_rounds import assert_rows_are_bit_equal
from tests.engine.v4.trace import ROWS, read_rows

pytestmark = pytest.mark.v4


def test_mtp_gives_the_targets_tokens_and_rows(servers, target, reference: Reference, tmp_path):
    """Every length of acceptance, by an oracle; the layer's own drafts are written down before."""
    rows, blocks = tmp_path / "rows.jsonl", tmp_path / "blocks.jsonl"
    environment = known(tmp_path, reference.prompts, reference.answers)
    environment |= {ROWS: str(rows), drafts.OWN_DRAFTS: str(blocks)}
    (_, method) = resolve(["baseline", "mtp6"], {}, {})
    server = start(servers, "mtp", target, tmp_path, *method.arguments, **environment)
    answers = ask(server, reference.prompts, NEW_TOKENS)
    servers.stop("v4-mtp")
    assert ids(answers) == reference.answers
    assert min(accepted(answers)) > 0, accepted(answers)
    compared = assert_rows_are_bit_equal(read_rows(rows), reference.rows)
    assert compared >= 0.9 * len(reference.rows)
    assert_varied([block for _, block in own_blocks(blocks).values()])
    log = server.log.read_text(errors="replace")
    assert "not initialized from checkpoints" not in log
    note("EAGLE with the target's MTP layer", answers="6 of 6", rows=compared,
         rounds=accepted(answers))  # fmt: skip
