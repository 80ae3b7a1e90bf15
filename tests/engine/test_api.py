"""What users of a server rely on, with HYPERDFLASH on: formats, stops, streams, limits."""

import json
import re
from functools import partial
from itertools import pairwise

import openai
import pytest
import requests

from sglang_hyperdflash.serving.scheduler.metrics import GAIN, ROUNDS
from tests.conftest import ROOT
from tests.engine.asking import SCHEMA, answers, assert_equal, is_idle, post, samples
from tests.engine.conftest import greedy, greedy_all
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.xdist_group("pair")
MESSAGES = [{"role": "user", "content": "Can I get a small coffee with milk?"}]
WORD = {"type": "regex", "pattern": "[a-f]{3}"}
TAG = {"type": "tag", "begin": "<order>", "content": WORD, "end": "</order>"}
END = "<｜end▁of▁sentence｜>"
SPECIAL = {"skip_special_tokens": False, "ignore_eos": True}
# What is sent, and what an answer then is.
PARAMETERS = {
    "structural_tag": (
        {"structural_tag": json.dumps({"type": "structural_tag", "format": TAG})},
        "<order>[a-f]{3}</order>",
    ),
    "no_stop_trim": ({"stop": ["e"], "no_stop_trim": True}, "(?s)[^e]*e"),
    "special tokens": (SPECIAL, f"(?s).*{END}.*"),
    "spaces": (SPECIAL | {"spaces_between_special_tokens": False}, "(?s).*"),
    "eos": ({}, "(?s).*"),
    "one stop": ({"stop": ["."], "ignore_eos": True}, "[^.]*"),
    "several": ({"stop": ["\n", "is", "the"], "ignore_eos": True}, ".*"),
    "tokens": ({"stop_token_ids": [16, 18], "ignore_eos": True}, "(?s).*"),
    # Several fall into one block: the earliest completion ends the answer.
    "all kinds": ({"stop": ["zebra", " of", "e", "a"], "stop_token_ids": [16, 18]}, "(?s).*"),
    "regex stop": ({"stop": ["the"], "stop_regex": ["[0-9]+", "s t"]}, "(?s).*"),
}


@pytest.fixture(scope="module")
def clients(target_server, hyper_server):
    urls = [f"{server.url}/v1" for server in (target_server, hyper_server)]
    return [openai.OpenAI(base_url=url, api_key="none") for url in urls]


def test_texts_and_ends_are_the_baselines(target_server, hyper_server, own_prompts):
    base, prompts = {"temperature": 0, "max_new_tokens": 64}, own_prompts[::3]
    asked = [
        {"input_ids": prompt, "sampling_params": base | parameters}
        for parameters, _ in PARAMETERS.values()
        for prompt in prompts
    ]
    plain, drafted = (answers(server, asked, 32) for server in (target_server, hyper_server))
    assert_equal(drafted, plain)
    for number, (name, (_, expected)) in enumerate(PARAMETERS.items()):
        for (one,) in drafted[number * len(prompts) :][: len(prompts)]:
            assert re.fullmatch(expected, one["text"]), (name, one["text"])


@pytest.mark.parametrize("new_tokens", [48, 0])
def test_logprobs_of_prompts_are_the_baselines(
    target_server, hyper_server, own_prompts, new_tokens
):
    options = {"return_logprob": True, "top_logprobs_num": 5, "logprob_start_len": 0}
    ask = partial(greedy, max_new_tokens=new_tokens, **options)
    both = [greedy_all(s, own_prompts[::3], 4, ask) for s in (target_server, hyper_server)]
    for plain, drafted in ([a["meta_info"] for a in pair] for pair in zip(*both, strict=True)):
        for kind in ("output_token_logprobs", "input_token_logprobs"):
            values, others = ([x[0] for x in one[kind]] for one in (plain, drafted))
            assert [x[1] for x in drafted[kind]] == [x[1] for x in plain[kind]]
            assert others == pytest.approx(values, abs=1e-3)
        assert len(drafted["output_token_logprobs"]) == new_tokens


def streamed(server, **payload) -> list[dict]:
    """Every chunk of a stream of SGLang's native API."""
    with post(server, "/generate", {**payload, "stream": True}, stream=True) as answer:
        answer.raise_for_status()
        lines = [line.removeprefix(b"data: ") for line in answer.iter_lines() if line]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def test_a_stream_interval_holds_back_tokens_and_changes_no_text(
    hyper_server, own_prompts, own_reference
):
    texts, counts = {}, {}
    for interval in (1, 17):
        sampling = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}
        sampling |= {"stream_interval": interval}
        chunks = streamed(hyper_server, input_ids=own_prompts[0], sampling_params=sampling)
        texts[interval] = chunks[-1]["text"]
        counts[interval] = [c["meta_info"]["completion_tokens"] for c in chunks]
        assert all(texts[interval].startswith(c["text"]) for c in chunks)
        assert chunks[-1]["output_ids"] == own_reference[0]
    assert texts[1] == texts[17]
    # The first token is sent at once, and the last ones with the end.
    held = [b - a for a, b in pairwise(counts[17])]
    assert len(held) > 1 and min(held[:-1]) >= 17, counts


def test_openais_legacy_completions_are_the_baselines(clients):
    options = {"model": "m", "prompt": MESSAGES[0]["content"], "temperature": 0, "max_tokens": 24}
    options |= {"echo": True, "suffix": " end", "best_of": 2, "n": 2, "stop": ["."], "user": "u"}
    options["extra_body"] = {"min_tokens": 9}
    plain, drafted = (c.completions.create(**options).choices for c in clients)
    assert [c.text for c in drafted] == [c.text for c in plain]
    assert [c.finish_reason for c in drafted] == [c.finish_reason for c in plain]
    assert len(plain) == 2


def test_openais_chat_parameters_are_the_baselines(clients):
    schema = {"type": "json_schema", "json_schema": {"name": "order", "schema": SCHEMA}}
    options = {"model": "m", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 90}
    options |= {"logprobs": True, "top_logprobs": 3, "response_format": schema}
    plain, drafted = (c.chat.completions.create(**options).choices[0] for c in clients)
    assert drafted.message.content == plain.message.content
    assert set(json.loads(plain.message.content)) == set(SCHEMA["required"])
    for a, b in zip(plain.logprobs.content, drafted.logprobs.content, strict=True):
        assert a.token == b.token and abs(a.logprob - b.logprob) < 1e-3
        assert len(b.top_logprobs) == 3


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": True}}
    for name in ("order", "cancel")
]
CHOICES = {"required": {"order", "cancel"}, "cancel": {"cancel"}, "auto": set()}


@pytest.mark.parametrize(
    "choice", [pytest.param("required", marks=pytest.mark.slow), "cancel", "auto"]
)
def test_tool_calls_are_the_baselines(clients, choice):
    """Whole and streamed; the tiny target calls a tool only where it must."""
    named = {"type": "function", "function": {"name": choice}}
    options = {"model": "m", "messages": MESSAGES, "temperature": 0, "max_tokens": 200}
    options |= {"tools": TOOLS, "tool_choice": named if choice == "cancel" else choice}
    options |= {"parallel_tool_calls": False}
    plain, drafted = (c.chat.completions.create(**options).choices[0] for c in clients)
    calls = [call.function for call in drafted.message.tool_calls or []]
    assert calls == [call.function for call in plain.message.tool_calls or []]
    assert drafted.message.content == plain.message.content
    assert drafted.finish_reason == plain.finish_reason
    assert {call.name for call in calls} <= CHOICES[choice]
    assert bool(calls) == bool(CHOICES[choice])
    chunks = clients[1].chat.completions.create(stream=True, **options)
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    pieces = [call.function.arguments or "" for d in deltas for call in d.tool_calls or []]
    assert "".join(pieces) == "".join(call.arguments for call in calls)
    if choice == "auto":
        assert "".join(d.content or "" for d in deltas) == plain.message.content


def test_length_limits_inside_a_block(hyper_server, own_prompts, own_reference):
    limits = {"temperature": 0, "ignore_eos": True}
    asked = [
        {"input_ids": prompt, "sampling_params": limits | {"max_new_tokens": limit}}
        for limit in (1, 2, 6, 7, 8, 13)
        for prompt in own_prompts[:6]
    ]
    for payload, (one,) in zip(asked, answers(hyper_server, asked, 32), strict=True):
        limit = payload["sampling_params"]["max_new_tokens"]
        reference = own_reference[own_prompts.index(payload["input_ids"])]
        assert one["ids"] == reference[:limit] and one["end"] == {"type": "length", "length": limit}


def test_abort_in_the_middle(hyper_server, own_prompts, own_reference):
    sampling = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
    for prompt in own_prompts[:4]:
        payload = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        with post(hyper_server, "/generate", payload, stream=True) as answer:
            lines = answer.iter_lines()
            for _ in range(4):
                next(lines)
    until(lambda: is_idle(hyper_server), "a request is stuck")
    assert greedy(hyper_server, own_prompts[0])["output_ids"] == own_reference[0]


CHAT, SCORE = "/v1/chat/completions", "/v1/score"
LABELS = {"label_token_ids": [7, 8]}
EMBEDDED = {"embed_override_token_id": 5, "query_embed_overrides": [[0.5, 0.5]]}
LOGPROB = {"text": "a", "return_logprob": True}
# On every way in. Without our refusal the scheduler fails in its forward pass, and the server ends;
# but for the list of logprobs (HTTP 500). ``tests/unit/serving/test_refusals.py`` has the others.
FATAL = {
    "id past the vocabulary": ("/generate", {"input_ids": [5, 1363]}),
    "no int64": ("/generate", {"input_ids": [5, 2**62]}),
    "one of a batch": ("/generate", {"input_ids": [[5, 6], [5, -1]]}),
    "none of a batch": ("/generate", {"input_ids": [[5, 6], []]}),
    "several answers": ("/generate", {"input_ids": [5, -1], "sampling_params": {"n": 2}}),
    "empty text": ("/generate", {"text": ""}),
    "embeddings": ("/generate", {"text": "a", "positional_embed_overrides": {"a": 1}}),
    "top logprobs": ("/generate", LOGPROB | {"top_logprobs_num": 1364}),
    "first logprob": ("/generate", LOGPROB | {"logprob_start_len": -5}),
    "list of logprobs": ("/generate", {"text": "a", "top_logprobs_num": [2]}),
    "top-k": ("/generate", {"text": "a", "sampling_params": {"top_k": 2**40, "temperature": 1}}),
    "completions of ids": ("/v1/completions", {"prompt": [[5, 6], [1363]]}),
    "completions of empty text": ("/v1/completions", {"prompt": ["a", ""]}),
    "completion with logprobs": ("/v1/completions", {"prompt": "a", "logprobs": 10_000}),
    "completion streams": ("/v1/completions", {"prompt": [5, -1], "stream": True}),
    "chat with logprobs": (CHAT, {"logprobs": True, "top_logprobs": 10_000}),
    "chat of ids": (CHAT, {"input_ids": [5, -1]}),
    "scored items": (SCORE, {"query": [5], "items": [[6], [-1]], **LABELS}),
    "scored query": (SCORE, {"query": [1363], "items": [[6], [7]], **LABELS}),
    # SGLang's own refusals of what would end it, or of what no speculative algorithm can do.
    "token_ids_logprob": ("/generate", LOGPROB | {"token_ids_logprob": [1363]}),
    "beams": ("/generate", {"text": "a", "sampling_params": {"beam_width": 2}}),
    "watermarks": ("/generate", {"text": "a", "sampling_params": {"watermark": {"enabled": True}}}),
    "hidden states": ("/generate", {"text": "a", "return_hidden_states": True}),
    "scored embeddings": (SCORE, {"query": [5], "items": [[6]], **LABELS, **EMBEDDED}),
}


def test_what_would_end_the_server_gets_400(hyper_server, own_prompts, own_reference):
    codes = {}
    for name, (path, fields) in FATAL.items():
        messages = {"messages": MESSAGES} if path == CHAT else {}
        codes[name] = post(hyper_server, path, {"model": "m", **fields, **messages}).status_code
    assert codes == dict.fromkeys(FATAL, 400)
    (chunk,) = streamed(hyper_server, input_ids=[5, -1])
    assert chunk["error"]["code"] == 400
    assert greedy(hyper_server, own_prompts[0], 16)["output_ids"] == own_reference[0][:16]


def test_a_profile_of_a_few_rounds(hyper_server, own_prompts, tmp_path):
    """SGLang asks a platform of ours what to profile."""
    options = {"output_dir": str(tmp_path), "num_steps": 3, "activities": ["CPU"]}
    post(hyper_server, "/start_profile", options).raise_for_status()
    assert len(greedy(hyper_server, own_prompts[0], 32)["output_ids"]) == 32
    until(lambda: list(tmp_path.rglob("*.trace.json.gz")))


def test_labels_are_sglangs_and_the_dashboards_metrics_exist(hyper_server):
    sglangs = set().union(*samples(hyper_server, "sglang:num_running_reqs"))
    assert set().union(*samples(hyper_server, ROUNDS)) == sglangs
    dashboard = json.loads((ROOT / "docs" / "grafana_hyperdflash.json").read_text())
    drawn = " ".join(t["expr"] for panel in dashboard["panels"] for t in panel["targets"])
    shown = requests.get(f"{hyper_server.url}/metrics", timeout=PATIENCE).text
    names = set(re.findall(r"\b(?:sglang|hyperdflash):\w+", drawn))
    missing = {name for name in names if not re.search(rf"^{name}{{", shown, re.MULTILINE)}
    # A server of one width expects no gain, and none was retracted.
    assert missing <= {"sglang:num_retracted_requests_total", GAIN}
