"""SGLang's own tests of a server, which its wheel ships, of a server with HYPERDFLASH.

Kits of what other tests here compare with the baseline (texts, stops, grammars, penalties) are not
run again.
"""

import importlib
import json
import random
import shutil
import unittest
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from tests.engine.conftest import FP32

pytestmark = pytest.mark.slow
KITS = "sglang.test.kits"
# Servers besides the suite's own: arguments and environment.
OWN = "the suite's own"
SESSIONS = "--enable-streaming-session"
CHECKS = ("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "SGLANG_CHECK_KV_PAGE_INVARIANTS")
SETTINGS = {
    "wide": (("--max-running-requests", "32"), {}),
    "one-at-a-time": (("--max-running-requests", "1"), {"SGLANG_REQ_WAITING_TIMEOUT": "0.001"}),
    "one-second": (("--max-running-requests", "32"), {"SGLANG_REQ_RUNNING_TIMEOUT": "1"}),
    "sessions": (("--max-running-requests", "32", SESSIONS), dict.fromkeys(CHECKS, "1")),
    "short-sessions": (("--context-length", "512", SESSIONS), {}),
}
# Kits take Llama's vocabulary and context for granted.
VOCABULARY, WIDE, CONTEXT = 1363, 32_768, 131_072
# Of each kit that runs: its server, and what it reads off itself.
SHORT = {"type": "string", "pattern": "^[a-z]{1,8}$"}
PROPERTIES = {"name": SHORT, "population": {"enum": [7, 12]}, "country": SHORT, "capital": SHORT}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": list(PROPERTIES)}
SCHEMA["additionalProperties"] = False
RUN = {
    "abort_timeout_kit.AbortAllMixin": ("wide", {}),
    "abort_timeout_kit.WaitingTimeoutMixin": ("one-at-a-time", {}),
    "abort_timeout_kit.RunningTimeoutTwoWaveMixin": ("one-second", {}),
    "anthropic_messages_kit.AnthropicMessagesMixin": (OWN, {}),
    "basic_api_contract_kit.BasicAPIContractMixin": (OWN, {}),
    "pause_generation_kit.PauseResumeInPlaceMixin": (OWN, {"pause_ignore_eos": True}),
    "spec_server_kits.SpecCorrectnessKit": (OWN, {"acc_length_thres": 0.99}),
    "spec_server_kits.SpecFeatureKit": ("wide", {}),
    "spec_server_kits.SpecGrammarKit": (OWN, {"grammar_json_schema": json.dumps(SCHEMA)}),
    "spec_server_kits.SpecLogprobKit": ("wide", {"logprob_match_delta": 1e-3}),
    "spec_server_kits.SpecSamplingMaskKit": (OWN, {}),
    "streaming_session_kit.StreamingSessionKitMixin": ("sessions", {}),
    "streaming_session_kit.AbortLeakReproKitMixin": ("short-sessions", {}),
    "unified_radix_cache_kit.UnifiedRadixTreeTestMixin": ("wide", {"max_new_tokens": 64}),
}
# They take a trained model, which does not end its answer at once, or minutes on a CPU.
LEFT_OUT = {"test_constrained_decoding", "test_radix_attention", "test_logprob_mixed"}
LEFT_OUT |= {"test_nth_mid_abort_recovery", "test_first_mid_abort_recovery", "test_gsm8k"}


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
def server(servers, target_dir, drafter_dir, hyper_server, tmp_path_factory):
    """The server of a setting; of the wide ones, one runs at a time."""
    root = tmp_path_factory.mktemp("wide")
    target, drafter = widened(target_dir, root / "target"), widened(drafter_dir, root / "drafter")

    def stop_others(setting: str) -> None:
        for name in servers.running.keys() & SETTINGS.keys() - {setting}:
            servers.stop(name)

    def get(setting: str):
        if setting == OWN:
            return hyper_server
        stop_others(setting)
        arguments, environment = SETTINGS[setting]
        arguments = (*FP32, *arguments, *hyperdflash_arguments(drafter))
        return servers.get(setting, target, *arguments, environment=environment)

    yield get
    stop_others(OWN)


@pytest.mark.parametrize("kit", sorted(RUN, key=lambda kit: RUN[kit][0]))  # a server at a time
def test_kit(server, target_dir, tokenizer, kit):
    from sglang.test.server_fixtures.spec_eagle_fixture import SpecEagleServerBase

    setting, attributes = RUN[kit]
    running, draw = server(setting), random.Random(1)
    attributes = attributes | {
        "model": str(target_dir),
        "tokenizer": tokenizer,
        "api_key": "none",
        "input_ids": [[draw.randrange(5, VOCABULARY) for _ in range(1024)] for _ in range(4)],
        "base_url": running.url,
        # SGLang ends the process of the tests where a Popen ends.
        "process": SimpleNamespace(poll=running.process.poll),
        "client": openai.OpenAI(base_url=f"{running.url}/v1", api_key="none"),
    }
    module, _, name = kit.partition(".")
    mixin = getattr(importlib.import_module(f"{KITS}.{module}"), name)
    case, result = type(name, (mixin, SpecEagleServerBase), attributes), unittest.TestResult()
    tests = {each for each in vars(mixin) if each.startswith("test_")} - LEFT_OUT
    for each in sorted(tests):
        random.seed(0)
        case(each).run(result)
    assert result.testsRun == len(tests) > 0 and not result.skipped
    assert not result.failures + result.errors
