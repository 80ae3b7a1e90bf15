"""The exchanges of the tiny target: answers, checkers, the held-out half, prompt files."""

import json
import re
from random import Random

import pytest


def changed(reply: str) -> list[str]:
    """The reply with another number or word at its end, and without its last line."""
    head, newline, last = reply.rpartition("\n")
    said = last.replace("Thank you!", "").replace("Anything else?", "")
    number, word = re.findall(r"\d+", said), re.findall(r"[A-Za-z]+", said)
    old, new = (number[-1], str(int(number[-1]) + 1)) if number else (word[-1], "zebra")
    before, _, after = last.rpartition(old)
    results = [f"{head}{newline}{before}{new}{after}"]
    return [*results, head] if newline else results


def test_a_checker_accepts_the_right_reply_and_refuses_a_changed_one(script):
    exchanges = script("exchanges")
    for exchange in exchanges.generate(1001, 20):
        family = exchanges.FAMILIES[exchange.family]
        asked = {"kind": exchange.family, "answer": exchange.answer, "header": exchange.header}
        for right in (exchange.reply, exchange.reply + "\n"):
            assert family.is_right(exchange, right), exchange
            assert exchanges.is_right(asked, right), exchange
        for wrong in (*changed(exchange.reply), "", "I do not know."):
            assert not family.is_right(exchange, wrong), (exchange, wrong)
            assert not exchanges.is_right(asked, wrong), (exchange, wrong)
    for reply, right in (("Answer: no\nAnswer: {answer}", True), ("{answer}", False)):
        for exchange in exchanges.generate(1003, 8, ("table",)):
            text = reply.format(answer=exchange.answer)
            assert exchanges.FAMILIES["table"].is_right(exchange, text) is right


def test_programs_do_what_the_answers_say(script, capsys):
    exchanges = script("exchanges")
    for exchange in exchanges.generate(1006, 20, ("trace",)):
        exec(compile(exchange.key, "program", "exec"), {})
        assert capsys.readouterr().out.strip() == exchange.answer
    for exchange in exchanges.generate(1005, 20, ("code",)):
        body = exchange.reply
        whole = body if body.startswith("def ") else f"{exchange.header}\n{body}"
        check = exchanges.FAMILIES["code"].is_right
        assert check(exchange, f"```python\n{whole}\n```")
        assert not check(exchange, whole.replace("return", "return not", 1))


def test_a_seed_gives_the_same_exchanges_and_no_problem_is_in_both_halves(script):
    exchanges = script("exchanges")
    for name, family in exchanges.FAMILIES.items():
        first = list(exchanges.generate(7, 40, (name,)))
        assert first == list(exchanges.generate(7, 40, (name,))), name
        assert first != list(exchanges.generate(8, 40, (name,))), name
        assert len({exchange.key for exchange in first}) == 40, name
        rng = Random(0)
        trained = {family.draw(rng, held_out=False).key for _ in range(300)}
        kept = {exchange.key for exchange in exchanges.generate(1000, 40, (name,))}
        assert not trained & kept, name
        assert not any(exchanges.base.is_held_out(name, key) for key in trained), name
    for count, name in ((5000, "multiplication"), (1, "poetry")):
        with pytest.raises(ValueError):
            list(exchanges.generate(1000, count, (name,)))


def test_prompt_files_hold_all_families_and_right_answers(call, script, tmp_path):
    exchanges = script("exchanges")
    call("exchange_prompts", "held-out", "--out", tmp_path, "--per-family", 2)
    call("exchange_prompts", "demo", "--out", tmp_path)
    lines = {path.stem: path.read_text().splitlines() for path in tmp_path.iterdir()}
    files = {name: list(map(json.loads, each)) for name, each in lines.items()}
    assert set(files) == {*exchanges.KINDS, "prompts", "turns"}
    for kind, families in exchanges.KINDS.items():
        assert len(files[kind]) == 2 * len(families)
    assert any(len(record["turns"]) > 1 for record in files["chat"])
    assert len(files["prompts"]) == len(files["turns"]) == 12
    for prompt in files["prompts"]:
        exchange = next(exchanges.generate(4000, 1, (prompt["kind"],)))
        assert prompt["messages"] == exchange.prompt and exchanges.is_right(prompt, exchange.reply)
