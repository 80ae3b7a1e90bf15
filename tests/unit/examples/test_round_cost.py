"""The cost of a round: parts that add up to it."""

from __future__ import annotations

import argparse
import json

import pytest

from sglang_hyperdflash.serving.round_times import FLUSH_EVERY, summarise
from tests.conftest import EXAMPLE

# start, end, target, requests, width, draft K/V, decoding, the drafter's pass, choosing
ROUND = [0.0, 0.010, 0.004, 2, 7, 0.001, True, 0.002, 0.0005]


@pytest.fixture
def round_cost(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import round_cost

    return round_cost


def test_parts_add_up_to_the_round_and_the_time_to_the_next(round_cost, tmp_path):
    file = tmp_path / "rounds.jsonl"
    rounds = [[0.012 * i, 0.012 * i + 0.010, *ROUND[2:]] for i in range(FLUSH_EVERY)]
    file.write_text("".join(json.dumps(one) + "\n" for one in rounds))
    parts = round_cost.parts_of(summarise(file, 2))
    assert set(parts) == set(round_cost.PARTS)
    assert parts["rest"] == pytest.approx(10 - 4 - 1 - 2 - 0.5)
    assert sum(parts.values()) == pytest.approx(12)


def test_a_table_gives_medians_and_the_sum(round_cost):
    turns = [dict.fromkeys(round_cost.PARTS, ms) for ms in (1.0, 2.0, 9.0)]
    found = round_cost.table({"temperature": "0", "requests": 1, "turns": {"HyperDFlash": turns}})
    assert "| target's pass | 2.00 (1.00 to 9.00) |" in found
    assert "| all | 12.00 (6.00 to 54.00) |" in found


def test_what_was_measured_is_written_so_far(round_cost, tmp_path):
    args = argparse.Namespace(out=tmp_path / "new" / "folder", repeats=1)
    turns = {"HyperDFlash": [dict.fromkeys(round_cost.PARTS, 1.0)]}
    loads = [{"temperature": t, "requests": 8, "turns": turns} for t in ("0", "1")]
    round_cost.write(args, loads)
    assert json.loads((args.out / "results.json").read_text())["loads"] == loads
    assert (args.out / "report.md").read_text().count("8 requests:") == 2
