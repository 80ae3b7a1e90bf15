"""Files of prompts made from the exchanges, and the prompts that drafters learn from."""

from __future__ import annotations

import json
import sys
from collections import Counter

import pytest

from tests.conftest import EXAMPLE


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import exchange_prompts

    def call(command: str, per_family: int) -> dict[str, list[dict]]:
        out = tmp_path / command
        arguments = [command, "--out", str(out), "--per-family", str(per_family)]
        monkeypatch.setattr(sys, "argv", ["exchange_prompts.py", *arguments])
        exchange_prompts.main()
        return {
            path.stem: [json.loads(line) for line in path.read_text().splitlines()]
            for path in out.iterdir()
        }

    return call


def test_the_first_prompts_of_a_benchmark_file_hold_all_families_of_its_kind(run):
    from exchanges import KINDS

    files = run("held-out", 2)
    assert set(files) == set(KINDS)
    for kind, families in KINDS.items():
        assert len(files[kind]) == 2 * len(families)
    assert any(len(record["turns"]) > 1 for record in files["chat"])


def test_the_demos_prompts_state_answers_that_a_right_reply_meets(run):
    from exchanges import generate, is_right

    files = run("demo", 1)
    assert len(files["prompts"]) == len(files["turns"]) == 12
    for prompt in files["prompts"]:
        exchange = next(generate(4000, 1, (prompt["kind"],)))
        assert prompt["messages"] == exchange.prompt
        assert is_right(prompt, exchange.reply)
        assert not is_right(prompt, "I do not know.")


@pytest.mark.parametrize("part, count", [("train", 5000), ("held_out", 60)])
def test_drafters_learn_and_are_chosen_by_every_family(monkeypatch, part, count):
    """Found as: every second problem, of families in turn, left half of math's families out."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import corpus
    import own_answers
    from exchanges import KINDS, in_turn

    for kind, families in KINDS.items():
        seed, most = corpus.SEEDS[part], corpus.PER_FAMILY[part]
        family_of = [e.family for e in in_turn(seed, most, families, or_all=True)]
        assert len(family_of) == len(corpus.load()[kind][part])
        met = Counter(
            family_of[i] for [i] in own_answers.spread([[i] for i in range(len(family_of))], count)
        )
        assert set(met) == set(families)
        assert min(met.values()) > 0.4 * sum(met.values()) / len(families)
