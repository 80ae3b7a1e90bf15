"""Sessions: a turn follows the answer before it, not the block in which that answer ended."""

from __future__ import annotations

import pytest
import requests

from tests.engine.conftest import greedy
from tests.waiting import PATIENCE

LATER = " Now the same once more, please."


def open_session(server) -> str:
    reply = requests.post(
        f"{server.url}/open_session", json={"capacity_of_str_len": 4096}, timeout=PATIENCE
    )
    reply.raise_for_status()
    return reply.json()


def two_turns(server, prompt: list[int], later: list[int], sampling: dict) -> list[dict]:
    """Both answers of a session, with the number of tokens that each saw."""
    session, answers = open_session(server), []
    for tokens in (prompt, later):
        said = (
            {"id": session, "rid": answers[-1]["meta_info"]["id"]} if answers else {"id": session}
        )
        answers.append(greedy(server, tokens, sampling=sampling, session_params=said))
    url = f"{server.url}/close_session"
    reply = requests.post(url, json={"session_id": session}, timeout=PATIENCE)
    reply.raise_for_status()
    return [
        {"tokens": one["output_ids"], "context": one["meta_info"]["prompt_tokens"]}
        for one in answers
    ]


@pytest.mark.parametrize("stop", [{}, {"stop": [" is", "e"]}, {"max_new_tokens": 9}])
def test_a_second_turn_is_the_baselines(target_server, hyper_server, tokenizer, own_prompts, stop):
    later = tokenizer.encode(LATER, add_special_tokens=False)
    sampling = {"max_new_tokens": 64, "ignore_eos": False, **stop}
    inside = 0
    for prompt in own_prompts[:6]:
        expected = two_turns(target_server, prompt, later, sampling)
        assert two_turns(hyper_server, prompt, later, sampling) == expected
        first = expected[0]
        inside += len(first["tokens"]) > 1
        assert expected[1]["context"] == first["context"] + len(first["tokens"]) + len(later)
    assert inside  # an answer of several tokens can end inside a block
