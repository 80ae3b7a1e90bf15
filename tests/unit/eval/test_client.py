"""What the client makes of a server that answers otherwise than it should."""

from __future__ import annotations

import json

import pytest

from eval.client import Sampling, Unanswered, converse, converse_all
from tests.unit.eval.fake_server import rows_of, run_command

GREEDY = Sampling(0.0, 4)
# As SGLang says it, as other servers of its interface do, and as a proxy does.
TOO_LONG = "The input (9 tokens)\nis longer than the model's context length (8 tokens)."
BODIES = (
    {"object": "error", "message": TOO_LONG, "type": "BadRequestError", "code": 400},
    {"error": {"message": TOO_LONG}},
    {"detail": TOO_LONG},
    TOO_LONG,
)


@pytest.mark.parametrize("body", BODIES, ids=("message", "error", "detail", "text"))
def test_a_refusal_says_which_prompt_and_why(fake, body):
    """Found as: "400 Client Error: Bad Request for url", and nothing else."""
    content = body if isinstance(body, str) else json.dumps(body)
    server = fake(4, [], refuse=("two", 400, content.encode()))
    with pytest.raises(Unanswered) as refused:
        converse_all(server.url, [["one"], ["two"], ["three"]], GREEDY, 1)
    said = str(refused.value)
    assert said == f"prompt 2: {server.url} refused with 400: {' '.join(TOO_LONG.split())}"
    assert len(server.requests) == 2


def test_a_refusal_without_a_word_is_said_so(fake):
    server = fake(4, [], refuse=("one", 503, b""))
    with pytest.raises(Unanswered, match=r"prompt 1: .* refused with 503: no reason given"):
        converse_all(server.url, [["one"]], GREEDY, 1)


def test_a_refused_prompt_is_in_the_report(data, tmp_path, fake, capsys):
    refuse = ("qqqqq", 400, json.dumps(BODIES[0]).encode())
    out = tmp_path / "out"
    assert run_command(data, out, fake(4, []), fake(4, [1, 1], refuse=refuse)) == 1
    error = rows_of(out)["hyperdflash6"]["error"]
    assert error.startswith("Unanswered: prompt 2: ") and "longer than the model" in error
    assert "prompt 2" in capsys.readouterr().out


def test_an_answer_without_its_tokens_is_no_answer(data, tmp_path, fake):
    """Found as: units of no tokens that counted as good, and a report that divided by zero."""
    silent, out = fake(4, [], says_ids=False), tmp_path / "out"
    with pytest.raises(Unanswered, match=r"without sglext\.output_ids"):
        converse(silent.url, ["one"], GREEDY)
    with pytest.raises(Unanswered, match="aborted"):
        converse(fake(4, [], finish="abort").url, ["one"], GREEDY)
    assert converse(fake(0, []).url, ["one"], GREEDY).output_ids == [[]]
    assert run_command(data, out, silent, fake(4, [1, 1])) == 1
    rows = rows_of(out)
    assert "output_ids" in rows["baseline"]["error"] and "error" not in rows["hyperdflash6"]
    assert rows["hyperdflash6"]["speedup"] is None
