"""What drafters can accept at most: by hand, by enumeration, and of lines that are no answers."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands.plan_logprobs import Answer, own_rounds

# Of each token: its probability, and those of the other listed tokens. The first is not drafted.
TOKENS = [(0.9, 0.05), (0.5, 0.3), (0.2, 0.6), (0.8, 0.1), (0.9, 0.05)]


def native(tokens=TOKENS) -> dict:
    """As SGLang's ``/generate`` returns them."""
    chosen = [[math.log(p), i, None] for i, (p, _) in enumerate(tokens)]
    listed = [
        sorted([one, [math.log(other), 99, None]], reverse=True)
        for one, (_, other) in zip(chosen, tokens, strict=True)
    ]
    meta = {"output_token_logprobs": chosen, "output_top_logprobs": listed}
    return {"text": "", "meta_info": meta}


def openai(tokens=TOKENS) -> dict:
    """As OpenAI's chat completions do; pieces of a character have the same text."""
    content = []
    for i, (p, other) in enumerate(tokens):
        one = {"token": "\ufffd", "bytes": [i], "logprob": math.log(p)}
        rest = {"token": "\ufffd", "bytes": [99], "logprob": math.log(other)}
        content.append(one | {"top_logprobs": sorted([one, rest], key=lambda t: -t["logprob"])})
    return {"id": "a", "choices": [{"message": {}, "logprobs": {"content": content}}]}


def written(folder: Path, *replies: object) -> str:
    path = folder / "answers.jsonl"
    path.write_text("".join(json.dumps(reply) + "\n" for reply in replies))
    return str(path)


def planned(capsys, *options: str) -> str:
    assert main(["plan", "--logprobs", *options]) == 0
    return capsys.readouterr().out


METRICS = """# HELP hyperdflash:round_seconds Round duration in seconds, timed at the start.
# TYPE hyperdflash:round_seconds gauge
"""


def metrics(folder: Path, cells: dict[tuple[int, int], float]) -> str:
    path = folder / "metrics.txt"
    lines = (
        f'hyperdflash:round_seconds{{model_name="m",requests="{n}",width="{w}",sampled="{said}"}} '
        f"{seconds if said == 'true' else 9}\n"
        for (n, w), seconds in cells.items()
        for said in ("true", "false")
    )
    path.write_text(METRICS + "".join(lines))
    return str(path)


CELLS = dict(zip(itertools.product((1, 64), (1, 2, 4)), (10, 12, 16, 10, 20, 40), strict=True))


def test_both_forms_give_the_numbers_of_a_hand(tmp_path, capsys):
    costs = "--round-costs", metrics(tmp_path, CELLS)
    for forms in ((native(), native()), (openai(), openai()), (native(), openai())):
        found = json.loads(planned(capsys, written(tmp_path, *forms), *costs, "--json"))
        # Equal requests: the interval is a point.
        flat = {name: found[name][0] for name in ("likeliest", "drawn")}
        assert flat == pytest.approx({"likeliest": 0.7, "drawn": 0.75})
        # At most 1 / (1 - 0.7), and the width.
        most = {width: value for width, (value, _, _) in found["argmax"].items()}
        assert most == pytest.approx({"1": 1.0, "2": 2.0, "4": 1 / 0.3})
        # The likeliest token is drawn, missed, drawn, drawn: two rounds of two rows or four.
        own = {width: value for width, (value, _, _) in found["own"].items()}
        assert own == {"1": 1.0, "2": 2.0, "4": 2.0}
        assert (found["requests"], found["tokens"]) == (2, 8)


def test_the_width_that_pays_is_by_the_servers_own_rounds(tmp_path, capsys):
    options = (written(tmp_path, native(), native()), "--round-costs", metrics(tmp_path, CELLS))
    one, many = json.loads(planned(capsys, *options, "--json"))["pays"].values()
    # Tokens a round: 1, 2, 2; at most 1, 2, 3.33; sampled 1, 2, 4.
    assert one["own"] == pytest.approx([2, 2 / 1.2])
    assert one["argmax"] == pytest.approx([4, 1 / 0.3 / 1.6])
    assert one["sampled"] == pytest.approx([4, 2.5])
    assert {kind: best for kind, (best, _) in many.items()} == dict.fromkeys(one, 1)
    said = planned(capsys, *options)
    assert "    4  2.00 (2.00 to 2.00)     3.33 (3.33 to 3.33)     4\n" in said
    assert "       1  2 (1.67)                4 (2.08)                4 (2.50)\n" in said


def test_requests_differ_by_their_interval(tmp_path, capsys):
    sure = [(0.99, 0.005)] * 9
    found = json.loads(planned(capsys, written(tmp_path, native(), native(sure)), "--json"))
    # All draws of the first request, and all of the second.
    assert found["likeliest"] == pytest.approx([(2.8 + 8 * 0.99) / 12, 0.7, 0.99])
    assert found["argmax"]["7"] == pytest.approx([7, 1 / 0.3, 7])


DEPTH = 5


def random_model(seed: int) -> dict[tuple[int, ...], list[float]]:
    """Distributions over two tokens after every prefix: some nearly sure."""
    rng = np.random.default_rng(seed)
    prefixes = (p for n in range(DEPTH) for p in itertools.product((0, 1), repeat=n))
    return {prefix: rng.dirichlet([0.3, 0.3]).tolist() for prefix in prefixes}


def fewest_rounds(model, width: int, prefix: tuple[int, ...] = (), left: int = 0) -> float:
    """Expected rounds from here on of the best fixed drafts that there are; ``left`` of a block."""
    if len(prefix) == DEPTH:
        return 0.0

    def after(token: int, still: int) -> float:
        new = len(prefix) + 1 < DEPTH and still < 0
        return new + fewest_rounds(model, width, (*prefix, token), width - 1 if new else still)

    p = model[prefix]
    if not left:  # the target's own token
        return sum(p[token] * after(token, -1) for token in (0, 1))
    return min(sum(p[t] * after(t, left - 1 if t == x else -1) for t in (0, 1)) for x in (0, 1))


def rejections(model) -> float:
    """Expected tokens, the last one aside, that are not the likeliest."""
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for prefix in model:
        for token, p in enumerate(model[prefix]):
            chances[(*prefix, token)] = chances[prefix] * p
    return sum(chances[p] * (1 - max(model[p])) for p in model if len(p) < DEPTH - 1)


@pytest.mark.parametrize("width", [2, 3, 4, DEPTH + 1])
def test_no_drafter_needs_fewer_rounds_than_the_bound(width):
    """A rejection before the last token begins a round, and nothing else does in a long block."""
    for seed in range(60):
        model = random_model(seed)
        begun, least = fewest_rounds(model, width, left=width - 1), rejections(model)
        assert begun >= least - 1e-9
        assert width <= DEPTH or begun == pytest.approx(least)


def test_a_product_of_means_is_no_bound():
    """Every other token is sure: a round of two rows starts before it, every time."""
    top = np.array([1.0, 0.0] * 50)
    tokens, rounds = len(top), own_rounds(Answer(top, top), 2)
    assert tokens / rounds == 2 > 1 + top.mean()


def test_equal_names_do_not_hide_the_likeliest(tmp_path, capsys):
    """OpenAI allows tokens without bytes: two pieces of a character look the same."""
    reply = openai()
    for one in reply["choices"][0]["logprobs"]["content"]:
        one["top_logprobs"] = [each | {"bytes": None} for each in one["top_logprobs"]]
    found = json.loads(planned(capsys, written(tmp_path, reply, reply), "--json"))
    assert found["likeliest"][0] == pytest.approx(0.7)


def test_a_probability_just_above_one_is_one(tmp_path, capsys):
    """Rounding gives such log-probabilities."""
    sure = native([(1.001, 1e-6)] * 3)
    found = json.loads(planned(capsys, written(tmp_path, sure, sure), "--json"))
    assert found["likeliest"] == [1.0, 1.0, 1.0]


def test_text_that_was_not_sampled_is_noticed(tmp_path, capsys):
    greedy = [(0.7, 0.2)] * 400
    said = planned(capsys, written(tmp_path, native(greedy), native(greedy)))
    assert "drawn 1.00" in said and "nothing above is a bound" in said
    rng = np.random.default_rng(0)
    drawn = [(0.7, 0.2) if rng.random() < 0.7 else (0.2, 0.7) for _ in range(400)]
    said = planned(capsys, written(tmp_path, native(drawn), native(drawn)))
    assert "nothing above is a bound" not in said


WRONG = native()
WRONG["meta_info"]["output_top_logprobs"][2] = None
STREAMED, HUGE = native(), native()
STREAMED["meta_info"]["finish_reason"] = None
HUGE["meta_info"]["output_token_logprobs"][2][0] = -(10**400)
HUGE["meta_info"]["output_top_logprobs"][2] = [[-(10**400), 2, None]]


@pytest.mark.parametrize(
    "replies, message",
    [
        ([native(), {"text": "a", "meta_info": {"id": "b"}}], ":2: expected an answer of SGLang's"),
        ([{"choices": [{"logprobs": None}]}], "found one with choices (TypeError"),
        ([{"prompt": "a"}], "or an OpenAI chat completion with logprobs"),
        ([native([(0.9, 0.1), (2.0, 0.1)])], "a log-probability of 0.69"),
        ([WRONG], "found one with text, meta_info"),
        ([STREAMED], "a part of a stream"),
        ([HUGE], "OverflowError"),
        ([7, native()], ":1: expected a JSON object"),
        ([native()] * 2 + [7], ":3: expected a JSON object"),
        ([native()], "expected at least two requests"),
        ([native(TOKENS[:1])] * 2, "answers of two tokens or more, found 0"),
    ],
)
def test_lines_that_are_no_answers_are_one_line(tmp_path, capsys, replies, message):
    assert main(["plan", "--logprobs", written(tmp_path, *replies)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "cells, message",
    [
        ({}, "found widths none of 0 batch sizes"),
        ({(1, 1): 0.01, (1, 4): 0.02, (64, 1): 0.02}, "found widths 1, 4 of 2 batch sizes"),
        ({(1, 2): 0.01, (1, 4): 0.02}, "for width 1 and wider ones"),
        ({(1, 1): 0.01, (1, 4): 0.0}, "above 0"),
    ],
)
def test_costs_that_lack_a_width_are_one_line(tmp_path, capsys, cells, message):
    options = ["--round-costs", metrics(tmp_path, cells)]
    assert main(["plan", "--logprobs", written(tmp_path, native(), native()), *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_text_that_is_no_metrics_is_one_line(tmp_path, capsys):
    (tmp_path / "metrics.txt").write_text('hyperdflash:round_seconds{requests="1"} fast\n')
    options = ["--round-costs", str(tmp_path / "metrics.txt")]
    assert main(["plan", "--logprobs", written(tmp_path, native(), native()), *options]) == 2
    error = capsys.readouterr().err
    assert "expected what a server's /metrics returned" in error and error.count("\n") == 1
    assert main(["plan", *options]) == 2
    assert "Give both" in capsys.readouterr().err
