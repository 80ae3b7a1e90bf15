"""What users of a server rely on, with HYPERDFLASH on: formats, stops, streams, limits."""

from __future__ import annotations

import json
import time
from functools import partial

import openai
import pytest
import requests

from tests.engine.conftest import HOT, greedy, greedy_all

SCHEMA = {
    "type": "object",
    "properties": {
        "size": {"enum": ["small", "medium", "large"]},
        "hot": {"type": "boolean"},
        "extras": {"type": "array", "items": {"enum": ["milk", "sugar"]}, "maxItems": 2},
    },
    "required": ["size", "hot", "extras"],
    "additionalProperties": False,
}
CONTEXT = 2048


def is_idle(server) -> bool:
    """No request is running or waiting."""
    loads = requests.get(f"{server.url}/v1/loads", timeout=30).json()["loads"]
    return all(load["num_running_reqs"] + load["num_waiting_reqs"] == 0 for load in loads)


def wait_until_idle(server, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_idle(server):
        assert time.monotonic() < deadline, "a request is stuck"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def clients(target_server, hyper_server):
    return [
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        for server in (target_server, hyper_server)
    ]


@pytest.mark.parametrize("temperature", [0, 1])
def test_json_schema(target_server, hyper_server, own_prompts, temperature):
    sampling = {
        "temperature": temperature,
        "max_new_tokens": 200,
        "json_schema": json.dumps(SCHEMA),
    }
    payload = {"input_ids": own_prompts[8:], "sampling_params": sampling}
    answers = hyper_server.generate(**payload)
    for answer in answers:
        value = json.loads(answer["text"])
        assert value["size"] in SCHEMA["properties"]["size"]["enum"]
        assert isinstance(value["hot"], bool)
        assert set(value["extras"]) <= {"milk", "sugar"}
    if temperature == 0:
        plain = target_server.generate(**payload)
        assert [a["text"] for a in answers] == [a["text"] for a in plain]


def test_logprobs_equal_target_only(target_server, hyper_server, own_prompts):
    options = {"return_logprob": True, "top_logprobs_num": 5, "logprob_start_len": 0}
    ask = partial(greedy, max_new_tokens=48, **options)
    both = [greedy_all(s, own_prompts[::3], 2, ask) for s in (target_server, hyper_server)]
    for plain, drafted in ([a["meta_info"] for a in pair] for pair in zip(*both, strict=True)):
        for kind in ("output", "input"):
            a, b = plain[f"{kind}_token_logprobs"], drafted[f"{kind}_token_logprobs"]
            assert [x[1] for x in a] == [x[1] for x in b]
            for x, y in zip(a, b, strict=True):
                assert (x[0] is None and y[0] is None) or abs(x[0] - y[0]) < 1e-3
        tops = zip(plain["output_top_logprobs"], drafted["output_top_logprobs"], strict=True)
        for a, b in tops:
            assert [x[1] for x in a] == [x[1] for x in b]
            assert max(abs(x[0] - y[0]) for x, y in zip(a, b, strict=True)) < 1e-3


def test_stop_strings_and_tokens(target_server, hyper_server, own_prompts):
    """Also several that fall into one block: the earliest completion ends the answer."""
    for sampling in (
        {"stop": ["."]},
        {"stop": ["\n", "is", "the"]},
        {"stop_token_ids": [16, 18]},
        {"stop": ["zebra", " of", "e", "a"], "stop_token_ids": [16, 18], "ignore_eos": False},
        {"stop": ["the"], "stop_regex": ["[0-9]+", "s t"]},
    ):
        assert_they_end_alike((target_server, hyper_server), own_prompts[::2], sampling)


def test_eos_ends_the_answer(target_server, hyper_server, own_prompts):
    assert_they_end_alike((target_server, hyper_server), own_prompts, {"ignore_eos": False})


def assert_they_end_alike(servers, prompts: list[list[int]], sampling: dict) -> None:
    """Both servers' answers, and why each ended: for all prompts, several at a time."""
    both = [greedy_all(s, prompts, 4, partial(greedy, sampling=sampling)) for s in servers]
    for plain, drafted in zip(*both, strict=True):
        assert drafted["text"] == plain["text"]
        assert drafted["output_ids"] == plain["output_ids"]
        assert drafted["meta_info"]["finish_reason"] == plain["meta_info"]["finish_reason"]


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6, 7, 8, 9, 13])
def test_length_limits_inside_a_block(hyper_server, own_prompts, own_reference, limit):
    answers = greedy_all(hyper_server, own_prompts[:6], 3, partial(greedy, max_new_tokens=limit))
    for answer, reference in zip(answers, own_reference, strict=False):
        assert answer["output_ids"] == reference[:limit]
        assert answer["meta_info"]["completion_tokens"] == limit
        assert answer["meta_info"]["finish_reason"]["type"] == "length"


def test_several_answers_to_one_prompt(hyper_server, own_prompts, own_reference):
    sampling = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True, "n": 3}
    answers = hyper_server.generate(input_ids=own_prompts[0], sampling_params=sampling)
    assert [a["output_ids"] for a in answers] == [own_reference[0][:40]] * 3
    sampling |= {"temperature": HOT, "n": 4}
    answers = hyper_server.generate(input_ids=own_prompts[0], sampling_params=sampling)
    assert len({tuple(a["output_ids"]) for a in answers}) > 1


def test_openai_streams_equal_the_whole_answer(clients):
    messages = [{"role": "user", "content": "Can I get a small coffee with milk?"}]
    options = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 60}
    whole = [c.chat.completions.create(**options).choices[0].message.content for c in clients]
    streamed, chunks = "", 0
    for chunk in clients[1].chat.completions.create(stream=True, **options):
        for choice in chunk.choices:
            streamed += choice.delta.content or ""
            chunks += 1
    assert chunks > 2
    assert streamed == whole[0] == whole[1]


def test_abort_in_the_middle(hyper_server, own_prompts, own_reference):
    sampling = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
    for prompt in own_prompts[:4]:
        payload = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        url = f"{hyper_server.url}/generate"
        with requests.post(url, json=payload, stream=True, timeout=60) as answer:
            lines = answer.iter_lines()
            for _ in range(4):
                next(lines)
    wait_until_idle(hyper_server)
    assert greedy(hyper_server, own_prompts[0])["output_ids"] == own_reference[0]


def test_prompts_at_the_context_limit(target_server, hyper_server, own_prompts, own_reference):
    base = [token for prompt in own_prompts for token in prompt] * 20
    for length in (CONTEXT - 9, CONTEXT - 7, CONTEXT - 2, CONTEXT - 1):
        prompt = base[:length]
        payload = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True},
        }
        plain = requests.post(f"{target_server.url}/generate", json=payload, timeout=120)
        drafted = requests.post(f"{hyper_server.url}/generate", json=payload, timeout=120)
        assert drafted.status_code == plain.status_code
        if plain.status_code == 200:
            assert drafted.json()["output_ids"] == plain.json()["output_ids"]
    too_long = {"input_ids": base[: CONTEXT + 1], "sampling_params": {"max_new_tokens": 4}}
    answer = requests.post(f"{hyper_server.url}/generate", json=too_long, timeout=60)
    assert answer.status_code == 400
    assert greedy(hyper_server, own_prompts[0])["output_ids"] == own_reference[0]


@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", -1),
        ("top_p", 1.5),
        ("min_p", 2),
        ("frequency_penalty", 2.5),
        ("repetition_penalty", 0),
    ],
)
def test_bad_requests_get_400_and_the_server_goes_on(
    hyper_server, own_prompts, own_reference, name, value
):
    payload = {
        "input_ids": own_prompts[0],
        "sampling_params": {"temperature": 0, "max_new_tokens": 8, name: value},
    }
    answer = requests.post(f"{hyper_server.url}/generate", json=payload, timeout=60)
    assert answer.status_code == 400, answer.text
    assert name in answer.text
    assert greedy(hyper_server, own_prompts[0], 16)["output_ids"] == own_reference[0][:16]


def test_broken_json_gets_an_error_and_the_server_goes_on(hyper_server, own_prompts, own_reference):
    headers = {"Content-Type": "application/json"}
    answer = requests.post(
        f"{hyper_server.url}/generate", data='{"text": "a", ', headers=headers, timeout=60
    )
    assert answer.status_code in (400, 422)
    schema = {"temperature": 0, "json_schema": "{not json"}
    payload = {"input_ids": own_prompts[0], "sampling_params": schema}
    answer = requests.post(f"{hyper_server.url}/generate", json=payload, timeout=60)
    assert answer.status_code == 400
    assert greedy(hyper_server, own_prompts[0], 16)["output_ids"] == own_reference[0][:16]
