"""What the client makes of a server's answers, refusals and end."""

import json
import time
from threading import Semaphore

import pytest
import requests

from eval.client import Sampling, Unanswered, converse, converse_all
from tests.waiting import until

GREEDY = Sampling(0.0, 4)
# As SGLang says it, as other servers of its interface do, as a proxy does; and nothing.
TOO_LONG = "The input (9 tokens)\nis longer than the model's context length (8 tokens)."
BODIES = (
    {"object": "error", "message": TOO_LONG, "type": "BadRequestError", "code": 400},
    {"error": {"message": TOO_LONG}},
    {"detail": TOO_LONG},
    TOO_LONG,
    "",
)


@pytest.mark.parametrize("body", BODIES, ids=("message", "error", "detail", "text", "none"))
def test_a_refusal_says_which_prompt_and_why_and_ends_the_rest(fake, body):
    content = body if isinstance(body, str) else json.dumps(body)
    server = fake(4, [], refuse=("two", 400, content.encode()))
    with pytest.raises(Unanswered) as refusal:
        converse_all(server.url, [["one"], ["two"], ["three"]], GREEDY, 1)
    line = str(refusal.value)
    assert line.startswith("prompt 2: ") and "400" in line
    assert " ".join(TOO_LONG.split()) in line or not body
    assert len(server.requests) == 2


def test_an_answer_without_its_tokens_is_no_answer(fake):
    with pytest.raises(Unanswered, match="output_ids"):
        converse(fake(4, [], says_ids=False).url, ["one"], GREEDY)
    with pytest.raises(Unanswered):
        converse(fake(4, [], finish="abort").url, ["one"], GREEDY)
    assert converse(fake(0, []).url, ["one"], GREEDY).output_ids == [[]]


def test_answers_come_in_order_with_no_more_in_flight_than_asked(fake):
    server, four, free = fake(3, [1]), Semaphore(4), []

    def before() -> None:
        free.append(four.acquire(blocking=False))
        until(lambda: len(server.requests) >= 4)
        time.sleep(0.1)  # a fifth would be there by now; if it is late, that is no failure
        four.release()

    server.before = before
    turns = [["x" * (i + 1)] for i in range(9)]
    answers, _ = converse_all(server.url, turns, Sampling(0.0, 3), 4)
    assert [a.output_ids[0][0] for a in answers] == list(range(1, 10))
    assert all(free)
    server.die_after = 12
    with pytest.raises(requests.RequestException):
        converse_all(server.url, turns, Sampling(0.0, 3), 2)
    assert len(server.requests) <= 9 + 3 + 2
