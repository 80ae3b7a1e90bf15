"""Answers are exact: the baseline's by seed, by argmax, by logprobs, whatever is asked for."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engine import asking
from tests.engine.asking import CASES, GREEDY, HOT, TOKENS, UNPROCESSED, sampled
from tests.engine.conftest import retractions

pytestmark = pytest.mark.xdist_group("pair")


def test_the_baseline_tells_seeds_and_settings_apart(baseline):
    """Cases that are equal would show nothing."""
    found = {name: [choices[0]["ids"] for choices in baseline[name]] for name in CASES}
    assert len(set(map(str, found.values()))) == len(CASES)
    assert not any(a == b for a, b in zip(found["unfiltered"], found["greedy"], strict=True))
    assert 24 <= min(map(len, found["min_new_tokens"])) < TOKENS, "an end must be likely"
    for name in ("regex", "json", "n", "processor", "counter", "all and processor"):
        assert len(set(map(tuple, found[name]))) > 1, name


@pytest.mark.parametrize("concurrency", [32, pytest.param(3, marks=pytest.mark.slow)])
def test_answers_are_the_baselines(hyper_server, own_prompts, baseline, concurrency):
    """Every case but the processors': neighbours in a batch differ, and some have no seed."""
    unseeded = {"temperature": HOT, "max_new_tokens": 8, "ignore_eos": True, "n": 8}
    with ThreadPoolExecutor(1) as pool:
        more = {"input_ids": own_prompts[0], "sampling_params": unseeded}
        pool.submit(hyper_server.generate, **more)
        asking.assert_cases(hyper_server, UNPROCESSED, own_prompts, baseline, concurrency)


def test_choices_without_a_seed_differ(hyper_server, own_prompts):
    parameters = {"temperature": HOT, "max_new_tokens": TOKENS, "ignore_eos": True, "n": 6}
    found = hyper_server.generate(input_ids=own_prompts[0], sampling_params=parameters)
    assert len({tuple(a["output_ids"]) for a in found}) == 6


def test_openais_seed_is_the_seed(hyper_server):
    messages = [{"role": "user", "content": "Can I get a small coffee with milk?"}]
    payload = {"model": "m", "messages": messages, "temperature": 2, "max_tokens": 40}

    def text(**more):
        answer = asking.post(hyper_server, "/v1/chat/completions", {**payload, **more})
        return answer.json()["choices"][0]["message"]["content"]

    assert text(seed=7) == text(seed=7) != text(seed=8)


def test_greedy_rows_go_on_when_the_sampled_ones_have_ended(
    hyper_server, own_prompts, own_reference
):
    """SGLang's ``is_all_greedy`` stays False in such a batch; its blocks are greedy."""
    sampling = [
        {"temperature": i % 2, "max_new_tokens": 8 if i % 2 else 48, "ignore_eos": True}
        for i in range(4)
    ]
    found = asking.together(hyper_server, own_prompts[:4], sampling)
    assert found[::2] == [tokens[:48] for tokens in own_reference[:4:2]]


BIASED = {"temperature": 0, "logit_bias": {"20": 1e39}}  # infinite in fp32


@pytest.mark.parametrize("setting", [{}, {"temperature": 1}, {"regex": "[a-z ]{9,40}"}], ids=str)
def test_a_broken_row_ends_its_request_and_no_other(hyper_server, own_prompts, baseline, setting):
    """SGLang's finish: a stop at "NaN happened"; an error where a grammar looks first."""
    broken = sampled(0, **BIASED | setting)
    text = {"return_logprob": True, "return_text_in_logprobs": True, "top_logprobs_num": 2}
    for options in ({}, text):  # an id that no tokenizer has would end it
        asked = {"input_ids": own_prompts[0], "sampling_params": broken}
        answer = asking.post(hyper_server, "/generate", asked | options)
        if setting.get("regex") and answer.status_code != 200:
            assert answer.status_code == 500
            continue
        reason = answer.json()["meta_info"]["finish_reason"]
        assert reason == {"type": "stop", "matched": "NaN happened"}
        assert len(answer.json()["output_ids"]) == 1
    if not setting:  # one prefill of both, whose sampling mask SGLang draws by itself
        for _ in range(3):
            both = hyper_server.generate(
                input_ids=[own_prompts[1], own_prompts[0]],
                sampling_params=[sampled(1, temperature=0), broken],
                return_sampling_mask=[True, False],
            )
            mask = both[0]["meta_info"]["output_token_sampling_mask"]
            assert mask == [[token] for token in both[0]["output_ids"]] and len(mask) == TOKENS
        asked = {"input_ids": own_prompts[0], "sampling_params": sampled(1, top_k=3)}
        drawn = hyper_server.generate(**asked, return_sampling_mask=True)
        mask = drawn["meta_info"]["output_token_sampling_mask"]
        assert all(t in row for t, row in zip(drawn["output_ids"], mask, strict=True))
        assert max(map(len, mask)) == 3
    good = asking.payloads("unfiltered", own_prompts)[:2]
    asking.assert_equal(asking.answers(hyper_server, good, 2), baseline["unfiltered"][:2])


@pytest.fixture(scope="module")
def long_runs(target_server, benchmark_prompts) -> list[tuple[list, list[dict], list[list[int]]]]:
    """Parameters and the baseline's tokens, for the first so many benchmark prompts.

    The greedy ones reach positions far past anything the pair was trained on.
    """
    settings = ({}, {"temperature": 1}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1})
    every = [[sampled(i, **setting, max_new_tokens=128) for i in range(60)] for setting in settings]
    penalised = list(GREEDY.values())[1:]
    every.append([sampled(i, **penalised[i % 3], max_new_tokens=96) for i in range(30)])
    every.append([sampled(i, temperature=0, max_new_tokens=600) for i in range(60)])
    chosen = [(benchmark_prompts[: len(parameters)], parameters) for parameters in every]
    return [(*asked, asking.tokens_of(target_server, *asked, 8)) for asked in chosen]


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [8, 1])
def test_sixty_benchmark_prompts(hyper_server, long_runs, concurrency):
    for prompts, parameters, expected in long_runs:
        assert asking.tokens_of(hyper_server, prompts, parameters, concurrency) == expected
    assert not retractions(hyper_server)
