"""SGLang's own tests of a server, which its wheel ships, of a baseline and of HYPERDFLASH.

Each test of a kit must pass on both servers, or fail on both where ``FAIL`` says why, and what it
asks without sampling must get the same answers.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import random
import shutil
import unittest
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import openai
import pytest
import requests
import torch
from safetensors.torch import load_file, save_file

from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from tests.engine.conftest import FP32, TOOL_CALLS

KITS = "sglang.test.kits"
PATHS = {"/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages"}
# Pairs of servers besides the suite's own: arguments and environment of both.
OWN = "the suite's own"
SETTINGS = {
    "wide": (("--max-running-requests", "32"), {}),
    "wide-one-at-a-time": (
        ("--max-running-requests", "1"),
        {"SGLANG_REQ_WAITING_TIMEOUT": "0.001"},
    ),
    "wide-one-second": (("--max-running-requests", "32"), {"SGLANG_REQ_RUNNING_TIMEOUT": "1"}),
    "wide-sessions": (
        ("--max-running-requests", "32", "--enable-streaming-session"),
        {
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
            "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
        },
    ),
    "wide-short-sessions": (("--context-length", "512", "--enable-streaming-session"), {}),
}
# Kits take Llama's vocabulary and context for granted.
VOCABULARY, WIDE, CONTEXT = 1363, 32_768, 131_072
# Of each kit that runs: its pair of servers, and what it reads off itself.
SHORT = {"type": "string", "pattern": "^[a-z]{1,8}$"}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": SHORT,
        "population": {"enum": [7, 12]},
        "country": SHORT,
        "capital": SHORT,
    },
    "required": ["name", "population", "country", "capital"],
    "additionalProperties": False,
}
RUN = {
    "abort_timeout_kit.AbortAllMixin": ("wide", {}),
    "abort_timeout_kit.WaitingTimeoutMixin": ("wide-one-at-a-time", {}),
    "abort_timeout_kit.RunningTimeoutTwoWaveMixin": ("wide-one-second", {}),
    "anthropic_messages_kit.AnthropicMessagesMixin": (OWN, {}),
    "basic_api_contract_kit.BasicAPIContractMixin": (OWN, {}),
    "basic_decode_correctness_kit.BasicDecodeCorrectnessMixin": (OWN, {}),
    "basic_scheduler_stress_kit.BasicSchedulerStressMixin": (OWN, {}),
    "ebnf_constrained_kit.EBNFConstrainedMixin": (OWN, {}),
    "json_constrained_kit.JSONConstrainedMixin": (OWN, {"json_schema": json.dumps(SCHEMA)}),
    "matched_stop_kit.MatchedStopMixin": (OWN, {}),
    "pause_generation_kit.PauseResumeInPlaceMixin": (OWN, {"pause_ignore_eos": True}),
    "regex_constrained_kit.RegexConstrainedMixin": (OWN, {}),
    "spec_server_kits.SpecCorrectnessKit": (OWN, {"acc_length_thres": 0.99}),
    "spec_server_kits.SpecFeatureKit": ("wide", {}),
    "spec_server_kits.SpecGrammarKit": (OWN, {"grammar_json_schema": json.dumps(SCHEMA)}),
    "spec_server_kits.SpecLogprobKit": ("wide", {"logprob_match_delta": 1e-3}),
    "spec_server_kits.SpecParityKit": (OWN, {}),
    "spec_server_kits.SpecPenaltyKit": (OWN, {}),
    "spec_server_kits.SpecSamplingMaskKit": (OWN, {}),
    "streaming_session_kit.StreamingSessionKitMixin": ("wide-sessions", {}),
    "streaming_session_kit.AbortLeakReproKitMixin": ("wide-short-sessions", {}),
    "unified_radix_cache_kit.UnifiedRadixTreeTestMixin": ("wide", {"max_new_tokens": 64}),
}
# It reads what no baseline says.
OURS_ALONE = {"spec_server_kits.SpecGrammarKit"}
# Tests whose verdict takes a trained model: both servers fail, and say the same.
FACT, ENDS = "a fact", "the tiny target ends its answer at once, or with another token"
DECODE, STRESS, STOP, SESSION = (
    "basic_decode_correctness_kit.BasicDecodeCorrectnessMixin",
    "basic_scheduler_stress_kit.BasicSchedulerStressMixin",
    "matched_stop_kit.MatchedStopMixin",
    "streaming_session_kit.StreamingSessionKitMixin",
)
FAIL = {
    f"{DECODE}.test_capital_france": FACT,
    f"{DECODE}.test_basic_math": FACT,
    f"{DECODE}.test_color_completion": FACT,
    f"{STRESS}.test_streaming_response": FACT,
    f"{STRESS}.test_concurrent_requests": FACT,
    f"{STOP}.test_finish_stop_str": ENDS,
    f"{STOP}.test_finish_stop_regex_str": ENDS,
    f"{STOP}.test_finish_stop_eos": ENDS,
    f"{STOP}.test_finish_length": ENDS,
}
LEFT_OUT = {
    f"{STRESS}.test_long_prompt": "13,600 tokens: two minutes on a CPU",
    "ebnf_constrained_kit.EBNFConstrainedMixin.test_ebnf_generate_complex_json": "may never end",
    "regex_constrained_kit.RegexConstrainedMixin.test_regex_generate_complex_json": "as this one",
    "spec_server_kits.SpecFeatureKit.test_constrained_decoding": "as this one",
    "spec_server_kits.SpecFeatureKit.test_radix_attention": "400 requests: minutes on a CPU",
    "spec_server_kits.SpecLogprobKit.test_logprob_mixed": "44,000 rows of logprobs: minutes",
    f"{SESSION}.test_nth_mid_abort_recovery": ENDS,
    f"{SESSION}.test_first_mid_abort_recovery": ENDS,
    "unified_radix_cache_kit.UnifiedRadixTreeTestMixin.test_gsm8k": "a score of a trained model",
}


def names_of(kit: str) -> list[str]:
    """The tests of a kit that run here."""
    (folder,) = importlib.util.find_spec(KITS).submodule_search_locations
    module, _, name = kit.partition(".")
    body = ast.parse((Path(folder) / f"{module}.py").read_text()).body
    (node,) = (one for one in body if getattr(one, "name", "") == name)
    names = (getattr(one, "name", "") for one in node.body)
    tests = [one for one in names if one.startswith("test_")]
    return [test for test in tests if f"{kit}.{test}" not in LEFT_OUT]


# One pair of servers after the other.
CASES = [(kit, test) for kit in sorted(RUN, key=lambda kit: RUN[kit][0]) for test in names_of(kit)]


def widened(source: Path, folder: Path) -> Path:
    """A checkpoint with Llama's vocabulary and context; no added id is ever the likeliest."""
    shutil.copytree(source, folder)
    config = (source / "config.json").read_text()
    for old, new in ((VOCABULARY, WIDE), (2048, CONTEXT)):
        config = config.replace(f": {old}", f": {new}")
    (folder / "config.json").write_text(config)
    weights = load_file(source / "model.safetensors")
    for name, tensor in weights.items():
        if len(tensor) == VOCABULARY:
            weights[name] = tensor[torch.arange(WIDE) % VOCABULARY]
    if "head.weight" in weights:
        weights["head.weight"][VOCABULARY:] = 0
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def pair(servers, target_dir, drafter_dir, hyper_server, tmp_path_factory):
    """Baseline and HYPERDFLASH of a setting, in that order."""
    root = tmp_path_factory.mktemp("wide")
    target, drafter = widened(target_dir, root / "target"), widened(drafter_dir, root / "drafter")
    algorithms = {"baseline": (), "hyperdflash": hyperdflash_arguments(drafter)}

    def get(setting: str) -> tuple[Server, ...]:
        if setting == OWN:
            plain = (*FP32, *TOOL_CALLS, "--enable-return-hidden-states")
            return servers.get("kits-target", target_dir, *plain), hyper_server
        stop_others(setting)
        arguments, environment = SETTINGS[setting]
        options = (*FP32, *arguments)
        return tuple(
            servers.get(f"{setting}-{name}", target, *options, *more, environment=environment)
            for name, more in algorithms.items()
        )

    def stop_others(setting: str | None = None) -> None:
        others = [
            f"{other}-{name}" for other in SETTINGS for name in algorithms if other != setting
        ]
        for name in servers.running.keys() & set(others):
            servers.stop(name)

    yield get
    stop_others()


def greedy_request(request: requests.PreparedRequest) -> dict | None:
    """The body of a request for text, if nothing in it is sampled."""
    if request.path_url not in PATHS or not isinstance(request.body, bytes):
        return None
    body = json.loads(request.body)
    sampling = body.get("sampling_params", body)
    sampling = sampling if isinstance(sampling, list) else [sampling]
    return body if all(one.get("temperature") == 0 for one in sampling) else None


def said(reply: object) -> list:
    """Text and end of every answer in a reply, but of those that were aborted."""
    found = []
    for one in reply if isinstance(reply, list) else [reply]:
        if "meta_info" in one:
            one["finish_reason"] = one["meta_info"]["finish_reason"]
        answers = one.get("choices", [one])
        found += [
            [answer.get(name) for name in ("text", "message", "content", "finish_reason", "code")]
            for answer in answers
            if "abort" not in str(answer.get("finish_reason"))
        ]
    return found


@contextmanager
def greedy_answers() -> Iterator[dict[str, set[str]]]:
    """What this process asks meanwhile by ``requests`` that is not sampled, and is answered."""
    found, send = defaultdict(set), requests.Session.send

    def record(session, request, **options):
        body = greedy_request(request)
        if body is None:
            return send(session, request, **options)
        # A session's name is random.
        body.pop("session_params", None)
        answers = found[f"{request.path_url} {json.dumps(body)}"]
        answer = send(session, request, **options)
        if not options.get("stream"):
            answers |= {json.dumps(one) for one in said(answer.json())}
        return answer

    with mock.patch.object(requests.Session, "send", record):
        yield found


def run_kit(kit: str, test: str, attributes: dict) -> tuple[list[str], dict[str, set[str]]]:
    """What is wrong in one test of a kit, as a class of SGLang's; its greedy answers."""
    from sglang.test.server_fixtures.spec_eagle_fixture import SpecEagleServerBase

    module, _, name = kit.partition(".")
    mixin = getattr(importlib.import_module(f"{KITS}.{module}"), name)
    case = type(name, (mixin, SpecEagleServerBase), attributes)(test)
    result = unittest.TestResult()
    random.seed(0)
    with greedy_answers() as answers:
        case.run(result)
    assert result.testsRun == 1 and not result.skipped
    return [text for _, text in result.failures + result.errors], answers


@pytest.mark.slow
@pytest.mark.parametrize(("kit", "test"), CASES)
def test_kit(pair, target_dir, tokenizer, kit, test):
    from sglang.test.kits import spec_server_kits

    setting, attributes = RUN[kit]
    parity = spec_server_kits.SpecParityKit.parity_prompts
    ids = random.Random(1)
    common = {
        "model": str(target_dir),
        "tokenizer": tokenizer,
        "api_key": "none",
        "parity_ref_outputs": {p: spec_server_kits._greedy(pair(OWN)[0].url, p) for p in parity},
        "input_ids": [[ids.randrange(5, VOCABULARY) for _ in range(1024)] for _ in range(4)],
    }
    found = []
    for server in pair(setting)[kit in OURS_ALONE :]:
        own = {
            "base_url": server.url,
            # SGLang ends the process of the tests where a Popen ends.
            "process": SimpleNamespace(poll=server.process.poll),
            "client": openai.OpenAI(base_url=f"{server.url}/v1", api_key="none"),
        }
        found.append(run_kit(kit, test, common | own | attributes))
    for wrong, _ in found:
        assert bool(wrong) == (f"{kit}.{test}" in FAIL), "\n".join(wrong)
    baseline, ours = found[0][1], found[-1][1]
    assert ours.keys() == baseline.keys()
    # Nothing is compared with what a client or a time limit cut off.
    both = [asked for asked in ours if ours[asked] and baseline[asked]]
    assert not [asked for asked in both if ours[asked] != baseline[asked]]
