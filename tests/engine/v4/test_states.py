"""Compressor and index state after any block of any width equals that of one-row decoding.

``product`` says which code this is; ``test_matrix`` serves blocks of ten rows, too, the most that
SGLang's rings take.
"""

import json
from typing import Any

import pytest

from sglang_hyperdflash.serving.settings import RANDOM, WIDTH
from sglang_hyperdflash.serving.settings import WIDTHS as NAMED
from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from tests.engine.v4.checkpoint import write_drafter
from tests.engine.v4.findings import note
from tests.engine.v4.product import CONTROL, PREFIXES, PRODUCT, WIDTHS
from tests.engine.v4.serve import start

pytestmark = pytest.mark.v4
BLOCK = max(WIDTHS)
# A slot for each request of the product, and its three pages.
ROOM = ("--max-running-requests", "40", "--max-total-tokens", "32768")
ROOM += ("--swa-full-tokens-ratio", "1.0")


@pytest.fixture(scope="module")
def report(servers, target, tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("v4-states")
    environment = {PRODUCT: str(folder / "product.json"), WIDTH: RANDOM}
    environment[NAMED] = ",".join(map(str, WIDTHS))
    arguments = hyperdflash_arguments(write_drafter(folder / "drafter", block_size=BLOCK))
    start(servers, "states", target, folder, *ROOM, *arguments, **environment)
    servers.stop("v4-states")
    return json.loads((folder / "product.json").read_text())


def test_every_width_offset_and_accepted_length_leaves_one_row_decodings_state(report):
    """Rows of rings, compressed keys, and what the index chooses among the rows of a block."""
    counts = report["every"]
    note("states: widths 2 to 10, every offset of 4 and 128, every accepted length", **counts)
    assert counts["cases"] == sum(WIDTHS) * len(PREFIXES)
    assert not any(counts[what] for what in ("ring_rows", "keys", "selections")), counts


def test_a_rejected_rows_state_in_an_accepted_rows_place_is_noticed(report):
    """Wherever there was a rejected row; in its ring, and in the keys and choices made of it."""
    control = report["rejected row"]
    assert min(control[what] for what in ("ring_rows", "keys", "selections")) > 0
    note("control: a rejected row's state is written", wrong=sum(control["wrong"].values()))
    assert control["wrong"] == {str(width): (width - 1) * len(CONTROL) for width in WIDTHS}


def test_a_planner_that_keeps_four_rows_is_wrong_from_five_on(report):
    """As SGLang's did before #34189: answers were wrong at seven verify rows (#34959, #33872)."""
    wrong = {int(width): n for width, n in report["four rows"]["wrong"].items()}
    note("control: the planner keeps four rows", wrong=list(wrong.values()))
    assert [width for width, n in wrong.items() if n] == [*range(5, BLOCK + 1)]
