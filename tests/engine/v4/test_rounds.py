"""SGLang's own DeepSeek-V4 with HYPERDFLASH: the target's tokens and rows, whatever is accepted."""

from __future__ import annotations

import json

from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from tests.engine.conftest import ids
from tests.engine.drafters import assert_varied
from tests.engine.test_context_end import RECORD
from tests.engine.v4 import drafts
from tests.engine.v4.conftest import NEW_TOKENS, Reference
from tests.engine.v4.findings import note
from tests.engine.v4.serve import accepted, ask, known, own_blocks, start
from tests.engine.v4.trace import ROWS, Rows, read_rows

BOTH = f"""{RECORD}

record = load
from tests.engine.v4.plugin import load as replace


def load():
    record()
    replace()
"""


def assert_rows_are_bit_equal(found: Rows, reference: Rows) -> int:
    """Every row of attention that both have; returns how many."""
    both = found.keys() & reference.keys()
    different = sorted(key for key in both if found[key] != reference[key])
    assert not different, f"{len(different)} of {len(both)} rows differ, first {different[:3]}"
    return len(both)


def test_every_length_of_acceptance_gives_the_targets_tokens_and_rows(
    servers, target, drafter, reference: Reference, tmp_path
):
    rows, blocks = tmp_path / "rows.jsonl", tmp_path / "blocks.jsonl"
    environment = known(tmp_path, reference.prompts, reference.answers)
    environment |= {ROWS: str(rows), drafts.OWN_DRAFTS: str(blocks)}
    server = start(
        servers, "oracle", target, tmp_path, *hyperdflash_arguments(drafter), **environment
    )
    answers = ask(server, reference.prompts, NEW_TOKENS)
    servers.stop("v4-oracle")
    assert len(set(map(tuple, reference.answers))) == len(reference.prompts)
    assert ids(answers) == reference.answers
    assert min(accepted(answers)) > 0, accepted(answers)
    compared = assert_rows_are_bit_equal(read_rows(rows), reference.rows)
    assert compared >= 0.9 * len(reference.rows)
    assert_varied([block for _, block in own_blocks(blocks).values()])
    note("every length of acceptance", answers="6 of 6", rows=compared, rounds=accepted(answers))


def test_no_row_passes_the_end_of_a_context(
    servers, target, drafter, reference: Reference, tmp_path
):
    """SGLang's class reads rotary tables by position: on a GPU past their end, without an error."""
    context, positions = 300, tmp_path / "positions.json"
    fitting, expected = [], []
    for prompt, answer in zip(reference.prompts, reference.answers, strict=True):
        # SGLang ends an answer two tokens before its context's end.
        room = context - 2 - len(prompt)
        if 4 <= room <= len(answer):
            fitting.append(prompt)
            expected.append(answer[:room])
    environment = known(tmp_path, reference.prompts, reference.answers)
    environment["TEST_POSITIONS"] = str(positions)
    arguments = ("--context-length", str(context), *hyperdflash_arguments(drafter))
    server = start(servers, "end", target, tmp_path, *arguments, source=BOTH, **environment)
    found = [ask(server, [prompt], context - len(prompt))[0] for prompt in fitting]
    servers.stop("v4-end")
    assert ids(found) == expected and len(found) == 2
    for name, (position, end) in json.loads(positions.read_text()).items():
        assert context - 4 <= position < context and end <= context, (name, position, end)
