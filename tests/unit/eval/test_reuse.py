"""The study of prefix reuse: what it makes of the client's numbers, and its servers' memory."""

from __future__ import annotations

import pytest

from eval import reuse
from eval.errors import EvalError


def test_a_rate_is_of_all_tokens_and_first_turns_are_apart():
    lines = {"cached_tokens": [0, 30, 40, 50, 10, 30, 40, 50], "input_lens": [40, 50, 60, 50] * 2}
    lines |= {"ttfts": [0.3, 0.01, 0.02, 0.03, 0.1, 0.04, 0.05, 0.06], "errors": [""] * 8}
    found = reuse.numbers_of(lines)
    assert found == pytest.approx(
        {"hit_rate": 250 / 400, "first_turn_ms": 200, "later_turns_ms": 35}
    )
    with pytest.raises(EvalError, match="1 turns failed, the first with: too long"):
        reuse.numbers_of(lines | {"errors": [""] * 7 + ["too long"]})
    rows = [reuse.row_of(1, "baseline", [found, found | {"hit_rate": 0.5}, found])]
    assert "| 1 | baseline | 62.5% (50.0% to 62.5%) | 200.0 (200.0 to 200.0)" in reuse.table(rows)


def test_as_many_bytes_are_as_many_bytes():
    by_name = {method.name: method.arguments for method in reuse.methods()}
    slots = int(by_name[reuse.SAME_BYTES][-1])
    target, draft = reuse.slot_bytes(reuse.TARGET), reuse.slot_bytes(reuse.DRAFTER)
    assert slots * (target + draft) <= reuse.SLOTS * target < (slots + 1) * (target + draft)
    assert by_name["baseline"] == by_name["baseline-again"] == ()
