"""``hyperdflash plan --logprobs`` on what a real server returns."""

from __future__ import annotations

import requests

from sglang_hyperdflash.commands.plan_logprobs import bounds
from tests.waiting import PATIENCE


def test_plan_bounds_what_this_server_returned(hyper_server, own_prompts, tmp_path):
    path = tmp_path / "answers.jsonl"
    options = {"return_logprob": True, "top_logprobs_num": 5}
    sampling = {"temperature": 1, "max_new_tokens": 48, "ignore_eos": True}
    with path.open("w") as file:
        for number, prompt in enumerate(own_prompts[:6]):
            seeded = {"sampling_params": sampling | {"sampling_seed": number}}
            body = {"input_ids": prompt, **seeded, **options}
            answer = requests.post(f"{hyper_server.url}/generate", json=body, timeout=PATIENCE)
            file.write(answer.text + "\n")
        for number in range(6):
            messages = [{"role": "user", "content": f"Count up to 1{number}."}]
            body = {"model": "m", "messages": messages, "temperature": 1, "max_tokens": 48}
            body |= {"logprobs": True, "top_logprobs": 5, "ignore_eos": True}
            url = f"{hyper_server.url}/v1/chat/completions"
            file.write(requests.post(url, json=body, timeout=PATIENCE).text + "\n")
    found = bounds(path, (1, 7))
    assert (found.requests, found.tokens) == (12, 12 * 47)
    assert found.drawn_from_these
    assert 1 < found.own[7][0] <= found.argmax[7][0] <= 7
