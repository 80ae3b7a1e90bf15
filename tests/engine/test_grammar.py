"""A matcher in error ends its request with HTTP 500, and neither the server nor another request."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from tests.engine.conftest import FP32, greedy_all, ids, install_plugin

# ``fail:METHOD:N`` in a grammar: its N-th call of METHOD fails.
FAILING = """
import re

def load():
    from sglang.srt.constrained.llguidance_backend import GuidanceGrammar
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

    for kind in (GuidanceGrammar, XGrammarGrammar):
        for method in ("fill_vocab_mask", "accept_token", "rollback"):
            wrap(kind, method)

def wrap(kind, method):
    original = getattr(kind, method)

    def call(self, *args):
        text = getattr(self, "key_string", None) or self.serialized_grammar
        planted = re.search(f"fail:{method}:([0-9]+)", text)
        if planted:
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == int(planted[1]):
                raise ValueError("planted")
        return original(self, *args)

    setattr(kind, method, call)
"""
# EOS is all that these grammars allow where min_new_tokens forbids it.
IMPOSSIBLE = (
    {"regex": "yes|no", "min_new_tokens": 3, "max_new_tokens": 4},
    {"json_schema": '{"enum": ["ab"]}', "min_new_tokens": 12, "max_new_tokens": 20},
)
TEXT = r"[ -~\n]*"


@pytest.fixture(
    scope="module",
    params=["llguidance", pytest.param("xgrammar", marks=pytest.mark.slow)],
)
def failing_server(request, servers, target_dir, drafter_dir, tmp_path_factory) -> Server:
    plugin = install_plugin(tmp_path_factory.mktemp("plugin"), "failing", FAILING)
    arguments = ("--grammar-backend", request.param, *FP32, *hyperdflash_arguments(drafter_dir))
    if request.param == "llguidance":  # its own loop over a mixed batch passes by failed matchers
        arguments += ("--enable-mixed-chunk", "--chunked-prefill-size", "32")
    return servers.get(f"grammar-{request.param}", target_dir, *arguments, environment=plugin)


def ask(server: Server, prompt: list[int], **sampling) -> requests.Response:
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True, **sampling}
    payload = {"input_ids": prompt, "sampling_params": sampling}
    return requests.post(f"{server.url}/generate", json=payload, timeout=600)


@pytest.mark.parametrize("impossible", IMPOSSIBLE, ids=["regex", "json"])
def test_a_grammar_without_a_possible_token(failing_server, own_prompts, own_reference, impossible):
    """Alone, several at once, and next to requests that are answered."""
    request = {"ignore_eos": False, **impossible}
    assert ask(failing_server, [0, 2, 45, 3], **request).status_code == 500
    with ThreadPoolExecutor(2) as pool:
        healthy = pool.submit(greedy_all, failing_server, own_prompts, 4)
        several = pool.map(lambda p: ask(failing_server, p, **request), own_prompts[:6])
        assert [answer.status_code for answer in several] == [500] * 6
        assert ids(healthy.result()) == own_reference


def test_a_call_that_fails_ends_its_request(failing_server, own_prompts, own_reference):
    """At every position of a block, and in the rounds after it."""
    constrained = ask(failing_server, own_prompts[0], regex=TEXT)
    methods = {
        "fill_vocab_mask": range(2, 16),
        "accept_token": range(2, 16),
        "rollback": range(1, 13),
    }
    calls = [(method, number) for method, numbers in methods.items() for number in numbers]

    def status(call: tuple[str, int]) -> int:
        method, number = call
        regex = f"{TEXT}|fail:{method}:{number}"
        return ask(failing_server, own_prompts[0], regex=regex).status_code

    with ThreadPoolExecutor(4) as pool:
        healthy = pool.submit(greedy_all, failing_server, own_prompts, 2)
        assert list(pool.map(status, calls)) == [500] * len(calls)
        assert ids(healthy.result()) == own_reference
    again = ask(failing_server, own_prompts[0], regex=TEXT)
    assert again.json()["output_ids"] == constrained.json()["output_ids"]
