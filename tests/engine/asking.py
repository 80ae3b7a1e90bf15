"""What engine tests ask of servers, and how two servers' answers are compared."""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from typing import Any

import pytest
import requests
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from sglang_hyperdflash.tools.atomic import write_json
from sglang_hyperdflash.tools.server_process import Server
from tests.conftest import ROOT
from tests.waiting import PATIENCE

# The tiny target is sure of itself: at temperature 1 nearly every draw is its argmax. Here it has
# about two nats a token.
HOT = 2.5
TOKENS, PROMPTS = 32, 6
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
JSON = {"json_schema": json.dumps(SCHEMA), "ignore_eos": False, "max_new_tokens": 120}
SETTINGS = {
    "unfiltered": {},
    "top-k 5": {"top_k": 5},
    "top-p 0.8": {"top_p": 0.8},
    "min-p 0.1": {"min_p": 0.1},
    "bias": {"logit_bias": {"20": 2.0, "31": -4.0}},
    "penalties": {"frequency_penalty": 0.6, "presence_penalty": 0.3},
    "repetition": {"repetition_penalty": 1.3},
    "min_new_tokens": {"min_new_tokens": 24, "ignore_eos": False, "logit_bias": {"1": 12.0}},
}
GREEDY = {
    "greedy": {"temperature": 0},
    "greedy penalties": {"temperature": 0, **SETTINGS["penalties"]},
    "greedy repetition": {"temperature": 0, **SETTINGS["repetition"]},
    "greedy min_new_tokens": {"temperature": 0, "min_new_tokens": 24, "ignore_eos": False},
}
ASKED = {
    "regex": {"regex": "[a-f]{3}-[0-9]{2,5}"},
    "ebnf": {"ebnf": 'root ::= ("yes" | "no") ", " [a-z] [a-z] "."'},
    "json": JSON,
    "greedy json": {**JSON, "temperature": 0},
    "stop": {"stop": ["e", " is"], "stop_token_ids": [18]},
    "n": {"n": 3},
    "greedy bias": {"temperature": 0, "logit_bias": {"20": 6.0, "31": -4.0}},
    "all at once": {**JSON, "frequency_penalty": 0.4, "logit_bias": {"20": 1.5}},
}
ASKED["greedy all at once"] = {**ASKED["all at once"], "temperature": 0}


class OutputDependent(CustomLogitProcessor):
    """Forbids the last token again and prefers one that depends on how many are out."""

    def __call__(self, logits, custom_param_list=None):
        for row, parameters in zip(logits, custom_param_list, strict=True):
            out = parameters["__req__"].output_ids
            if len(out):  # a grammar may leave no other
                row[out[-1]] -= parameters.get("again", float("inf"))
            row[40 + len(out) % 7] += 4.0
        return logits


class CallCounter(CustomLogitProcessor):
    """Prefers a token that depends on how often it was called, which it stores in two places."""

    def __call__(self, logits, custom_param_list=None):
        for row, parameters in zip(logits, custom_param_list, strict=True):
            req = parameters["__req__"]
            parameters["calls"] = parameters.get("calls", 0) + 1
            req.noted = getattr(req, "noted", 0) + 2
            row[40 + (parameters["calls"] + req.noted) % 7] += 6.0
        return logits


# Sent by value: the server cannot import this file.
OutputDependent.__module__ = CallCounter.__module__ = "__main__"
PROCESSED = {
    "processor": (OutputDependent, {}),
    "greedy processor": (OutputDependent, {"temperature": 0}),
    "counter": (CallCounter, {}),
    "greedy counter": (CallCounter, {"temperature": 0}),
    "all and processor": (OutputDependent, ASKED["all at once"]),
}
UNPROCESSED = (*SETTINGS, *GREEDY, *ASKED, "mixed")
CASES = (*UNPROCESSED, *PROCESSED)
# What a server is asked whose other answers are no different.
FEW = ("unfiltered", "top-p 0.8", "penalties", "greedy json", "greedy all at once")


def sampled(i: int, **setting) -> dict:
    """A seeded request's parameters."""
    base = {"temperature": HOT, "max_new_tokens": TOKENS, "ignore_eos": True}
    return base | {"sampling_seed": 1000 + i} | setting


def mixed(i: int) -> dict:
    """One request of a batch in which every neighbour differs."""
    settings, n = (GREEDY, i // 3) if i % 3 == 2 else (SETTINGS, i)
    return sampled(i, **list(settings.values())[n % len(settings)])


def payloads(name: str, prompts: list[list[int]]) -> list[dict]:
    """The requests of a case."""
    if name == "mixed":
        every = [mixed(i) | {"max_new_tokens": 96} for i in range(12)]
    elif name in PROCESSED:
        own = {"custom_params": {"again": 2.0} if name.startswith("all") else {}}
        every = [sampled(i, **own, **PROCESSED[name][1]) for i in range(4)]
    elif name in ASKED:
        every = [sampled(i, **{"ignore_eos": False, **ASKED[name]}) for i in range(4)]
    else:
        every = [sampled(i, **(SETTINGS | GREEDY)[name]) for i in range(PROMPTS)]
    more = {"return_logprob": True, "top_logprobs_num": 3} if name in ASKED else {}
    if name in PROCESSED:
        more["custom_logit_processor"] = PROCESSED[name][0].to_str()
    # Grammars' answers differ by prompt in the later ones.
    pairs = zip(prompts[8:] if name in ASKED else prompts, every, strict=False)
    return [{"input_ids": prompt, "sampling_params": one, **more} for prompt, one in pairs]


def told(answer: dict) -> dict:
    """What must be equal of two answers."""
    meta = answer["meta_info"]
    found = {"ids": answer["output_ids"], "text": answer["text"], "end": meta["finish_reason"]}
    rows = [*meta.get("output_top_logprobs", []), meta.get("output_token_logprobs", [])]
    every = list(chain.from_iterable(rows))
    return found | {"values": [x[0] for x in every], "tokens": [x[1] for x in every]}


def answers(server: Server, asked: list[dict], concurrency: int) -> list[list[dict]]:
    """The choices of every payload's answer, so many payloads in flight at a time."""

    def ask(payload: dict) -> list[dict]:
        answer = server.generate(timeout=PATIENCE, **payload)
        return [told(one) for one in (answer if isinstance(answer, list) else [answer])]

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(ask, asked))


def assert_equal(found: list[list[dict]], expected: list[list[dict]]) -> None:
    """Tokens, texts and ends alike, and logprobs but for rounding."""
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert {**one, "values": None} == {**other, "values": None}
            assert one["values"] == pytest.approx(other["values"], abs=1e-3)


def case_answers(server: Server, names, prompts, concurrency: int) -> dict[str, list]:
    """What a server answers to every request of some cases, so many in flight at a time."""
    asked = {name: payloads(name, prompts) for name in names}
    found = iter(answers(server, list(chain.from_iterable(asked.values())), concurrency))
    return {name: list(islice(found, len(each))) for name, each in asked.items()}


def assert_cases(server: Server, names, prompts, expected: dict[str, list], concurrency: int = 32):
    """Every answer to the named cases is the ``expected`` one of the baseline."""
    different = {}
    for name, each in case_answers(server, names, prompts, concurrency).items():
        try:
            assert_equal(each, expected[name])
        except AssertionError as error:
            different[name] = str(error)[:300]
    assert not different, different


def tokens_of(server: Server, prompts, parameters, concurrency: int) -> list[list[int]]:
    """Tokens of each prompt under its own parameters."""
    pairs = zip(prompts, parameters, strict=True)
    asked = [{"input_ids": prompt, "sampling_params": one} for prompt, one in pairs]
    return [choices[0]["ids"] for choices in answers(server, asked, concurrency)]


def together(server: Server, prompts, parameters) -> list[list[int]]:
    """As :func:`tokens_of`, by one call: they share batches however slow a client is."""
    payload = {"input_ids": list(prompts), "sampling_params": list(parameters)}
    return [answer["output_ids"] for answer in server.generate(timeout=PATIENCE, **payload)]


def post(server: Server, path: str, payload: dict, **options) -> requests.Response:
    return requests.post(f"{server.url}{path}", json=payload, timeout=PATIENCE, **options)


def samples(server: Server, family: str) -> dict[frozenset, float]:
    """The samples of one family of ``/metrics`` by their labels."""
    from prometheus_client.parser import text_string_to_metric_families

    answer = requests.get(f"{server.url}/metrics", timeout=PATIENCE)
    answer.raise_for_status()
    return {
        frozenset(sample.labels.items()): sample.value
        for metric in text_string_to_metric_families(answer.text)
        for sample in metric.samples
        if sample.name == family
    }


def by_label(server: Server, family: str, label: str) -> dict[str, float]:
    """The samples of a family by one label."""
    return {dict(labels)[label]: value for labels, value in samples(server, family).items()}


def is_idle(server: Server) -> bool:
    """No request is running or waiting."""
    loads = requests.get(f"{server.url}/v1/loads", timeout=PATIENCE).json()["loads"]
    return all(load["num_running_reqs"] + load["num_waiting_reqs"] == 0 for load in loads)


def add_result(name: str, case: str, result: dict[Any, Any]) -> None:
    """Add a case's result to those of other runs, in ``build/NAME.json``."""
    path = ROOT / "build" / f"{name}.json"
    results = json.loads(path.read_text()) if path.is_file() else {}
    write_json(path, results | {case: result}, indent=1)
