"""Compressor and index state after any block of any width equals that of one-row decoding.

``product`` says which code this is. A server with a block of ten rows, the most that SGLang's rings
take, runs all cases before it serves. Then it serves, in a width drawn every round: chunked
prefill, page hits, retraction, the index's top 512 of more. What each pass finds of the tokens
before it is compared with what a server without speculation found.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sglang_hyperdflash.serving.width.settings import RANDOM, WIDTH
from sglang_hyperdflash.serving.width.settings import WIDTHS as NAMED
from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from tests.engine.conftest import ids
from tests.engine.v4.checkpoint import write_drafter
from tests.engine.v4.findings import note
from tests.engine.v4.product import CONTROL, PREFIXES, PRODUCT, WIDTHS
from tests.engine.v4.serve import Answers, ask, known, prompts, start
from tests.engine.v4.states import STATES, States, read_states
from tests.engine.v4.test_rounds import assert_rows_are_bit_equal
from tests.engine.v4.trace import ROWS, Rows, read_rows

pytestmark = pytest.mark.v4
BLOCK = max(WIDTHS)
LENGTHS = (5, 127, 250, 383, 510)
NEW_TOKENS, TURN_TOKENS, LONG_TOKENS = 96, 40, 32
LONG, PAGE = 2100, 256
# A slot for each request of the product, and its three pages.
ROOM = ("--max-running-requests", "40", "--max-total-tokens", "32768")
ROOM += ("--swa-full-tokens-ratio", "1.0")
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "8"}


@dataclass(frozen=True)
class Served:
    """Texts and answers of first turns, second turns and a long prompt; what was found."""

    texts: list[tuple[Answers, list[dict]]]
    states: States
    rows: Rows
    log: str

    @property
    def answers(self) -> list[list[int]]:
        return [answer for _, answers in self.texts for answer in ids(answers)]


def serve(server, servers, name: str, states: Path, rows: Path, texts=None) -> Served:
    """Ask for all, and stop.

    Args:
        texts: the prompts; without them, second turns follow from this server's own answers.
    """
    found = []
    for i, (letter, tokens) in enumerate(
        (("p", NEW_TOKENS), ("t", TURN_TOKENS), ("l", LONG_TOKENS))
    ):
        if texts is not None:
            batch = texts[i]
        elif letter == "t":
            tails = prompts(*[20] * len(LENGTHS), seed=1)
            first, answers = found[0]
            batch = [p + a + t for p, a, t in zip(first, ids(answers), tails, strict=True)]
        else:
            batch = prompts(*(LENGTHS if letter == "p" else (LONG,)), seed=i)
        found.append((batch, ask(server, batch, tokens, letter)))
    servers.stop(name)
    log = server.log.read_text(errors="replace")
    return Served(found, read_states(states), read_rows(rows), log)


@pytest.fixture(scope="module")
def one_row(servers, target, tmp_path_factory) -> Served:
    """No speculation: one row a pass."""
    folder = tmp_path_factory.mktemp("v4-one-row")
    states, rows = folder / "states.jsonl", folder / "rows.jsonl"
    files = {STATES: str(states), ROWS: str(rows)}
    server = start(servers, "one-row", target, folder, *ROOM, **files)
    return serve(server, servers, "v4-one-row", states, rows)


@pytest.fixture(scope="module")
def reported(servers, target, one_row, tmp_path_factory) -> tuple[dict[str, Any], Served]:
    """The product's report, and what the same server served afterwards."""
    folder = tmp_path_factory.mktemp("v4-states")
    states, rows, report = (folder / name for name in ("states", "rows", "product.json"))
    for batch, answers in one_row.texts:
        environment = known(folder, batch, ids(answers))
    environment |= {STATES: str(states), ROWS: str(rows), PRODUCT: str(report)} | RETRACT
    environment |= {WIDTH: RANDOM, NAMED: ",".join(map(str, WIDTHS))}
    drafter = write_drafter(folder / "drafter", block_size=BLOCK)
    arguments = (*ROOM, "--chunked-prefill-size", "256", *hyperdflash_arguments(drafter))
    server = start(servers, "states", target, folder, *arguments, **environment)
    texts = [batch for batch, _ in one_row.texts]
    served = serve(server, servers, "v4-states", states, rows, texts)
    return json.loads(report.read_text()), served


def test_every_width_offset_and_accepted_length_leaves_one_row_decodings_state(reported):
    found = reported[0]["every"]
    wrong = found.pop("wrong")
    note("states: widths 2 to 10, every offset of 4 and 128, every accepted length", **found)
    assert found["cases"] == sum(WIDTHS) * len(PREFIXES)
    assert not any(wrong.values()), wrong
    assert found["wrong_ring_rows"] == found["wrong_keys"] == 0
    assert found["written"] > 10 * found["cases"]
    assert found["ring_rows"] > 100 * found["cases"]
    assert found["keys"] > found["cases"]


def test_the_index_chooses_alike_among_the_rows_of_a_block(reported):
    found = reported[0]["every"]
    assert found["wrong_selections"] == 0
    assert found["selections"] > found["cases"]
    assert found["chosen_of_their_block"] > found["cases"]


def test_a_rejected_rows_state_in_an_accepted_rows_place_is_noticed(reported):
    """Wherever there was a rejected row; in its ring, and in the keys and choices made of it."""
    control = reported[0]["rejected row"]
    assert min(control[f"wrong_{what}"] for what in ("ring_rows", "keys", "selections")) > 0
    found = control["wrong"]
    assert found == {str(width): (width - 1) * len(CONTROL) for width in WIDTHS}
    note("control: a rejected row's state is written", wrong=sum(found.values()))


def test_a_planner_that_keeps_four_rows_is_wrong_from_five_on(reported):
    """As SGLang's did before #34189: answers were wrong at seven verify rows (#34959, #33872)."""
    found = {int(width): wrong for width, wrong in reported[0]["four rows"]["wrong"].items()}
    note("control: the planner keeps four rows", wrong=list(found.values()))
    assert [width for width, wrong in found.items() if wrong] == [*range(5, BLOCK + 1)]


def compared(found: States, expected: States) -> Counter:
    """States that both found, by kind; every one had one value."""
    both = found.keys() & expected.keys()
    several = [key for key in both if len(found[key] | expected[key]) > 1]
    assert not several, f"{len(several)} of {len(both)} states differ, first {several[:5]}"
    return Counter(state for _, state, *_ in both)


def test_one_other_value_of_one_state_is_noticed(reported, one_row: Served):
    served = reported[1].states
    for state in {name for _, name, *_ in served}:
        key = next(key for key in served if key[1] == state and key in one_row.states)
        with pytest.raises(AssertionError, match=r"^1 of \d+ states differ"):
            compared(served | {key: {*served[key], 0}}, one_row.states)


def rounds_by(answers: list[dict], histogram: str, counted: range) -> list[int]:
    """The rounds of all answers by what the histogram counts."""
    found: Counter = Counter()
    for answer in answers:
        found.update(dict(enumerate(answer[histogram])))
    return [found[number] for number in counted]


def test_served_states_are_one_row_decodings(reported, one_row: Served):
    _, served = reported
    assert served.answers == one_row.answers
    states = compared(served.states, one_row.states)
    assert set(states) == {f"{a} {b}" for a in ("latents", "index") for b in ("ring", "key")}
    assert states.total() > 0.5 * len(one_row.states)
    rows = assert_rows_are_bit_equal(served.rows, one_row.rows)
    answers = [answer["meta_info"] for _, batch in served.texts for answer in batch]
    cached = [answer["cached_tokens"] for answer in answers]
    times = served.log.count("Testing retraction. #retracted_reqs: 1")
    assert max(cached) >= PAGE and times >= 3, (cached, times)
    widths = rounds_by(answers, "spec_cap_lens_histogram", WIDTHS)
    rounds = rounds_by(answers, "spec_correct_drafts_histogram", range(BLOCK))
    note("states, served: chunks of 256, page hits, retraction, widths 2 to 10 at random",
         states=states.total(), **states, rows=rows, times=times, cached=cached, widths=widths,
         rounds=rounds)  # fmt: skip
    assert min(widths) > 0 and min(rounds) > 0
