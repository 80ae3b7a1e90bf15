"""Compressor and index state after any block of any width equals that of one-row decoding.

``product`` says which code this is. A server with a block of ten rows, the most that SGLang's rings
take, runs all cases before it serves. Then it serves, in a width drawn every round: chunked
prefill, page hits, retraction, the index's top 512 of more; each row of attention, which reads
those states, is the one of no speculation.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from sglang_hyperdflash.serving.width.settings import RANDOM, WIDTH
from sglang_hyperdflash.serving.width.settings import WIDTHS as NAMED
from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from tests.engine.conftest import ids
from tests.engine.v4.checkpoint import write_drafter
from tests.engine.v4.conftest import TOKENS, Texts
from tests.engine.v4.findings import note
from tests.engine.v4.product import CONTROL, PREFIXES, PRODUCT, WIDTHS
from tests.engine.v4.serve import ask, start
from tests.engine.v4.test_matrix import CHUNKS, PAGE, RETRACT, RETRACTED
from tests.engine.v4.trace import ROWS, assert_rows_are_bit_equal, read_rows

pytestmark = pytest.mark.v4
BLOCK = max(WIDTHS)
# A slot for each request of the product, and its three pages.
ROOM = ("--max-running-requests", "40", "--max-total-tokens", "32768")
ROOM += ("--swa-full-tokens-ratio", "1.0")


@pytest.fixture(scope="module")
def served(servers, target, texts: Texts, tmp_path_factory) -> dict[str, Any]:
    """The product's report; and ``answers``, ``rows`` and ``log`` of the same server's service."""
    folder = tmp_path_factory.mktemp("v4-states")
    report, rows = folder / "product.json", folder / "rows.jsonl"
    environment = texts.oracle(folder) | {PRODUCT: str(report), ROWS: str(rows)} | RETRACT
    environment |= {WIDTH: RANDOM, NAMED: ",".join(map(str, WIDTHS))}
    # All requests run at once here, in few steps.
    environment["SGLANG_TEST_RETRACT_INTERVAL"] = "8"
    drafter = write_drafter(folder / "drafter", block_size=BLOCK)
    arguments = (*ROOM, *CHUNKS, *hyperdflash_arguments(drafter))
    server = start(servers, "states", target, folder, *arguments, **environment)
    answers = {n: ask(server, texts.asked[n][0], TOKENS[n], n[0]) for n in TOKENS}
    servers.stop("v4-states")
    log = server.log.read_text(errors="replace")
    return json.loads(report.read_text()) | {
        "answers": answers, "rows": read_rows(rows), "log": log
    }  # fmt: skip


def test_every_width_offset_and_accepted_length_leaves_one_row_decodings_state(served):
    """Rows of rings, compressed keys, and what the index chooses among the rows of a block."""
    counts = dict(served["every"])
    wrong = counts.pop("wrong")
    note("states: widths 2 to 10, every offset of 4 and 128, every accepted length", **counts)
    cases = counts["cases"]
    assert cases == sum(WIDTHS) * len(PREFIXES)
    assert not any(wrong.values()), wrong
    assert not any(counts[f"wrong_{what}"] for what in ("ring_rows", "keys", "selections"))
    assert counts["written"] > 10 * cases and counts["ring_rows"] > 100 * cases
    assert min(counts["keys"], counts["selections"], counts["chosen_of_their_block"]) > cases


def test_a_rejected_rows_state_in_an_accepted_rows_place_is_noticed(served):
    """Wherever there was a rejected row; in its ring, and in the keys and choices made of it."""
    control = served["rejected row"]
    assert min(control[f"wrong_{what}"] for what in ("ring_rows", "keys", "selections")) > 0
    note("control: a rejected row's state is written", wrong=sum(control["wrong"].values()))
    assert control["wrong"] == {str(width): (width - 1) * len(CONTROL) for width in WIDTHS}


def test_a_planner_that_keeps_four_rows_is_wrong_from_five_on(served):
    """As SGLang's did before #34189: answers were wrong at seven verify rows (#34959, #33872)."""
    wrong = {int(width): n for width, n in served["four rows"]["wrong"].items()}
    note("control: the planner keeps four rows", wrong=list(wrong.values()))
    assert [width for width, n in wrong.items() if n] == [*range(5, BLOCK + 1)]


def test_served_rows_are_one_row_decodings(served, texts: Texts):
    answers = [answer for name in TOKENS for answer in served["answers"][name]]
    assert ids(answers) == [answer for name in TOKENS for answer in texts.asked[name][1]]
    rows = assert_rows_are_bit_equal(served["rows"], texts.rows)
    cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
    times = served["log"].count(RETRACTED)
    assert max(cached) >= PAGE and times >= 3, (cached, times)
    counts = {name: Counter() for name in ("spec_cap_lens", "spec_correct_drafts")}
    for answer in answers:
        for name, total in counts.items():
            total.update(dict(enumerate(answer["meta_info"][f"{name}_histogram"])))
    widths, rounds = counts.values()
    note("states, served: chunks of 256, page hits, retraction, widths 2 to 10 at random",
         rows=rows, times=times, cached=cached, widths=[widths[n] for n in WIDTHS],
         rounds=[rounds[n] for n in range(BLOCK)])  # fmt: skip
    assert rows >= 0.7 * texts.count(*TOKENS)
    assert all(widths[n] for n in WIDTHS) and all(rounds[n] for n in range(BLOCK))
