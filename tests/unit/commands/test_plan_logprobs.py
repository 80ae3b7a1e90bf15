"""What drafters can accept at most, by hand."""

import itertools
import json
import math

import numpy as np
import pytest

from sglang_hyperdflash.cli import main
from tests.unit.commands.builders import TOKENS, native, write_rows


def openai(tokens=TOKENS, named: bool = True) -> dict:
    """As OpenAI's chat completions do; pieces of a character have the same text."""
    content = []
    for i, (p, other) in enumerate(tokens):
        one, rest = (
            {"token": "\ufffd", "bytes": [n] if named else None, "logprob": math.log(x)}
            for n, x in ((i, p), (99, other))
        )
        content.append(one | {"top_logprobs": sorted([one, rest], key=lambda t: -t["logprob"])})
    return {"id": "a", "choices": [{"message": {}, "logprobs": {"content": content}}]}


@pytest.fixture
def planned(tmp_path, capsys):
    """What is found of some replies, as JSON; with the costs of rounds where they are given."""

    def run(*replies, costs=None, form=("--json",)):
        answers, options = write_rows(tmp_path / "answers", *replies), []
        if costs is not None:
            options = ["--round-costs", str(write_rows(tmp_path / "costs", *costs))]
        assert main(["plan", "--logprobs", str(answers), *options, *form]) == 0
        said = capsys.readouterr().out
        return json.loads(said) if form else said

    return run


CELLS = dict(zip(itertools.product((1, 64), (1, 2, 4)), (10, 12, 16, 10, 20, 40), strict=True))
COSTS = [
    f'hyperdflash:round_seconds{{requests="{n}",width="{w}",sampled="{sampled}"}} {seconds}'
    for (n, w), taken in CELLS.items()
    for sampled, seconds in (("true", taken), ("false", 9))
]


def test_both_forms_give_the_numbers_of_a_hand(planned):
    for forms in ((native(), native()), (openai(), openai()), (native(), openai())):
        found = planned(*forms, costs=COSTS)
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


def test_the_width_that_pays_is_by_the_servers_own_rounds(planned):
    one, many = planned(native(), native(), costs=COSTS)["pays"].values()
    # Tokens a round: 1, 2, 2; at most 1, 2, 3.33; sampled 1, 2, 4.
    assert one["own"] == pytest.approx([2, 2 / 1.2])
    assert one["argmax"] == pytest.approx([4, 1 / 0.3 / 1.6])
    assert one["sampled"] == pytest.approx([4, 2.5])
    assert {kind: best for kind, (best, _) in many.items()} == dict.fromkeys(one, 1)
    lines = [line.split() for line in planned(native(), native(), costs=COSTS, form=()).split("\n")]
    assert ["1", "2", "(1.67)", "4", "(2.08)", "4", "(2.50)"] in lines


def test_requests_differ_by_their_interval(planned):
    found = planned(native(), native([(0.99, 0.005)] * 9))
    # All draws of the first request, and all of the second.
    assert found["likeliest"] == pytest.approx([(2.8 + 8 * 0.99) / 12, 0.7, 0.99])
    assert found["argmax"]["7"] == pytest.approx([7, 1 / 0.3, 7])


def test_equal_names_and_rounded_probabilities(planned):
    """OpenAI allows tokens without bytes: two pieces of a character look the same."""
    reply = openai(named=False)
    assert planned(reply, reply)["likeliest"][0] == pytest.approx(0.7)
    sure = native([(1.001, 1e-6)] * 3)
    assert planned(sure, sure)["likeliest"] == [1.0, 1.0, 1.0]


def test_text_that_was_not_sampled_is_noticed(planned):
    greedy = native([(0.7, 0.2)] * 400)
    assert not planned(greedy, greedy)["drawn_from_these"]
    assert "nothing above is a bound" in planned(greedy, greedy, form=())
    rng = np.random.default_rng(0)
    drawn = native([(0.7, 0.2) if rng.random() < 0.7 else (0.2, 0.7) for _ in range(400)])
    assert planned(drawn, drawn)["drawn_from_these"]
