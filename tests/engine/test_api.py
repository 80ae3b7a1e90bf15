"""What users of a server rely on, with HYPERDFLASH on: formats, stops, streams, limits."""

from __future__ import annotations

import json
import re
from functools import partial
from itertools import pairwise

import openai
import pytest
import requests

from tests.engine.conftest import FP32, HOT, greedy, greedy_all
from tests.waiting import PATIENCE, until

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
WORD = {"type": "regex", "pattern": "[a-f]{3}"}
TAG = {"type": "tag", "begin": "<order>", "content": WORD, "end": "</order>"}
END = "<｜end▁of▁sentence｜>"
# What is sent, and what an answer then is and would not be without; None: nothing is to be seen.
PARAMETERS = {
    "regex": ({"regex": "[a-f]{3}-[0-9]{2,5}"}, "[a-f]{3}-[0-9]{2,5}"),
    "ebnf": ({"ebnf": 'root ::= ("yes" | "no") ", " [a-z] [a-z] "."'}, r"(yes|no), [a-z][a-z]\."),
    "structural_tag": (
        {"structural_tag": json.dumps({"type": "structural_tag", "format": TAG})},
        "<order>[a-f]{3}</order>",
    ),
    "no_stop_trim": ({"stop": ["e"], "no_stop_trim": True}, "(?s)[^e]*e"),
    "skip_special_tokens": ({"skip_special_tokens": False, "ignore_eos": True}, f"(?s).*{END}.*"),
    # Fast tokenizers never put a space there.
    "spaces_between_special_tokens": (
        {
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "ignore_eos": True,
        },
        None,
    ),
}


def is_idle(server) -> bool:
    """No request is running or waiting."""
    loads = requests.get(f"{server.url}/v1/loads", timeout=PATIENCE).json()["loads"]
    return all(load["num_running_reqs"] + load["num_waiting_reqs"] == 0 for load in loads)


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


def test_logprobs_equal_the_baselines(target_server, hyper_server, own_prompts):
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
            assert max(abs(x[0] - y[0]) for x, y in zip(a, b, strict=True)) < 1e-3
            assert_order_but_for_ties(a, b)


def assert_order_but_for_ties(a: list[list], b: list[list]) -> None:
    """The same tokens in the same places; two may tie, the last with one that is unseen."""
    values = {token: value for value, token, *_ in a}
    for rank, (x, y) in enumerate(zip(a, b, strict=True)):
        if x[1] != y[1]:
            assert rank and abs(values.get(y[1], a[-1][0]) - x[0]) < 2e-3, (a, b)


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
    both = [greedy_all(s, prompts, 6, partial(greedy, sampling=sampling)) for s in servers]
    for plain, drafted in zip(*both, strict=True):
        assert drafted["text"] == plain["text"]
        assert drafted["output_ids"] == plain["output_ids"]
        assert drafted["meta_info"]["finish_reason"] == plain["meta_info"]["finish_reason"]


@pytest.mark.parametrize("name", PARAMETERS)
def test_masks_and_texts_are_the_baselines(target_server, hyper_server, own_prompts, name):
    parameters, expected = PARAMETERS[name]
    assert name in parameters
    sampling = {"temperature": 0, "max_new_tokens": 64, **parameters}
    payload = {"input_ids": own_prompts[:2], "sampling_params": sampling}
    plain, drafted = (s.generate(**payload) for s in (target_server, hyper_server))
    for a, b in zip(plain, drafted, strict=True):
        assert (b["text"], b["output_ids"]) == (a["text"], a["output_ids"])
        assert b["meta_info"]["finish_reason"] == a["meta_info"]["finish_reason"]
    if expected is not None:
        assert all(re.fullmatch(expected, a["text"]) for a in drafted), drafted
        without = {key: value for key, value in sampling.items() if key != name}
        others = hyper_server.generate(**{**payload, "sampling_params": without})
        assert not any(re.fullmatch(expected, a["text"]) for a in others)


def test_a_stream_interval_holds_back_tokens_and_changes_no_text(
    target_server, hyper_server, own_prompts
):
    for server in (target_server, hyper_server):
        texts, counts = {}, {}
        for interval in (1, 17):
            sampling = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
            sampling |= {"stream_interval": interval}
            chunks = streamed(server, input_ids=own_prompts[0], sampling_params=sampling)
            texts[interval] = chunks[-1]["text"]
            counts[interval] = [c["meta_info"]["completion_tokens"] for c in chunks]
            assert all(texts[interval].startswith(c["text"]) for c in chunks)
        whole = greedy(target_server, own_prompts[0], 400)["text"]
        assert texts == {1: whole, 17: whole}
        # The first token is sent at once, and the last ones with the end. What a busy server has
        # not sent yet goes with the next: steps are longer then, never shorter.
        every, held = ([b - a for a, b in pairwise(counts[i])] for i in (1, 17))
        assert len(held) > 1 and min(held[:-1]) >= 17 > min(every[:-1]), counts


def streamed(server, **payload) -> list[dict]:
    """Every chunk of a stream of SGLang's native API."""
    url = f"{server.url}/generate"
    with requests.post(
        url, json={**payload, "stream": True}, stream=True, timeout=PATIENCE
    ) as answer:
        answer.raise_for_status()
        lines = [line.removeprefix(b"data: ") for line in answer.iter_lines() if line]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


REFUSED = {
    "beams": ({"beam_width": 2}, "Beam search is not supported with speculative decoding"),
    "watermarks": ({"watermark": {"enabled": True}}, "watermark"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sglang_itself_refuses_beams_and_watermarks(hyper_server, own_prompts, name):
    parameters, said = REFUSED[name]
    sampling = {"temperature": 0, "max_new_tokens": 8, **parameters}
    payload = {"input_ids": own_prompts[0], "sampling_params": sampling}
    answer = requests.post(f"{hyper_server.url}/generate", json=payload, timeout=PATIENCE)
    assert answer.status_code == 400, answer.text
    assert said in answer.text


LEGACY = {
    "text": {"echo": True, "suffix": " end", "best_of": 2, "n": 2, "max_tokens": 24},
    "logprobs": {"logprobs": 2, "max_tokens": 24, "stop": ["."], "extra_body": {"min_tokens": 9}},
}


@pytest.mark.parametrize("name", LEGACY)
def test_openais_legacy_completions_are_the_baselines(clients, name):
    prompt = "Can I get a small coffee with milk?"
    options = {"model": "m", "prompt": prompt, "temperature": 0, "user": "u", **LEGACY[name]}
    plain, drafted = (c.completions.create(**options).choices for c in clients)
    assert [c.text for c in drafted] == [c.text for c in plain]
    assert [c.finish_reason for c in drafted] == [c.finish_reason for c in plain]
    assert len(plain) == options.get("n", 1)
    if name == "text":
        assert all(c.text.startswith(prompt) for c in plain)
        return
    a, b = plain[0].logprobs, drafted[0].logprobs
    assert a.tokens == b.tokens and b.token_logprobs == pytest.approx(a.token_logprobs, abs=1e-3)
    assert [list(top) for top in a.top_logprobs] == [list(top) for top in b.top_logprobs]
    assert all(len(top) == 2 for top in b.top_logprobs)


def test_openais_own_names_of_chat_parameters_are_the_baselines(clients):
    messages = [{"role": "user", "content": "Can I get a small coffee with milk?"}]
    schema = {"type": "json_schema", "json_schema": {"name": "order", "schema": SCHEMA}}
    options = {
        "model": "m",
        "messages": messages,
        "temperature": 0,
        "max_completion_tokens": 90,
        "logprobs": True,
        "top_logprobs": 3,
        "response_format": schema,
    }
    plain, drafted = (c.chat.completions.create(**options).choices[0] for c in clients)
    assert drafted.message.content == plain.message.content
    assert set(json.loads(plain.message.content)) == set(SCHEMA["required"])
    for a, b in zip(plain.logprobs.content, drafted.logprobs.content, strict=True):
        assert a.token == b.token and abs(a.logprob - b.logprob) < 1e-3
        assert [t.token for t in a.top_logprobs] == [t.token for t in b.top_logprobs]
        assert len(b.top_logprobs) == 3


CANCEL = {
    "type": "object",
    "properties": {"reason": {"enum": ["too late", "too dear"]}},
    "required": ["reason"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in (("order", SCHEMA), ("cancel", CANCEL))
]
CHOICES = {
    "required": {"order", "cancel"},
    "cancel": {"cancel"},
    "auto": set(),
    "none": set(),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_tool_calls_are_the_baselines(clients, choice):
    """Whole and streamed; the tiny target calls a tool only where it must."""
    named = {"type": "function", "function": {"name": choice}}
    messages = [{"role": "user", "content": "Can I get a small coffee with milk?"}]
    options = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 200}
    options |= {"tools": TOOLS, "tool_choice": named if choice == "cancel" else choice}
    options |= {"parallel_tool_calls": False}
    plain, drafted = (c.chat.completions.create(**options).choices[0] for c in clients)
    calls = [call.function for call in drafted.message.tool_calls or []]
    assert calls == [call.function for call in plain.message.tool_calls or []]
    assert drafted.message.content == plain.message.content
    assert drafted.finish_reason == plain.finish_reason
    assert {call.name for call in calls} <= CHOICES[choice]
    assert bool(calls) == bool(CHOICES[choice])
    assert all(json.loads(call.arguments) for call in calls)
    chunks = clients[1].chat.completions.create(stream=True, **options)
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    streamed = [call.function.arguments or "" for d in deltas for call in d.tool_calls or []]
    assert "".join(streamed) == "".join(call.arguments for call in calls)


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
    options = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 400}
    options["extra_body"] = {"ignore_eos": True}
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
        with requests.post(url, json=payload, stream=True, timeout=PATIENCE) as answer:
            lines = answer.iter_lines()
            for _ in range(4):
                next(lines)
    until(lambda: is_idle(hyper_server), "a request is stuck")
    assert greedy(hyper_server, own_prompts[0])["output_ids"] == own_reference[0]


def test_prompts_at_the_context_limit(target_server, hyper_server, own_prompts, own_reference):
    base = [token for prompt in own_prompts for token in prompt] * 20
    for length in (CONTEXT - 9, CONTEXT - 7, CONTEXT - 2, CONTEXT - 1):
        prompt = base[:length]
        payload = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True},
        }
        plain = requests.post(f"{target_server.url}/generate", json=payload, timeout=PATIENCE)
        drafted = requests.post(f"{hyper_server.url}/generate", json=payload, timeout=PATIENCE)
        assert drafted.status_code == plain.status_code
        if plain.status_code == 200:
            assert drafted.json()["output_ids"] == plain.json()["output_ids"]
    too_long = {"input_ids": base[: CONTEXT + 1], "sampling_params": {"max_new_tokens": 4}}
    answer = requests.post(f"{hyper_server.url}/generate", json=too_long, timeout=PATIENCE)
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
    answer = requests.post(f"{hyper_server.url}/generate", json=payload, timeout=PATIENCE)
    assert answer.status_code == 400, answer.text
    assert name in answer.text
    assert greedy(hyper_server, own_prompts[0], 16)["output_ids"] == own_reference[0][:16]


CHAT, SCORE = "/v1/chat/completions", "/v1/score"
LABELS = {"label_token_ids": [7, 8]}
EMBEDDED = {"embed_override_token_id": 5, "query_embed_overrides": [[0.5, 0.5]]}
# Without our refusal the scheduler fails in its forward pass, and the server ends; but for
# token_ids_logprob, which SGLang checks, and the list of logprobs (HTTP 500).
FATAL = {
    "negative id": ("/generate", {"input_ids": [5, -1]}),
    "id past the vocabulary": ("/generate", {"input_ids": [5, 1363]}),
    "no int64": ("/generate", {"input_ids": [5, 2**62]}),
    "one of a batch": ("/generate", {"input_ids": [[5, 6], [5, -1]]}),
    "none of a batch": ("/generate", {"input_ids": [[5, 6], []]}),
    "several answers": ("/generate", {"input_ids": [5, -1], "sampling_params": {"n": 2}}),
    "empty text": ("/generate", {"text": ""}),
    "ids with an image": ("/generate", {"input_ids": [5, -1], "image_data": "image"}),
    "session without id": ("/generate", {"text": "", "session_params": {"rid": "r"}}),
    "embeddings": ("/generate", {"text": "a", "positional_embed_overrides": {"a": 1}}),
    "top logprobs": ("/generate", {"text": "a", "return_logprob": True, "top_logprobs_num": 1364}),
    "logprobs of others": ("/generate", {"text": "a", "top_logprobs_num": 1364}),
    "top-k": ("/generate", {"text": "a", "sampling_params": {"top_k": 2**40, "temperature": 1}}),
    "first logprob": (
        "/generate",
        {"input_ids": [5, 6, 7], "return_logprob": True, "logprob_start_len": -5},
    ),
    "list of logprobs": ("/generate", {"text": "a", "top_logprobs_num": [2]}),
    "token_ids_logprob": (
        "/generate",
        {"text": "a", "return_logprob": True, "token_ids_logprob": [1363]},
    ),
    "completion of ids": ("/v1/completions", {"prompt": [5, -1]}),
    "completions of ids": ("/v1/completions", {"prompt": [[5, 6], [1363]]}),
    "completions of empty text": ("/v1/completions", {"prompt": ["a", ""]}),
    "completion with logprobs": ("/v1/completions", {"prompt": "a", "logprobs": 10_000}),
    "completion streams": ("/v1/completions", {"prompt": [5, -1], "stream": True}),
    "chat with logprobs": (CHAT, {"logprobs": True, "top_logprobs": 10_000}),
    "chat of ids": (CHAT, {"input_ids": [5, -1]}),
    "scored items": (SCORE, {"query": [5], "items": [[6], [-1]], **LABELS}),
    "scored query": (SCORE, {"query": [1363], "items": [[6], [7]], **LABELS}),
    "scored embeddings": (SCORE, {"query": [5], "items": [[6]], **LABELS, **EMBEDDED}),
}


def post_fatal(server, name: str) -> requests.Response:
    path, fields = FATAL[name]
    payload = {"model": "m", **fields}
    if path == CHAT:
        payload["messages"] = [{"role": "user", "content": "a"}]
    return requests.post(server.url + path, json=payload, timeout=PATIENCE)


@pytest.mark.parametrize("name", FATAL)
def test_what_would_end_the_server_gets_400(hyper_server, own_prompts, own_reference, name):
    answer = post_fatal(hyper_server, name)
    assert answer.status_code == 400, answer.text
    assert greedy(hyper_server, own_prompts[0], 16)["output_ids"] == own_reference[0][:16]


def test_a_stream_that_is_refused_says_so(hyper_server):
    (chunk,) = streamed(hyper_server, input_ids=[5, -1])
    assert chunk["error"]["code"] == 400 and "found -1" in chunk["error"]["message"]


SGLANG_ENDS = (
    *("negative id", "id past the vocabulary", "empty text", "top logprobs", "first logprob"),
    *("top-k", "completion with logprobs", "chat with logprobs", "ids with an image"),
    *("session without id", "embeddings", "scored embeddings"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", SGLANG_ENDS)
def test_sglang_alone_ends_at_them(servers, target_dir, name):
    """Once this fails, SGLang refuses them itself: then ours may go."""
    server = servers.get("ends", target_dir, *FP32)
    try:
        with pytest.raises(requests.RequestException):
            for _ in range(2):  # a start of logprobs ends it once the prompt is cached
                post_fatal(server, name).raise_for_status()
        server.process.wait(PATIENCE)
    finally:
        servers.stop("ends")


@pytest.mark.parametrize("options", [{}, {"top_logprobs_num": 2}, {"logprob_start_len": 0}])
def test_no_new_tokens_have_no_logprobs(target_server, hyper_server, own_prompts, options):
    payload = {"input_ids": own_prompts[0], "return_logprob": True, **options}
    payload["sampling_params"] = {"temperature": 0, "max_new_tokens": 0}
    plain, drafted = (server.generate(**payload) for server in (target_server, hyper_server))
    assert drafted["output_ids"] == plain["output_ids"] == []
    found, expected = drafted["meta_info"], plain["meta_info"]
    assert found["output_token_logprobs"] == expected["output_token_logprobs"] == []
    assert found["finish_reason"] == expected["finish_reason"]
    for name in {"output_top_logprobs", "input_token_logprobs"} & expected.keys():
        for row, other in zip(flat(found[name]), flat(expected[name]), strict=True):
            assert row[1:] == other[1:] and row[0] == pytest.approx(other[0], abs=2e-4)


def flat(rows: list) -> list:
    """Logprobs ``[value, id, text]``, of one or several tokens a position."""
    return [entry for row in rows for entry in (row if isinstance(row[0], list) else [row])]


def test_hidden_states_get_400_and_the_server_goes_on(hyper_server, own_prompts, own_reference):
    payload = {"input_ids": own_prompts[0], "return_hidden_states": True}
    answer = requests.post(f"{hyper_server.url}/generate", json=payload, timeout=PATIENCE)
    assert answer.status_code == 400 and "hidden states" in answer.text
    assert greedy(hyper_server, own_prompts[0], 16)["output_ids"] == own_reference[0][:16]


def test_broken_json_gets_an_error_and_the_server_goes_on(hyper_server, own_prompts, own_reference):
    headers = {"Content-Type": "application/json"}
    answer = requests.post(
        f"{hyper_server.url}/generate", data='{"text": "a", ', headers=headers, timeout=PATIENCE
    )
    assert answer.status_code in (400, 422)
    schema = {"temperature": 0, "json_schema": "{not json"}
    payload = {"input_ids": own_prompts[0], "sampling_params": schema}
    answer = requests.post(f"{hyper_server.url}/generate", json=payload, timeout=PATIENCE)
    assert answer.status_code == 400
    assert greedy(hyper_server, own_prompts[0], 16)["output_ids"] == own_reference[0][:16]


def test_a_profile_of_a_few_rounds(hyper_server, own_prompts, tmp_path):
    """Found as: the server ended, for SGLang asks a platform of ours what to profile."""
    options = {"output_dir": str(tmp_path), "num_steps": 3, "activities": ["CPU"]}
    url = f"{hyper_server.url}/start_profile"
    requests.post(url, json=options, timeout=PATIENCE).raise_for_status()
    assert len(greedy(hyper_server, own_prompts[0], 32)["output_ids"]) == 32
    assert list(tmp_path.rglob("*.trace.json.gz"))
