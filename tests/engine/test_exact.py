"""Sampled requests are exact: the baseline's tokens by seed, whatever drafts, batch, retraction.

The baseline server runs deterministic inference. SGLang keys its noise by rank as soon as a
request filters; there a plugin draws by vocabulary id, over a fully sorted vocabulary.
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from tests.engine.conftest import (
    FP32,
    HOT,
    OPTIMISTIC,
    SMALL_POOL,
    install_plugin,
    retractions,
)
from tests.engine.test_api import SCHEMA
from tests.waiting import PATIENCE, until

VOCABULARY_ORDER = '''
"""Seeded sampling without speculation, by vocabulary id, filters over a sorted vocabulary."""


def draw(original, self, probs, info, positions, simple):
    import torch

    from tests.target_probabilities import target_probabilities
    from triton_ops.gumbel import gumbel_noise

    if simple:
        return original(self, probs, info, positions, simple)
    ones = torch.ones(len(probs))
    top_ps = info.top_ps.masked_fill(info.top_ps >= 1, 2.0)
    distribution = target_probabilities(probs.log(), ones, info.top_ks, top_ps, info.min_ps)
    noise = gumbel_noise(info.sampling_seed, positions, torch.arange(probs.shape[1]))
    return (distribution.double().log() + noise).argmax(-1), None


def load():
    from sglang_hyperdflash.seams import when_imported

    when_imported("sglang.srt.layers.sampler", patch)


def patch():
    from sglang.srt.layers.sampler import Sampler

    original = Sampler._sample_from_probs
    Sampler._sample_from_probs = lambda self, *inputs: draw(original, self, *inputs)
'''
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
    "frequency and presence": {"frequency_penalty": 0.6, "presence_penalty": 0.3},
    "repetition": {"repetition_penalty": 1.3},
    "min_new_tokens": {"min_new_tokens": 24, "ignore_eos": False},
}
TOKENS, PROMPTS = 32, 8
PROCESSORS = "--enable-custom-logit-processor"


class OutputDependent(CustomLogitProcessor):
    """Forbids the last token again and prefers one that depends on how many are out.

    ``again``: what the last token loses instead, where a grammar may leave no other.
    """

    def __call__(self, logits, custom_param_list=None):
        for row, parameters in zip(logits, custom_param_list, strict=True):
            out = parameters["__req__"].output_ids
            if len(out):
                row[out[-1]] -= parameters.get("again", float("inf"))
            row[40 + len(out) % 7] += 4.0
        return logits


# Sent by value: the server cannot import this file.
OutputDependent.__module__ = "__main__"


def sampled(i: int, **setting) -> dict:
    base = {"temperature": HOT, "max_new_tokens": TOKENS, "ignore_eos": True}
    return {**base, "sampling_seed": 1000 + i, **setting}


def tokens_of(server: Server, prompts, parameters, concurrency: int, **options) -> list[list[int]]:
    """Tokens of each prompt under its own parameters."""

    def ask(pair):
        return server.generate(input_ids=pair[0], sampling_params=pair[1], **options)["output_ids"]

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(ask, zip(prompts, parameters, strict=True)))


def together(server: Server, prompts, parameters) -> list[list[int]]:
    """As :func:`tokens_of`, by one call: they share batches however slow a client is."""
    payload = {"input_ids": list(prompts), "sampling_params": list(parameters)}
    return [answer["output_ids"] for answer in server.generate(**payload)]


@pytest.fixture(scope="module")
def deterministic(servers, target_dir, tmp_path_factory):
    """The baseline under deterministic inference; its host always knows the last token."""
    folder = tmp_path_factory.mktemp("plugin")
    yield servers.get(
        "target-deterministic",
        target_dir,
        *FP32,
        "--enable-deterministic-inference",
        "--disable-overlap-schedule",
        PROCESSORS,
        environment=install_plugin(folder, "vocabulary_order", VOCABULARY_ORDER),
    )
    servers.stop("target-deterministic")


@pytest.fixture(scope="module")
def references(deterministic, own_prompts) -> dict[str, list[list[int]]]:
    """The baseline's tokens of the demo prompts at each seeded and each greedy setting."""
    settings = {name: [sampled(i, **s) for i in range(PROMPTS)] for name, s in SETTINGS.items()}
    for name, s in GREEDY.items():
        settings[f"greedy {name}"] = [sampled(i, **{"temperature": 0, **s}) for i in range(PROMPTS)]
    found = {n: tokens_of(deterministic, own_prompts[:PROMPTS], s, 4) for n, s in settings.items()}
    again = tokens_of(
        deterministic, own_prompts[:PROMPTS], [sampled(i + PROMPTS) for i in range(PROMPTS)], 4
    )
    same = [a == b for a, b in zip(found["unfiltered"], again, strict=True)]
    assert not any(same), "other seeds must give other tokens, or seeds are not seen"
    lengths = [len(answer) for answer in found["min_new_tokens"]]
    assert 24 <= min(lengths) < TOKENS, "an end must be likely, or nothing is forbidden"
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_a_seed_gives_the_baselines_tokens(hyper_server, own_prompts, references, name):
    parameters = [sampled(i, **SETTINGS[name]) for i in range(PROMPTS)]
    assert tokens_of(hyper_server, own_prompts[:PROMPTS], parameters, 4) == references[name]


@pytest.mark.parametrize("name", GREEDY)
def test_penalties_are_exact_at_temperature_zero(hyper_server, own_prompts, references, name):
    parameters = [sampled(i, **{"temperature": 0, **GREEDY[name]}) for i in range(PROMPTS)]
    assert (
        tokens_of(hyper_server, own_prompts[:PROMPTS], parameters, 4)
        == references[f"greedy {name}"]
    )


ASKED = {
    "regex": {"regex": "[a-f]{3}-[0-9]{2,5}"},
    "ebnf": {"ebnf": 'root ::= ("yes" | "no") ", " [a-z] [a-z] "."'},
    "json_schema": {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 80},
    "stop": {"stop": ["e", " is"], "stop_token_ids": [18]},
    "n": {"n": 3},
    "greedy logit_bias": {"temperature": 0, "logit_bias": {"20": 6.0, "31": -4.0}},
}


@pytest.mark.parametrize("name", ASKED)
def test_what_else_is_asked_for(hyper_server, deterministic, own_prompts, name):
    settings = [sampled(i, ignore_eos=False, **ASKED[name]) for i in range(4)]
    payload = {"input_ids": own_prompts[:4], "sampling_params": settings, "return_logprob": True}
    both = [server.generate(**payload) for server in (deterministic, hyper_server)]
    assert len({tuple(a["output_ids"]) for a in both[0]}) > 1
    for plain, drafted in zip(*both, strict=True):
        assert drafted["output_ids"] == plain["output_ids"] and drafted["text"] == plain["text"]
        a, b = plain["meta_info"], drafted["meta_info"]
        assert b["finish_reason"] == a["finish_reason"]
        a, b = ([x[0] for x in one["output_token_logprobs"]] for one in (a, b))
        assert b == pytest.approx(a, abs=1e-3)


def mixed(i: int) -> tuple[str, dict]:
    """One request of a batch in which every neighbour differs."""
    seeded, greedy = list(SETTINGS), list(GREEDY)
    if i % 3 == 2:
        name = greedy[i // 3 % len(greedy)]
        return f"greedy {name}", sampled(i, **{"temperature": 0, **GREEDY[name]})
    name = seeded[i % len(seeded)]
    return name, sampled(i, **SETTINGS[name])


def test_batchmates_do_not_matter(hyper_server, own_prompts, references):
    """Seeded, filtered, penalised, greedy and unseeded requests in one batch, and prefix hits."""
    named = [mixed(i) for i in range(PROMPTS)]
    unseeded = {"temperature": HOT, "max_new_tokens": TOKENS, "ignore_eos": True}
    prompts = own_prompts[:PROMPTS] + own_prompts[:4]
    parameters = [p for _, p in named] + [unseeded] * 4
    expected = [references[name][i] for i, (name, _) in enumerate(named)]
    for _ in range(2):
        assert together(hyper_server, prompts, parameters)[:PROMPTS] == expected


@pytest.mark.slow
def test_a_random_drafter_changes_nothing(
    servers, target_dir, drafter_dir, own_prompts, references, tmp_path
):
    """Deterministic inference, overlap off, drafts that are nearly never right."""
    shutil.copytree(drafter_dir, tmp_path / "random")
    weights = tmp_path / "random" / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    noise = {
        name: torch.randn(t.shape, generator=generator).mul(0.05).to(t.dtype)
        for name, t in load_file(weights).items()
    }
    save_file(noise, weights)
    arguments = ("--enable-deterministic-inference", "--disable-overlap-schedule")
    server = servers.get(
        "random-drafter",
        target_dir,
        *FP32,
        *arguments,
        *hyperdflash_arguments(tmp_path / "random"),
    )
    named = [mixed(i) for i in range(PROMPTS)]
    found = tokens_of(server, own_prompts[:PROMPTS], [p for _, p in named], 8)
    assert found == [references[name][i] for i, (name, _) in enumerate(named)]
    # Without a seed: 42, as SGLang has it; the choices of n then are equal, as SGLang's are.
    parameters = sampled(0, sampling_seed=None, n=2)
    answers = server.generate(input_ids=own_prompts[0], sampling_params=parameters)
    same = sampled(0, sampling_seed=42)
    expected = server.generate(input_ids=own_prompts[0], sampling_params=same)["output_ids"]
    assert [a["output_ids"] for a in answers] == [expected] * 2
    servers.stop("random-drafter")


@pytest.fixture(scope="module")
def small_pool(servers, target_dir, drafter_dir, tmp_path_factory):
    """Requests do not fit, which is noticed late: some are retracted."""
    folder = tmp_path_factory.mktemp("plugin")
    yield servers.get(
        "exact-small-pool",
        target_dir,
        *FP32,
        *SMALL_POOL,
        PROCESSORS,
        *hyperdflash_arguments(drafter_dir),
        environment=install_plugin(folder, "optimistic", OPTIMISTIC),
    )
    servers.stop("exact-small-pool")


def test_retraction_changes_nothing(small_pool, hyper_server, own_prompts):
    """Long answers in a pool that is too small equal those of a pool with room."""
    named = [mixed(i) for i in range(12)]
    parameters = [{**p, "max_new_tokens": 96} for _, p in named]
    expected = tokens_of(hyper_server, own_prompts, parameters, 2)
    assert together(small_pool, own_prompts, parameters) == expected
    assert retractions(small_pool)


def test_requests_hold_in_mixed_chunks(
    servers, target_dir, drafter_dir, deterministic, own_prompts, references
):
    """Running requests draw a token while others' prompts are computed, a chunk at a time."""
    setting = {"json_schema": json.dumps(SCHEMA), "ignore_eos": False, "max_new_tokens": 80}
    schemas = [sampled(i, **setting) for i in range(4)]
    expected = tokens_of(deterministic, own_prompts[:4], schemas, 4)
    names = ("unfiltered", "penalties", "repetition", "min_new_tokens")
    kinds = [sampled(i, **SETTINGS[name]) for i, name in enumerate(names, 4)]
    expected += [references[name][i] for i, name in enumerate(names, 4)]
    long = [[t for p in own_prompts[i:] + own_prompts[:i] for t in p] for i in range(8)]
    plain = [sampled(i, max_new_tokens=2) for i in range(8)]
    # A schema's and another kind's by turns, each with a long prompt.
    order = [i // 2 + i % 2 * 4 for i in range(8)]
    short = [(own_prompts[:8][i], (schemas + kinds)[i]) for i in order]
    asked = [one for pair in zip(short, zip(long, plain, strict=True), strict=True) for one in pair]
    mixed_chunks = ("--enable-mixed-chunk", "--chunked-prefill-size", "32")
    arguments = (*FP32, *mixed_chunks, *hyperdflash_arguments(drafter_dir))
    server = servers.get("exact-mixed", target_dir, *arguments)
    found = together(server, *zip(*asked, strict=True))[::2]
    servers.stop("exact-mixed")
    assert found == [expected[i] for i in order]


def test_custom_processors_see_every_token(small_pool, deterministic, own_prompts):
    """Though ours has overlap scheduling on, where SGLang's own host may be a token late."""
    options = {"custom_logit_processor": OutputDependent.to_str()}
    for temperature in (0, 1):
        parameters = [sampled(i, temperature=temperature, custom_params={}) for i in range(4)]
        prompts = own_prompts[:4]
        expected = tokens_of(deterministic, prompts, parameters, 1, **options)
        assert tokens_of(small_pool, prompts, parameters, 4, **options) == expected


def test_drafting_stops_while_a_custom_processor_is_in_the_batch(
    small_pool, deterministic, own_prompts
):
    """Plain requests run blocks, then single rows with a processor's request, then blocks again."""
    options = {"custom_logit_processor": OutputDependent.to_str()}
    plain = [sampled(i, temperature=0, max_new_tokens=96) for i in range(3)]
    short = sampled(3, temperature=0, max_new_tokens=12, custom_params={})
    expected = tokens_of(deterministic, own_prompts[:3], plain, 3)
    processed = tokens_of(deterministic, own_prompts[3:4], [short], 1, **options)

    def ask_plain() -> list[dict]:
        return small_pool.generate(input_ids=own_prompts[:3], sampling_params=plain)

    def rounds(answers: list[dict]) -> int:
        return sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)

    without, met = rounds(ask_plain()), []

    def ask_both() -> None:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(ask_plain)
            for _ in range(3):  # at several points of the plain answers
                answer = small_pool.generate(
                    input_ids=own_prompts[3], sampling_params=short, **options
                )
                assert [answer["output_ids"]] == processed
                assert answer["meta_info"]["spec_num_correct_drafts"] == 0
                assert answer["meta_info"]["spec_verify_ct"] == 11
            answers = running.result()
        assert [answer["output_ids"] for answer in answers] == expected
        drafted = [answer["meta_info"]["spec_num_correct_drafts"] for answer in answers]
        assert min(drafted) > 0 and max(a["meta_info"]["spec_verify_ct"] for a in answers) < 95
        met.append(rounds(answers) > without + 11)  # single rows, where blocks took fewer

    until(lambda: any(met), meanwhile=ask_both)  # a slow client's request may come too late


class CallCounter(CustomLogitProcessor):
    """Prefers a token that depends on how often it was called, which it stores in two places."""

    def __call__(self, logits, custom_param_list=None):
        for row, parameters in zip(logits, custom_param_list, strict=True):
            req = parameters["__req__"]
            parameters["calls"] = parameters.get("calls", 0) + 1
            req.noted = getattr(req, "noted", 0) + 2
            row[40 + (parameters["calls"] + req.noted) % 7] += 6.0
        return logits


CallCounter.__module__ = "__main__"


def test_a_processor_is_called_once_per_token(small_pool, deterministic, own_prompts):
    """A draft, rejected or not, would be one call more."""
    options = {"custom_logit_processor": CallCounter.to_str()}
    for temperature in (0, 1):
        parameters = [sampled(i, temperature=temperature, custom_params={}) for i in range(4)]
        prompts = own_prompts[:4]
        expected = tokens_of(deterministic, prompts, parameters, 1, **options)
        assert tokens_of(small_pool, prompts, parameters, 4, **options) == expected
    # Without a processor in the batch, drafts are back.
    answer = small_pool.generate(input_ids=prompts[0], sampling_params=sampled(0, temperature=0))
    assert answer["meta_info"]["spec_num_correct_drafts"] > 0


@pytest.mark.parametrize("temperature", [HOT, 0])
def test_grammar_bias_penalties_and_logprobs_together(
    small_pool, deterministic, own_prompts, temperature
):
    """At once; every other request has a custom processor too."""
    setting = {
        "json_schema": json.dumps(SCHEMA),
        "frequency_penalty": 0.4,
        "logit_bias": {"20": 1.5},
        "ignore_eos": False,
        "max_new_tokens": 120,
        "temperature": temperature,
    }
    options = {"return_logprob": True, "top_logprobs_num": 3}

    def ask(pair):
        i, server = pair
        processor = {"custom_logit_processor": OutputDependent.to_str()} if i % 2 else {}
        parameters = sampled(i, **setting, custom_params={"again": 2.0} if i % 2 else None)
        payload = {"input_ids": own_prompts[8 + i], "sampling_params": parameters}
        return server.generate(**payload, **options, **processor)

    with ThreadPoolExecutor(4) as pool:
        both = [
            list(pool.map(ask, [(i, server) for i in range(4)]))
            for server in (deterministic, small_pool)
        ]
    for plain, drafted in zip(*both, strict=True):
        assert drafted["output_ids"] == plain["output_ids"]
        for kind in ("output_token_logprobs", "output_top_logprobs"):
            a, b = plain["meta_info"][kind], drafted["meta_info"][kind]
            if kind == "output_top_logprobs":
                a, b = ([x for row in rows for x in row] for rows in (a, b))
            assert [x[1] for x in a] == [x[1] for x in b]
            assert max(abs(x[0] - y[0]) for x, y in zip(a, b, strict=True)) < 1e-3


def test_choices_without_a_seed_differ(hyper_server, own_prompts):
    parameters = {"temperature": HOT, "max_new_tokens": TOKENS, "ignore_eos": True, "n": 6}
    answers = hyper_server.generate(input_ids=own_prompts[0], sampling_params=parameters)
    assert len({tuple(a["output_ids"]) for a in answers}) == 6


def test_openais_seed_is_the_seed(hyper_server):
    messages = [{"role": "user", "content": "Can I get a small coffee with milk?"}]
    payload = {"model": "m", "messages": messages, "temperature": 2, "max_tokens": 40}

    def text(**more):
        url = f"{hyper_server.url}/v1/chat/completions"
        answer = requests.post(url, json={**payload, **more}, timeout=PATIENCE)
        answer.raise_for_status()
        return answer.json()["choices"][0]["message"]["content"]

    assert text(seed=7) == text(seed=7) != text(seed=8)
    assert text(frequency_penalty=0.5, presence_penalty=0.5)


@pytest.fixture(scope="module")
def long_runs(deterministic, benchmark_prompts) -> list[tuple[list[dict], list[list[int]]]]:
    """Parameters and the baseline's tokens: sixty prompts x 128 tokens, thirty x 96 penalised.

    Deterministic inference gives the same whatever the batch, so eight are asked at a time.
    """
    settings = ({}, {"temperature": 1}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1})
    every = [
        [sampled(i, **setting, max_new_tokens=128) for i in range(len(benchmark_prompts))]
        for setting in settings
    ]
    greedy = list(GREEDY.values())
    every.append(
        [sampled(i, **{"temperature": 0, **greedy[i % 3], "max_new_tokens": 96}) for i in range(30)]
    )
    return [
        (parameters, tokens_of(deterministic, benchmark_prompts[: len(parameters)], parameters, 8))
        for parameters in every
    ]


@pytest.fixture
def served(request, servers, target_dir, drafter_dir):
    """The server of one form; only what the form needs is started."""
    if request.param != "exact-no-overlap":
        yield request.getfixturevalue(request.param)
        return
    arguments = (*FP32, "--disable-overlap-schedule", *hyperdflash_arguments(drafter_dir))
    yield servers.get(request.param, target_dir, *arguments)
    servers.stop(request.param)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("served", "concurrency"),
    [
        pytest.param("hyper_server", 8, id="eight"),
        pytest.param("hyper_server", 1, id="one"),
        pytest.param("exact-no-overlap", 8, id="no-overlap"),
        pytest.param("small_pool", 12, id="retraction"),
    ],
    indirect=["served"],
)
def test_sixty_benchmark_prompts(request, served, benchmark_prompts, long_runs, concurrency):
    before = retractions(served)
    for parameters, expected in long_runs:
        prompts = benchmark_prompts[: len(parameters)]
        assert tokens_of(served, prompts, parameters, concurrency) == expected
    small = request.node.callspec.id == "retraction"
    assert (retractions(served) > before) == small
