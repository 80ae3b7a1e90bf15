"""A row of logits that holds a NaN or infinity ends its own request only."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from tests.engine.test_exact import SCHEMA, TOKENS, sampled
from tests.waiting import PATIENCE


@pytest.mark.parametrize("grammar", [{}, {"json_schema": json.dumps(SCHEMA)}], ids=["", "json"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_broken_row_ends_its_request_and_no_other(
    hyper_server, own_prompts, temperature, grammar
):
    """SGLang's finish: a stop at "NaN happened"; an error where a grammar looks first."""
    # 1e39 is infinite in fp32.
    setting = sampled(0, temperature=temperature, logit_bias={"20": 1e39}, **grammar)
    payload = {"input_ids": own_prompts[0], "sampling_params": setting}
    good = {"input_ids": own_prompts[1], "sampling_params": sampled(1, temperature=temperature)}
    expected = hyper_server.generate(**good)["output_ids"]
    # The text of a broken row's token is asked for too: an id that no tokenizer has would end it.
    text = {"return_logprob": True, "return_text_in_logprobs": True, "top_logprobs_num": 2}
    url = f"{hyper_server.url}/generate"
    for options in ({}, text):
        with ThreadPoolExecutor(2) as pool:
            other = pool.submit(lambda: hyper_server.generate(**good))
            answer = requests.post(url, json=payload | options, timeout=PATIENCE)
            assert other.result()["output_ids"] == expected
        if grammar and answer.status_code != 200:
            assert answer.status_code == 500 and "Grammar accept_token failed" in answer.text
            continue
        reason = answer.json()["meta_info"]["finish_reason"]
        assert reason == {"type": "stop", "matched": "NaN happened"}
        assert len(answer.json()["output_ids"]) == 1


def test_a_broken_row_does_not_end_its_batchmates_sampling_mask(hyper_server, own_prompts):
    """One prefill of both: SGLang draws the mask's batch by itself, the broken row with it."""
    settings = [sampled(0, temperature=0), sampled(1, logit_bias={"20": 1e39})]
    for _ in range(3):  # two requests of one call seldom miss each other
        whole, broken = hyper_server.generate(
            input_ids=own_prompts[:2],
            sampling_params=settings,
            return_sampling_mask=[True, False],
        )
        assert broken["meta_info"]["finish_reason"]["matched"] == "NaN happened"
        mask = whole["meta_info"]["output_token_sampling_mask"]
        assert mask == [[token] for token in whole["output_ids"]] and len(mask) == TOKENS
