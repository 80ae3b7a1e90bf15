"""The generated exchanges of the tiny target: answers, checkers and the held-out half."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import islice
from random import Random

import pytest

from tests.conftest import EXAMPLE

PER_FAMILY = 40
NAMES = (
    "addition",
    "subtraction",
    "multiplication",
    "facts",
    "sequence",
    "word_problem",
    "units",
    "dates",
    "sort",
    "filter",
    "count",
    "ordering",
    "json",
    "reformat",
    "table",
    "form",
    "trace",
    "code",
    "edit",
    "repeat",
    "order",
)


@pytest.fixture
def exchanges(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import exchanges

    return exchanges


def test_the_families_are_the_ones_tested_here(exchanges):
    assert tuple(exchanges.FAMILIES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_gives_the_same_exchanges_always(exchanges, name):
    first = list(exchanges.generate(7, PER_FAMILY, (name,)))
    assert first == list(exchanges.generate(7, PER_FAMILY, (name,)))
    assert first != list(exchanges.generate(8, PER_FAMILY, (name,)))
    assert len({exchange.key for exchange in first}) == PER_FAMILY


def test_a_familys_exchanges_do_not_depend_on_the_other_families(exchanges):
    every = [exchange for exchange in exchanges.generate(3, 5) if exchange.family == "sort"]
    assert every == list(exchanges.generate(3, 5, ("sort",)))


@pytest.mark.parametrize("name", NAMES)
def test_no_problem_is_in_both_halves(exchanges, name):
    rng = Random(0)
    family = exchanges.FAMILIES[name]
    trained = {family.draw(rng, held_out=False).key for _ in range(300)}
    kept = {exchange.key for exchange in exchanges.generate(1000, PER_FAMILY, (name,))}
    assert not trained & kept
    assert not any(exchanges.is_held_out(name, key) for key in trained)
    assert all(exchanges.is_held_out(name, key) for key in kept)


def test_the_training_stream_has_no_held_out_problem_and_refuses_held_out_seeds(exchanges):
    drawn = list(islice(exchanges.stream(5, part=2), 400))
    assert drawn == list(islice(exchanges.stream(5, part=2), 400))
    assert drawn[:20] != list(islice(exchanges.stream(5, part=3), 20))
    assert {exchange.family for exchange in drawn} == set(NAMES)
    assert not any(exchanges.is_held_out(exchange.family, exchange.key) for exchange in drawn)
    with pytest.raises(ValueError, match="seed 1000 is for held-out problems"):
        next(exchanges.stream(1000))


@pytest.mark.parametrize("name", NAMES)
def test_a_checker_accepts_the_right_reply_and_refuses_a_changed_one(exchanges, name):
    family = exchanges.FAMILIES[name]
    for exchange in exchanges.generate(1001, PER_FAMILY, (name,)):
        assert family.is_right(exchange, exchange.reply), exchange
        assert family.is_right(exchange, exchange.reply + "\n"), exchange
        for wrong in changed(exchange.reply):
            assert not family.is_right(exchange, wrong), (exchange, wrong)
        assert not family.is_right(exchange, "")
        assert not family.is_right(exchange, "I do not know.")


def changed(reply: str) -> list[str]:
    """The reply with another number or word at its end, and without its last line."""
    head, newline, last = reply.rpartition("\n")
    said = last.replace("Thank you!", "").replace("Anything else?", "")
    number, word = re.findall(r"\d+", said), re.findall(r"[A-Za-z]+", said)
    old, new = (number[-1], str(int(number[-1]) + 1)) if number else (word[-1], "zebra")
    before, _, after = last.rpartition(old)
    results = [f"{head}{newline}{before}{new}{after}"]
    return [*results, head] if newline else results


@pytest.mark.parametrize("name", NAMES)
def test_a_family_has_several_phrasings(exchanges, name):
    shapes = {
        re.sub(
            r"\d+|[A-Z]?[a-z]+", lambda word: word.group() if len(word.group()) > 5 else "_", text
        )
        for exchange in exchanges.generate(2, PER_FAMILY, (name,))
        for text in [exchange.prompt[-1]["content"]]
    }
    assert len(shapes) >= 6


@pytest.mark.parametrize("name", ["multiplication", "units", "dates", "word_problem", "code"])
def test_a_problem_in_other_words_has_the_same_key(exchanges, name):
    """Families with few problems draw one again in other words: the key must not see them."""
    rng, prompts = Random(1), {}
    for _ in range(2000):
        exchange = exchanges.FAMILIES[name].draw(rng, held_out=True)
        prompts.setdefault(exchange.key, set()).add(exchange.prompt[0]["content"])
    assert max(len(found) for found in prompts.values()) > 1


def test_replies_are_short_and_end_as_the_family_says(exchanges):
    for exchange in exchanges.generate(1002, PER_FAMILY):
        assert len(exchange.reply) < 200
        assert exchange.messages[-1]["role"] == "assistant"
        assert [message["role"] for message in exchange.messages[:2]] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("name", "reply", "right"),
    [
        ("units", "Sure.\nAnswer: {answer}.", True),
        ("units", "{answer}", False),  # no final answer is marked
        ("table", "Answer: nobody\nAnswer: {answer}", True),
        ("json", 'Answer: "{answer}"', True),
        ("sort", "Answer: {answer}, 100", False),
    ],
)
def test_checkers_read_the_final_answer_of_free_text(exchanges, name, reply, right):
    for exchange in exchanges.generate(1003, 8, (name,)):
        text = reply.format(answer=exchange.answer)
        assert exchanges.FAMILIES[name].is_right(exchange, text) is right


def test_json_may_be_laid_out_otherwise_but_not_hold_other_values(exchanges):
    drawn = exchanges.generate(1004, PER_FAMILY, ("reformat",))
    chosen = [exchange for exchange in drawn if exchange.answer.startswith("[")]
    assert len(chosen) > 5
    check = exchanges.FAMILIES["reformat"].is_right
    for exchange in chosen:
        records = json.loads(exchange.reply)
        assert check(exchange, json.dumps(records, indent=2))
        records[0]["name"] = "Nobody"
        assert not check(exchange, json.dumps(records))


def test_functions_run_as_their_words_say_and_may_be_completed_or_rewritten(exchanges):
    family = exchanges.FAMILIES["code"]
    for exchange in exchanges.generate(1005, PER_FAMILY, ("code",)):
        body = exchange.reply
        whole = body if body.startswith("def ") else f"{exchange.header}\n{body}"
        assert family.is_right(exchange, whole)
        assert family.is_right(exchange, f"```python\n{whole}\n```")
        assert not family.is_right(exchange, whole.replace("return", "return not", 1))
        space: dict = {}
        exec(compile(whole, "reply", "exec"), space)
        assert callable(next(value for key, value in space.items() if key != "__builtins__"))


def test_traced_programs_print_the_answer(exchanges, capsys):
    for exchange in exchanges.generate(1006, PER_FAMILY, ("trace",)):
        exec(compile(exchange.key, "program", "exec"), {})
        assert capsys.readouterr().out.strip() == exchange.answer


def test_every_equation_of_a_worked_reply_holds(exchanges):
    equation = re.compile(r"(?<![\w.-])(\d+(?:[-+*/]\d+)+)\s*=\s*(\d+)")
    found = 0
    for exchange in exchanges.generate(1007, PER_FAMILY):
        for left, right in equation.findall(exchange.reply):
            found += 1
            assert eval(left) == int(right), exchange
    assert found > 500


def test_too_many_problems_are_refused(exchanges):
    with pytest.raises(ValueError, match="family 'multiplication' has only about"):
        list(exchanges.generate(1000, 5000, ("multiplication",)))
    with pytest.raises(ValueError, match="no family 'poetry'"):
        list(exchanges.generate(1000, 1, ("poetry",)))


def test_an_orders_reply_may_list_its_items_in_another_order(exchanges):
    family = exchanges.FAMILIES["order"]
    exchange = next(
        exchange
        for exchange in exchanges.generate(1008, PER_FAMILY, ("order",))
        if exchange.answer.count(", ") == 1
    )
    swapped = ", ".join(reversed(exchange.answer.split(", ")))
    assert family.is_right(exchange, f"You have {swapped}. Anything else?")
    assert not family.is_right(replace(exchange, answer="1 tea"), exchange.reply)


def test_a_prompt_of_a_file_is_judged_by_its_familys_checker(exchanges):
    for exchange in exchanges.generate(1009, 3):
        prompt = {"kind": exchange.family, "answer": exchange.answer, "header": exchange.header}
        assert exchanges.is_right(prompt, exchange.reply)
        assert not exchanges.is_right(prompt, "I do not know.")
    with pytest.raises(ValueError, match="no family 'poetry'"):
        exchanges.is_right({"kind": "poetry", "answer": "1"}, "1")
