"""What the learning demo makes of its traffic and of the server's metrics."""

from __future__ import annotations

import pytest

from eval.client import Answer
from tests.conftest import EXAMPLE

RESULT = {
    "minutes": [{"minute": 1, "tau": None, "tokens_per_second": 10.0}],
    "turned_at_minute": 0.5,
    "baseline_tokens_per_second": 9.0,
    "baseline_next_to_learn": 8.0,
    "published_minutes": {"1": 0.2},
    "poisoned_version": {"minute": 0.8},
}


@pytest.fixture
def learn_demo(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import learn_demo

    return learn_demo


def test_tau_and_tokens_per_second_are_of_whole_minutes(learn_demo):
    def request(at, tokens, drafts, rounds):
        answer = Answer(
            output_ids=[list(range(tokens))], correct_drafts=drafts, verify_rounds=rounds
        )
        return learn_demo.Request(at, ["?"], answer)

    asked = [request(110, 60, 20, 40), request(130, 60, 40, 20), request(190, 120, 90, 30)]
    asked.append(request(225, 5, 0, 5))  # of a minute that is not over
    assert learn_demo.by_minute(asked, 100) == [
        {"minute": 1, "tau": 2.0, "tokens_per_second": 2.0},
        {"minute": 2, "tau": 4.0, "tokens_per_second": 2.0},
    ]


def test_the_versions_are_read_from_the_metrics(learn_demo, monkeypatch):
    class Reply:
        text = (
            "# HELP hyperdflash:verify_rounds_total Verification rounds\n"
            'hyperdflash:verify_rounds_total{model_name="x",version="0"} 12.0\n'
            'hyperdflash:verify_rounds_total{model_name="x",version="3"} 7.0\n'
            'hyperdflash:width_rounds_total{width="3"} 9.0\n'
        )

    monkeypatch.setattr(learn_demo.requests, "get", lambda *_, **__: Reply)
    assert learn_demo.versions("http://x") == {0: 12.0, 3: 7.0}


def test_both_kinds_of_traffic_have_families_of_their_own(learn_demo):
    assert not set(learn_demo.SEEN) & set(learn_demo.UNSEEN)
    assert set(learn_demo.SEEN) | set(learn_demo.UNSEEN) < set(learn_demo.FAMILIES)


def test_the_picture_has_both_curves(learn_demo):
    picture = learn_demo.draw(RESULT)
    assert picture.rstrip().endswith("</svg>") and "axes_2" in picture
