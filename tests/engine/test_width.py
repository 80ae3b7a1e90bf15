"""Rounds of any width give the baseline's tokens; hardest is a random width every round."""

from __future__ import annotations

import json

import pytest
import requests

from sglang_hyperdflash.commands.plan_logprobs import read_costs
from sglang_hyperdflash.serving.draft_kv.size import POOL_RATIO
from sglang_hyperdflash.serving.scheduler.metrics import (
    ACCEPTED,
    DRAFTED,
    ROUNDS,
    SECONDS,
    WIDTH_NOW,
    WIDTH_ROUNDS,
)
from sglang_hyperdflash.serving.width.settings import WIDTH, WIDTHS
from sglang_hyperdflash.tools.acceptance import drafted_positions
from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from tests.engine.conftest import (
    FP32,
    NEW_TOKENS,
    OPTIMISTIC,
    SMALL_POOL,
    greedy,
    greedy_all,
    ids,
    install_plugin,
    retractions,
)
from tests.engine.drafters import with_window
from tests.engine.test_api import SCHEMA
from tests.engine.test_exact import SETTINGS, sampled, tokens_of
from tests.engine.test_metrics import samples

EVERY = {WIDTHS: "1,2,4,7"}
RANDOM = {WIDTH: "random", **EVERY}
SCHEMA_ONLY = {"json_schema": json.dumps(SCHEMA), "ignore_eos": False, "max_new_tokens": 80}
PENALTIES = {"frequency_penalty": 0.6, "presence_penalty": 0.3, "repetition_penalty": 1.2}


def start(servers, name: str, target_dir, draft, *arguments: str, **environment) -> Server:
    arguments = (*FP32, "--enable-metrics", *arguments, *hyperdflash_arguments(draft))
    return servers.get(name, target_dir, *arguments, environment=environment)


@pytest.fixture(scope="module")
def random_server(servers, target_dir, drafter_dir):
    """A width drawn every round; prompts in chunks of 64 tokens."""
    chunks = ("--chunked-prefill-size", "64")
    yield start(servers, "width-random", target_dir, drafter_dir, *chunks, **RANDOM)
    servers.stop("width-random")


def seeded_kinds() -> list[dict]:
    """Parameters of eight requests: plain, filtered, penalised and with a grammar by turns."""
    kinds = ({}, {"top_p": 0.8}, PENALTIES, SCHEMA_ONLY)
    return [sampled(i, **kinds[i % 4]) for i in range(8)]


def by_label(server: Server, family: str, label: str) -> dict[str, float]:
    found = samples(server, family)
    return {dict(labels)[label]: value for labels, value in found.items()}


def assert_every_width_ran(answers: list[dict]) -> None:
    """Rounds of all four widths were verified, and wide ones accepted drafts."""
    caps = [sum(column) for column in zip(*map(caps_of, answers), strict=True)]
    assert [width for width, rounds in enumerate(caps) if rounds] == [1, 2, 4, 7], caps
    assert sum(a["meta_info"]["spec_num_correct_drafts"] for a in answers) > len(answers)


def caps_of(answer: dict) -> list[int]:
    """Rounds by their width, from 0 to 7."""
    found = answer["meta_info"]["spec_cap_lens_histogram"]
    return found + [0] * (8 - len(found))


def test_greedy_tokens_cold_and_from_the_prefix_cache(random_server, own_prompts, own_reference):
    for concurrency in (4, 8):
        answers = greedy_all(random_server, own_prompts, concurrency)
        assert ids(answers) == own_reference
        assert_every_width_ran(answers)
    assert all(a["meta_info"]["cached_tokens"] > 0 for a in answers)
    longer = [p + r[:50] for p, r in zip(own_prompts, own_reference, strict=True)]
    found = ids(greedy_all(random_server, longer, 4))
    assert [a[: NEW_TOKENS - 50] for a in found] == [r[50:] for r in own_reference]


@pytest.mark.parametrize(
    "name",
    [
        "unfiltered",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("top-p 0.8", "penalties")),
    ],
)
def test_a_seed_gives_the_tokens_of_whole_blocks(random_server, hyper_server, own_prompts, name):
    parameters = [sampled(i, **SETTINGS[name]) for i in range(8)]
    both = [tokens_of(s, own_prompts[:8], parameters, 4) for s in (random_server, hyper_server)]
    assert both[0] == both[1]


def test_grammar_and_penalties(random_server, hyper_server, target_server, own_prompts):
    sampling = {"temperature": 0, "max_new_tokens": 120, "json_schema": json.dumps(SCHEMA)}
    payload = {"input_ids": own_prompts[8:], "sampling_params": sampling}
    texts = [[a["text"] for a in s.generate(**payload)] for s in (random_server, target_server)]
    assert texts[0] == texts[1]

    def ask(server, prompt):
        return greedy(server, prompt, 48, sampling=PENALTIES)

    found = [ids(greedy_all(s, own_prompts[:6], 3, ask)) for s in (random_server, hyper_server)]
    assert found[0] == found[1]


def test_logprobs_of_narrow_rounds_are_the_baselines(
    random_server, target_server, hyper_server, own_prompts
):
    options = {"return_logprob": True, "top_logprobs_num": 3}
    for prompt in own_prompts[:2]:
        plain, found = (
            [t[0] for t in greedy(s, prompt, 40, **options)["meta_info"]["output_token_logprobs"]]
            for s in (target_server, random_server)
        )
        assert found == pytest.approx(plain, abs=2e-4)
    for i, prompt in enumerate(own_prompts[:2]):
        payload = {"input_ids": prompt, "sampling_params": sampled(i, top_p=0.8), **options}
        whole, found = (
            s.generate(**payload)["meta_info"]["output_token_logprobs"]
            for s in (hyper_server, random_server)
        )
        assert [t[1] for t in found] == [t[1] for t in whole]
        assert [t[0] for t in found] == pytest.approx([t[0] for t in whole], abs=2e-4)


def test_counters_are_right_when_widths_change(random_server, own_prompts):
    families = (ACCEPTED, DRAFTED)
    before = [by_label(random_server, family, "position") for family in families]
    rounds = sum(samples(random_server, ROUNDS).values())
    answers = greedy_all(random_server, own_prompts[:4], 2)
    after = [by_label(random_server, family, "position") for family in families]
    accepted, drafted = (
        [now[str(k)] - then[str(k)] for k in range(1, 7)]
        for now, then in zip(after, before, strict=True)
    )
    histograms = [a["meta_info"]["spec_correct_drafts_histogram"] for a in answers]
    assert accepted == [sum(sum(h[k:]) for h in histograms) for k in range(1, 7)]
    caps = [sum(column) for column in zip(*map(caps_of, answers), strict=True)]
    assert drafted == drafted_positions(caps, 6) == [sum(caps[k + 1 :]) for k in range(1, 7)]
    total = sum(samples(random_server, ROUNDS).values()) - rounds
    assert total == sum(caps) and drafted[0] < total
    assert set(by_label(random_server, WIDTH_ROUNDS, "width")) == {"1", "2", "4", "7"}
    assert next(iter(samples(random_server, WIDTH_NOW).values())) in (1, 2, 4, 7)


def assert_drafts_are_counted(details: dict) -> None:
    """The proposed drafts of an answer are one less than the width of each of its rounds."""
    caps = details["spec_cap_lens_histogram"]
    proposed = sum((width - 1) * rounds for width, rounds in enumerate(caps) if rounds)
    assert details["spec_num_proposed_drafts"] == proposed > 0
    rate = details["spec_num_correct_drafts"] / proposed
    assert details["spec_accept_rate"] == pytest.approx(rate)


def test_accept_rates_are_of_the_drafts_that_were_made(random_server, own_prompts):
    sampling = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True, "n": 2}
    payload = {"input_ids": own_prompts[0], "sampling_params": sampling}
    chat = {"model": "default", "messages": [{"role": "user", "content": "Add 2 and 3."}]}
    chat |= {"max_tokens": 60, "ignore_eos": True, "return_spec_tokens_details": True}
    reply = requests.post(f"{random_server.url}/v1/chat/completions", json=chat, timeout=60).json()
    stream = requests.post(f"{random_server.url}/generate", json=payload | {"stream": True}).text
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    answers = [*random_server.generate(**payload), *events]
    ended = [a["meta_info"] for a in answers if a["meta_info"]["finish_reason"]]
    assert len(ended) == 4
    for details in (*ended, reply["sglext"]["spec_tokens_details"]):
        assert_drafts_are_counted(details)
    # The gauges of the last log interval: lengths with a round's own token, by round.
    length, width, rate = (
        next(iter(samples(random_server, f"sglang:spec_{name}").values()))
        for name in ("accept_length", "cap_length", "accept_rate")
    )
    assert 1 < width < 7 and rate == pytest.approx((length - 1) / (width - 1))


def test_without_a_variable_the_width_follows_load(
    servers, target_dir, drafter_dir, own_prompts, own_reference, tmp_path
):
    """No test can foresee its widths; the answers are the baseline's, and all were timed."""
    name = "width-default"
    server = start(servers, name, target_dir, drafter_dir, **{WIDTH: ""})
    try:
        for _ in range(2):
            assert ids(greedy_all(server, own_prompts, 8)) == own_reference
        rounds = by_label(server, WIDTH_ROUNDS, "width")
        assert sum(rounds.values()) and sorted(rounds) == ["1", "7"]
        timed = by_label(server, SECONDS, "width")
        assert all(timed[width] > 0 for width in rounds)
        (tmp_path / "metrics.txt").write_text(requests.get(f"{server.url}/metrics").text)
        assert read_costs(tmp_path / "metrics.txt").widths == (1, 7)
    finally:
        servers.stop(name)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_a_forced_width(
    servers, hyper_server, target_dir, drafter_dir, own_prompts, own_reference, width
):
    name = f"width-{width}"
    server = start(servers, name, target_dir, drafter_dir, **{WIDTH: str(width)})
    try:
        answers = greedy_all(server, own_prompts, 4)
        assert ids(answers) == own_reference
        most = max(len(a["meta_info"].get("spec_correct_drafts_histogram", [])) for a in answers)
        assert most == width
        parameters = [sampled(i) for i in range(8)]
        both = [tokens_of(s, own_prompts[:8], parameters, 4) for s in (server, hyper_server)]
        assert both[0] == both[1]
    finally:
        servers.stop(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    ["retraction", "overlap off", "window", "two ranks", "adaptive", "two ranks that adapt"],
)
def test_other_ways_to_serve(
    servers, hyper_server, target_dir, drafter_dir, own_prompts, own_reference, tmp_path, variant
):
    draft, arguments, environment = drafter_dir, (), dict(RANDOM)
    if variant == "retraction":
        arguments = SMALL_POOL
        environment |= install_plugin(tmp_path, "optimistic", OPTIMISTIC)
    elif variant == "overlap off":
        arguments = ("--disable-overlap-schedule",)
    elif variant == "window":
        draft = with_window(drafter_dir, tmp_path / "narrow", 32)
        arguments = ("--max-running-requests", "8")
        environment[POOL_RATIO] = "0.0068"
    elif variant == "two ranks":
        arguments = ("--tp-size", "2")
    else:
        environment = {WIDTH: "adaptive", **EVERY}
        arguments = ("--tp-size", "2") if variant.startswith("two") else ()
    name = f"width-{variant.replace(' ', '-')}"
    kinds = seeded_kinds()
    expected = tokens_of(hyper_server, own_prompts[:8], kinds, 4)
    server = start(servers, name, target_dir, draft, *arguments, **environment)
    try:
        for _ in range(2):
            assert tokens_of(server, own_prompts[:8], kinds, 8) == expected
            answers = greedy_all(server, own_prompts, 8)
            assert ids(answers) == own_reference
        if "adapt" not in variant:  # no test can foresee an adaptive server's widths
            assert len({width for a in answers for width, n in enumerate(caps_of(a)) if n}) > 1
        if variant == "retraction":
            assert retractions(server)
    finally:
        servers.stop(name)
